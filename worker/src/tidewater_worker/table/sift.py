"""Reading only the rows that a filter wants (G3, G4).

What cannot hold a wanted row is not read: whole files by the bounds in their manifest, row groups
by the statistics in their footer. Of the rest the columns that decide are read first, and the
other columns only if some row is wanted. All the same every offset is accounted for: a file or row
group is passed over unread only when its bounds and its number of rows leave no doubt which
offsets it holds (`Bounds.span`); of any other one at least the offsets are read. So a file that
somebody has lost is never taken for one that nobody wants.
"""

import threading
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidewater_core import names
from tidewater_worker.filters.wanted import Wanted
from tidewater_worker.ports import Sifted
from tidewater_worker.table.cover import Offsets, Span, check_cover, covered_to, missing
from tidewater_worker.table.facts import FileColumns, facts_of_file, facts_of_group
from tidewater_worker.table.ranges import (
    OFFSET_MAX,
    FileRange,
    RangeIndex,
    RowGroup,
    row_groups_of,
)
from tidewater_worker.table.reads import Reads
from tidewater_worker.table.row_groups import (
    Ahead,
    columns_by_name,
    offsets_of,
    rows_within,
)
from tidewater_worker.table.view import TableView

WINDOW_ROWS_MAX: Final = 131_072
WINDOW_BYTES_MAX: Final = 16 * 1024 * 1024
GIVEN_BYTES: Final = 2 * 1024 * 1024
"""As in `history`: what is sorted, and what is given, at once."""
FILES_AHEAD_MAX: Final = 16
"""Files looked at before they are needed, in search of the next that must be read."""


class Skipping:
    """Counts what filters saved. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("files_skipped", "row_groups_skipped", "row_groups_read", "rows_passed", "bytes_read",
             "bytes_skipped"), 0,
        )  # fmt: skip

    def add(self, **more: int) -> None:
        """Count."""
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def to_dict(self) -> dict[str, Any]:
        """Return the counts."""
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class _Looked:
    """What a row group has for a reader."""

    offsets: Offsets
    """Of all of the partition's rows."""
    rows: pa.Table
    """The wanted ones."""

    def within(self, start: int, end: int) -> "_Looked":
        inside = (self.offsets >= start) & (self.offsets < end)
        return _Looked(self.offsets[inside], rows_within(self.rows, start, end))


class _Groups(Ahead[_Looked]):
    """Reads of row groups what a filter wants."""

    def __init__(
        self,
        index: RangeIndex,
        view: TableView,
        partition: int,
        ahead: int,
        schema: pa.Schema,
        wanted: Wanted,
        skipping: Skipping,
        reads: Reads,
    ) -> None:
        super().__init__(index, view, partition, ahead, reads)
        self.schema = schema
        self._wanted = wanted
        self._skipping = skipping
        position = {names.TW_PARTITION, names.TW_OFFSET}
        deciding = position | wanted.columns
        self._position = pa.schema([f for f in schema if f.name in position])
        self._deciding = pa.schema([f for f in schema if f.name in deciding])
        known = {names.TW_OFFSET, *wanted.columns}
        self._rest = pa.schema([f for f in schema if f.name not in known])
        self._hopeless: set[RowGroup] = set()
        """Row groups without a wanted row, of which the offsets must be read."""
        self._columns: dict[str, FileColumns] = {}

    def skip_file(self, file: FileRange) -> Span | None:
        """Return the offsets of a file that need not be opened; None: it must be."""
        span = file.bounds.span(self._partition, file.rows)
        if span is None:
            return None
        if self._wanted.may_match(facts_of_file(file.columns, self._schema, self.schema)):
            return None
        self._skipping.add(files_skipped=1, bytes_skipped=file.nbytes, rows_passed=file.rows)
        return span

    def look_into(self, file: FileRange, start: int, end: int) -> tuple[list[Span], list[RowGroup]]:
        """Return the offsets of a file that need not be read, and the row groups that must be."""
        footer = self._index.footer(file.path, self._io)
        schema = footer.schema.to_arrow_schema()
        columns = FileColumns.of(footer, columns_by_name(schema, self._schema, self.schema))
        spans: list[Span] = []
        groups: list[RowGroup] = []
        for group in row_groups_of(file, footer):
            if not group.bounds.meets(self._partition, start, end):
                continue
            details = footer.row_group(group.index)
            if self._wanted.may_match(facts_of_group(details, columns, self.schema)):
                groups.append(group)
                continue
            span = group.bounds.span(self._partition, group.rows)
            if span is None:
                groups.append(group)
                self._hopeless.add(group)
            else:
                spans.append(span)
                nbytes = columns.bytes_of(details, set(self.schema.names))
                self._skipping.add(
                    row_groups_skipped=1, bytes_skipped=nbytes, rows_passed=group.rows
                )
        if groups:
            self._columns[file.path] = columns
        return spans, groups

    def keep(self, groups: list[RowGroup]) -> None:
        """Let go of what was noted about all row groups but these."""
        self._hopeless.intersection_update(groups)
        self._columns = {group.path: self._columns[group.path] for group in groups}

    def _decode(self, group: RowGroup) -> _Looked:
        if group in self._hopeless:
            rows = self._read(group, self._position)
            self._count(group, rows.num_rows, self._position, is_read=False)
            return _Looked(offsets_of(rows), self.schema.empty_table())
        rows = self._read(group, self._deciding)
        offsets = offsets_of(rows)
        masks = [self._wanted.mask(batch) for batch in rows.to_batches()]
        count = sum(mask.true_count for mask in masks)
        if not count:
            self._count(group, len(offsets), self._deciding)
            return _Looked(offsets, self.schema.empty_table())
        self._count(group, len(offsets) - count, self.schema)
        found = pa.chunked_array(masks, pa.bool_())
        # Both reads give the partition's rows in the file's order.
        others = self._read(group, self._rest).filter(found)
        rows = rows.filter(found)
        from_rest = set(self._rest.names)
        columns = [(others if f.name in from_rest else rows).column(f.name) for f in self.schema]
        return _Looked(offsets, pa.Table.from_arrays(columns, schema=self.schema))

    def _count(
        self, group: RowGroup, passed: int, read: pa.Schema, *, is_read: bool = True
    ) -> None:
        columns = self._columns[group.path]
        details = self._index.footer(group.path, self._io).row_group(group.index)
        nbytes = columns.bytes_of(details, set(read.names))
        whole = columns.bytes_of(details, set(self.schema.names))
        self._skipping.add(
            row_groups_read=int(is_read),
            row_groups_skipped=int(not is_read),
            rows_passed=passed,
            bytes_read=nbytes,
            bytes_skipped=whole - nbytes,
        )


@dataclass(slots=True)
class _Walk:
    """Goes over the offsets [position, end), window by window, opening files as it gets there."""

    groups: _Groups
    files: list[FileRange]
    """Not looked at yet, the lowest offset last."""
    partition: int
    position: int
    end: int
    ahead: int
    spans: list[Span] = field(default_factory=list)
    """What is passed over, sorted."""
    pending: list[RowGroup] = field(default_factory=list)
    """What must be read, by offset."""

    def step(self) -> tuple[int, list[_Looked]]:
        """Look at the next window; return its end and what was read of it."""
        self._open(self.position + WINDOW_ROWS_MAX)
        near = [g for g in self.pending if g.bounds.offsets[0] < self.position + WINDOW_ROWS_MAX]
        upto = min(self.end, self.position + _window_rows(near))
        if not near or near[0].bounds.offsets[0] >= upto:
            upto = self._pass_over(upto)
            check_cover(self.partition, self.position, upto, self.spans, [])
            return upto, []
        needed = [g for g in near if g.bounds.offsets[0] < upto]
        later = self.pending[len(needed) :]
        looked = [
            each.within(self.position, upto) for each in self.groups.each(needed, later, upto)
        ]
        offsets = [each.offsets for each in looked]
        check_cover(self.partition, self.position, upto, self.spans, offsets)
        return upto, looked

    def move(self, upto: int) -> None:
        """Forget what lies before a window's end."""
        self.position = upto
        self.pending = [g for g in self.pending if g.bounds.offsets[1] >= upto]
        self.groups.keep(self.pending)
        self.spans = [span for span in self.spans if span[1] > upto]

    def _open(self, upto: int) -> None:
        """Look at the files that may have rows below `upto`, and at a few of those after them."""
        extra = 0
        while self.files:
            file = self.files[-1]
            if file.bounds.offsets[0] >= upto:
                extra += 1
                if len(self.pending) > self.ahead or extra > FILES_AHEAD_MAX:
                    return
            self.files.pop()
            span = self.groups.skip_file(file)
            if span is not None:
                insort(self.spans, span)
                continue
            spans, groups = self.groups.look_into(file, self.position, self.end)
            for each in spans:
                insort(self.spans, each)
            self.pending = sorted([*self.pending, *groups], key=lambda g: g.bounds.offsets)

    def _pass_over(self, upto: int) -> int:
        """Nothing is to be read below `upto`: go as far as that holds."""
        covered = covered_to(self.position, self.spans)
        if covered < upto:
            raise missing(self.partition, covered)
        unread = self.pending[0].bounds.offsets[0] if self.pending else OFFSET_MAX
        unopened = self.files[-1].bounds.offsets[0] if self.files else OFFSET_MAX
        return min(self.end, covered, unread, unopened)


def sift(
    index: RangeIndex,
    view: TableView,
    files: Iterable[FileRange],
    partition: int,
    window: Span,
    schema: pa.Schema,
    wanted: Wanted,
    ahead: int,
    skipping: Skipping,
    reads: Reads,
) -> Iterator[Sifted]:
    """Yield the wanted rows of a window of offsets, in order, and how far each answer reaches."""
    start, end = window
    met = [file for file in files if file.bounds.meets(partition, start, end)]
    met.sort(key=lambda file: file.bounds.offsets, reverse=True)
    groups = _Groups(index, view, partition, ahead, schema, wanted, skipping, reads)
    walk = _Walk(groups, met, partition, start, end, ahead)
    try:
        while walk.position < end:
            upto, looked = walk.step()
            yield from _given(walk.position, upto, [each.rows for each in looked], schema)
            walk.move(upto)
    finally:
        groups.close()


def _window_rows(groups: list[RowGroup]) -> int:
    rows = max(1, sum(group.rows for group in groups))
    row_bytes = max(1, sum(group.nbytes for group in groups) // rows)
    return max(1, min(WINDOW_ROWS_MAX, WINDOW_BYTES_MAX // row_bytes))


def _given(start: int, end: int, parts: list[pa.Table], schema: pa.Schema) -> Iterator[Sifted]:
    """Yield the wanted rows of a window in order, some at a time."""
    rows = pa.concat_tables([schema.empty_table(), *parts])
    offsets = offsets_of(rows)
    if not bool(np.all(np.diff(offsets) > 0)):
        rows = rows.take(pa.array(np.argsort(offsets, kind="stable")))
    row_bytes = max(1, rows.nbytes // max(1, rows.num_rows))
    batches = rows.combine_chunks().to_batches(max_chunksize=max(1, GIVEN_BYTES // row_bytes))
    at = start
    for batch in batches[:-1]:
        upto = batch.column(names.TW_OFFSET)[-1].as_py() + 1
        yield Sifted(at, upto, batch)
        at = upto
    last = batches[-1] if batches else pa.RecordBatch.from_pylist([], schema)
    yield Sifted(at, end, last)
