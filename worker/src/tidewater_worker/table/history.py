"""Reading a partition's rows back from its table, in offset order (G3).

A reader pins one snapshot and walks over the offsets in windows. For each window it reads the row
groups that may hold its rows, keeps those of the partition, sorts them and checks that every
offset is there exactly once. Nothing depends on how the files are laid out: in files that we wrote
each row group is read once and in order; files that another engine has shuffled cost more reads,
never more memory and never a wrong answer.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core import names
from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.errors import Corrupt, Invalid, Retryable
from tidewater_worker.filters.wanted import make_filter
from tidewater_worker.ports import Sifted
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.cover import Span, check_cover, missing
from tidewater_worker.table.frontier import UNWRITTEN
from tidewater_worker.table.opening import TopicTable
from tidewater_worker.table.ranges import OFFSET_MAX, FileRange, RangeIndex, RowGroup
from tidewater_worker.table.reads import Decoded, Reads
from tidewater_worker.table.row_groups import RowGroups, offsets_of
from tidewater_worker.table.sift import GIVEN_BYTES, Skipping, sift
from tidewater_worker.table.view import TableView, view_of

log = logging.getLogger(__name__)

WINDOW_ROWS_MAX: Final = 131_072
WINDOW_BYTES_MAX: Final = 16 * 1024 * 1024
"""About this much is sorted at once."""

Pin = Callable[[int, int], None]
Files = Iterator[FileRange]
_T = TypeVar("_T")


class HistoryReader:
    """Reads one topic's table. Thread-safe."""

    def __init__(
        self,
        where: Callable[[], TopicTable],
        catalog: Callable[[], TableCatalog],
        seen: Callable[[], TableView | None],
        pin: Pin,
        index: RangeIndex,
        shared: Decoded | None = None,
    ) -> None:
        self._where = where
        self._catalog = catalog
        self._seen = seen
        self._pin = pin
        self._index = index
        self._view: TableView | None = None
        self._shared = shared
        self._reads = Reads(lambda: int(where().spec.reader.max_concurrent_reads))
        self.skipping = Skipping()
        """What filters saved here."""

    @property
    def where(self) -> TopicTable:
        """The topic and its table."""
        return self._where()

    def view(
        self, partition: int | None = None, end: int = 0, *, newest: bool = False
    ) -> TableView:
        """Return a state of the table in which the partition reaches `end`, if there is one."""
        if not newest and partition is not None:
            for known in (self._seen(), self._view):
                if known is not None and known.frontiers.get(partition, UNWRITTEN).next >= end:
                    return known
        self._view = view_of(self._catalog().load(self._where().identifier))
        return self._view

    def read(
        self,
        partition: int,
        start: int,
        end: int,
        max_rows: int,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows [start, end), at most `max_rows`, as far as the table has them."""
        end = min(end, start + max_rows)
        read, give = _chosen(table_arrow_schema(self._where().spec), columns)

        def pinned(view: TableView, files: Files, span: Span) -> Iterator[pa.RecordBatch]:
            groups = self._index.row_groups(files, view.table.io, partition, *span)
            reader = self._row_groups(view, partition, read, self._ahead)
            for batch in _windows(reader, groups, partition, *span):
                if batch.num_rows:
                    yield batch if len(give) == len(read) else batch.select(give)

        def end_of(batch: pa.RecordBatch) -> int:
            return int(batch.column(names.TW_OFFSET)[-1].as_py()) + 1

        yield from self._pinning(partition, start, end, pinned, end_of)

    def sift(self, partition: int, start: int, end: int, spec: FilterSpec) -> Iterator[Sifted]:
        """Yield the rows of [start, end) that a filter wants, as far as the table has them."""
        topic = self._where().spec
        schema, wanted = table_arrow_schema(topic), make_filter(spec, topic)
        if wanted is None:
            raise Invalid("InvalidFilter", "a filter that asks for nothing")

        def pinned(view: TableView, files: Files, span: Span) -> Iterator[Sifted]:
            return sift(
                self._index, view, files, partition, span, schema, wanted, self._ahead,
                self.skipping, self._reads,
            )  # fmt: skip

        yield from self._pinning(partition, start, end, pinned, lambda sifted: sifted.end)

    def _row_groups(
        self, view: TableView, partition: int, columns: pa.Schema, ahead: int
    ) -> RowGroups:
        return RowGroups(self._index, view, partition, columns, ahead, self._reads, self._shared)

    @property
    def _ahead(self) -> int:
        return max(1, self._where().spec.reader.prefetch)

    def _pinning(
        self,
        partition: int,
        start: int,
        end: int,
        read: Callable[[TableView, Files, Span], Iterator[_T]],
        end_of: Callable[[_T], int],
    ) -> Iterator[_T]:
        """Read from one snapshot, which is pinned, and from the newest if its files are removed."""
        if start < 0 or end <= start:
            return
        view = self.view(partition, end)
        position, stale = start, False
        while position < end:
            check_window(view, partition, position)
            try:
                upto = min(end, view.frontiers.get(partition, UNWRITTEN).next)
                if view.snapshot_id is None or position >= upto:
                    return
                with self._pinned(view.snapshot_id):
                    files = self._index.files(
                        view.metadata, view.snapshot_id, view.table.io, (partition, position, upto)
                    )
                    for found in read(view, files, (position, upto)):
                        position = end_of(found)
                        yield found
                return
            except FileNotFoundError as error:
                # The snapshot was expired and its files removed while we read: go on in the newest.
                if stale:
                    raise Retryable("FileMissing", f"a data file is missing: {error}") from error
                before, view = view, self.view(partition, end, newest=True)
                stale = before.snapshot_id == view.snapshot_id

    @contextmanager
    def _pinned(self, snapshot_id: int) -> Iterator[None]:
        self._pin(snapshot_id, 1)
        try:
            yield
        finally:
            self._pin(snapshot_id, -1)

    def offset_at(self, partition: int, timestamp_us: int) -> int | None:
        """Return the first offset whose time is not before `timestamp_us`."""
        view = self.view(newest=True)
        if view.snapshot_id is None:
            return None
        start = view.starts.get(partition, 0)
        end = view.frontiers.get(partition, UNWRITTEN).next
        wanted = _position_schema(names.TW_TIME)
        with self._pinned(view.snapshot_id):
            within = (partition, start, end)
            files = self._index.files(view.metadata, view.snapshot_id, view.table.io, within)
            late = [file for file in files if file.bounds.times[1] >= timestamp_us]
            groups = self._index.row_groups(late, view.table.io, partition, start, end)
            groups = [group for group in groups if group.bounds.times[1] >= timestamp_us]
            reader = self._row_groups(view, partition, wanted, 1)
            try:
                return _first_at(reader, groups, timestamp_us, start)
            finally:
                reader.close()

    def check_nothing_from(self, view: TableView, partition: int, offset: int) -> None:
        """Make sure that the table has no row of the partition at or past an offset.

        A frontier below rows that are there was damaged, not forgotten: committing from it would
        add them a second time.
        """
        try:
            found = self._has_rows_from(view, partition, offset)
        except OSError as error:
            raise Retryable("WarehouseUnavailable", f"reading data files: {error}") from error
        if found:
            raise Corrupt(
                "FrontierDamaged",
                f"{names.frontier_property(partition)} says {offset}, "
                "but the table has rows from there on",
            )

    def _has_rows_from(self, view: TableView, partition: int, offset: int) -> bool:
        if view.snapshot_id is None:
            return False
        within = (partition, offset, OFFSET_MAX)
        files = self._index.files(view.metadata, view.snapshot_id, view.table.io, within)
        groups = self._index.row_groups(files, view.table.io, *within)
        reader = self._row_groups(view, partition, _position_schema(), 1)
        try:
            for group in groups:
                if reader.within([group], [], offset, OFFSET_MAX):
                    return True
        finally:
            reader.close()
        return False

    def rows_end(self, view: TableView, snapshot_id: int, partition: int) -> int | None:
        """Return the offset after a partition's last row in a snapshot; None if it has no row."""
        files = self._index.files(view.metadata, snapshot_id, view.table.io)
        groups = self._index.row_groups(files, view.table.io, partition, 0, OFFSET_MAX)
        groups.sort(key=lambda group: group.bounds.offsets[1], reverse=True)
        reader = self._row_groups(view, partition, _position_schema(), 1)
        end: int | None = None
        try:
            for group in groups:
                if end is not None and group.bounds.offsets[1] < end:
                    break
                for rows in reader.within([group], [], 0, OFFSET_MAX):
                    end = max(end or 0, int(offsets_of(rows).max()) + 1)
        except OSError as error:
            raise Retryable("WarehouseUnavailable", f"reading data files: {error}") from error
        finally:
            reader.close()
        return end


def _chosen(schema: pa.Schema, columns: Sequence[str] | None) -> tuple[pa.Schema, list[str]]:
    """Return the columns to read, and those to give: the wanted ones and the offset."""
    if columns is None:
        return schema, schema.names
    unknown = sorted(set(columns) - set(schema.names))
    if unknown:
        raise Invalid("UnknownColumn", f"there is no column {', '.join(unknown)}")
    give = {names.TW_OFFSET, *columns}
    read = {names.TW_PARTITION, *give}
    return (
        pa.schema([field for field in schema if field.name in read]),
        [name for name in schema.names if name in give],
    )


def _row_bytes(groups: list[RowGroup]) -> int:
    rows = sum(group.rows for group in groups)
    return max(1, sum(group.nbytes for group in groups) // max(1, rows))


def _position_schema(*more: str) -> pa.Schema:
    kinds = {
        names.TW_PARTITION: pa.int32(),
        names.TW_OFFSET: pa.int64(),
        names.TW_TIME: pa.timestamp("us", "UTC"),
    }
    chosen = (names.TW_PARTITION, names.TW_OFFSET, *more)
    return pa.schema([(name, kinds[name]) for name in chosen])


_NOTHING: Final = _position_schema(names.TW_TIME).empty_table()


def check_window(view: TableView, partition: int, start: int) -> None:
    """Refuse to read what retention has removed."""
    kept = view.starts.get(partition, 0)
    if start < kept:
        raise Invalid(
            "OffsetExpired",
            f"offset {start} of partition {partition} was removed by retention; "
            f"the first one kept is {kept}",
        )


def _first_at(
    reader: RowGroups, groups: list[RowGroup], timestamp_us: int, start: int
) -> int | None:
    best: int | None = None
    for group in groups:
        if best is not None and group.bounds.offsets[0] > best:
            break
        rows = pa.concat_tables(reader.within([group], [], start, OFFSET_MAX) or [_NOTHING])
        times = rows.column(names.TW_TIME).cast(pa.int64())
        late = rows.filter(pc.greater_equal(times, timestamp_us))
        if late.num_rows:
            first = pc.min(late.column(names.TW_OFFSET)).as_py()
            best = first if best is None else min(best, first)
    return best


def _windows(
    reader: RowGroups, groups: list[RowGroup], partition: int, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yield [start, end) window by window; close the reader in the end."""
    row_bytes = _row_bytes(groups)
    window_rows = max(1, min(WINDOW_ROWS_MAX, WINDOW_BYTES_MAX // row_bytes))
    position = start
    try:
        while position < end:
            upto = min(end, position + window_rows)
            needed = [g for g in groups if g.bounds.offsets[0] < upto]
            parts = reader.within(needed, groups[len(needed) :], position, upto)
            rows = _ordered(parts, position, upto, partition)
            yield from rows.to_batches(max_chunksize=max(1, GIVEN_BYTES // row_bytes))
            del parts, rows
            position = upto
            groups = [group for group in groups if group.bounds.offsets[1] >= position]
    finally:
        reader.close(position)


def _ordered(parts: list[pa.Table], start: int, end: int, partition: int) -> pa.Table:
    """Join and sort the rows of a window; every offset must be there once."""
    if not parts:
        raise missing(partition, start)
    rows = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
    offsets = offsets_of(rows)
    check_cover(partition, start, end, [], [offsets])
    if bool(np.all(np.diff(offsets) == 1)):
        return rows
    return rows.take(pa.array(np.argsort(offsets, kind="stable")))
