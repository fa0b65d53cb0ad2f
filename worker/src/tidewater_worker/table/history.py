"""Reading a partition's rows back from its table, in offset order (G3).

A reader pins one snapshot and walks over the offsets in windows. For each window it reads the row
groups that may hold its rows, keeps those of the partition, sorts them and checks that every
offset is there exactly once. Nothing depends on how the files are laid out: in files that we wrote
each row group is read once and in order; files that another engine has shuffled cost more reads,
never more memory and never a wrong answer.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.schema import Schema

from tidewater_core import names
from tidewater_core.errors import Corrupt, Invalid, Retryable
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.frontier import UNWRITTEN
from tidewater_worker.table.opening import TopicTable
from tidewater_worker.table.ranges import OFFSET_MAX, RangeIndex, RowGroup
from tidewater_worker.table.shape import FIELD_ID
from tidewater_worker.table.view import TableView, view_of

log = logging.getLogger(__name__)

WINDOW_ROWS_MAX: Final = 131_072
WINDOW_BYTES_MAX: Final = 16 * 1024 * 1024
"""About this much is sorted and given at once."""
DECODED_BYTES_MAX: Final = 96 * 1024 * 1024
"""Row groups kept decoded while windows still need them."""

Pin = Callable[[int, int], None]


class RowGroups:
    """Decodes row groups, some ahead of need, each once while it is wanted."""

    def __init__(
        self, index: RangeIndex, view: TableView, partition: int, wanted: pa.Schema, ahead: int
    ) -> None:
        self._index = index
        self._io = view.table.io
        self._schema = view.metadata.schema()
        self._partition = partition
        self._wanted = wanted
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(max(1, ahead), thread_name_prefix="history")
        self._decoded: dict[RowGroup, Future[pa.Table]] = {}

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def get(self, needed: list[RowGroup], later: list[RowGroup]) -> list[pa.Table]:
        """Return the decoded row groups, beginning to read some of the later ones."""
        for group in [g for g in self._decoded if g not in needed and g not in later]:
            del self._decoded[group]
        held = 0
        wanted = needed + later[: self._ahead]
        for position, group in enumerate(wanted):
            held += group.nbytes
            if position >= len(needed) and held > DECODED_BYTES_MAX:
                break
            if group not in self._decoded:
                self._decoded[group] = self._pool.submit(self._decode, group)
        tables: list[pa.Table] = []
        for group in needed:
            tables.append(self._decoded[group].result())
            if held > DECODED_BYTES_MAX:
                del self._decoded[group]
        return tables

    def _decode(self, group: RowGroup) -> pa.Table:
        footer = self._index.footer(group.path, self._io)
        with self._io.new_input(group.path).open() as source:
            file = pq.ParquetFile(source, metadata=footer, pre_buffer=True)
            columns = columns_by_name(file.schema_arrow, self._schema, self._wanted)
            rows = file.read_row_group(
                group.index, columns=list(columns.values()), use_threads=False
            )
        low, high = group.bounds.partitions
        if low != self._partition or high != self._partition:
            rows = rows.filter(pc.equal(rows.column(columns[names.TW_PARTITION]), self._partition))
        return conform(rows, columns, self._wanted)


def columns_by_name(file: pa.Schema, table: Schema, wanted: pa.Schema) -> dict[str, str]:
    """Map the wanted columns to the names that a file has them under, by field id."""
    by_id = {
        int(field.metadata[FIELD_ID]): field.name
        for field in file
        if field.metadata and FIELD_ID in field.metadata
    }
    found: dict[str, str] = {}
    for field in wanted:
        if by_id:
            current = table.find_field(field.name) if _has(table, field.name) else None
            name = by_id.get(current.field_id) if current is not None else None
        else:
            name = field.name if file.get_field_index(field.name) >= 0 else None
        if name is not None:
            found[field.name] = name
    return found


def _has(schema: Schema, name: str) -> bool:
    return any(field.name == name for field in schema.fields)


def conform(rows: pa.Table, columns: dict[str, str], wanted: pa.Schema) -> pa.Table:
    """Give rows the wanted columns and types; what a file lacks is null."""
    arrays = []
    for field in wanted:
        name = columns.get(field.name)
        if name is None:
            arrays.append(pa.nulls(rows.num_rows, field.type))
            continue
        column = rows.column(name)
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=wanted)


class HistoryReader:
    """Reads one topic's table. Thread-safe."""

    def __init__(
        self,
        where: Callable[[], TopicTable],
        catalog: Callable[[], TableCatalog],
        seen: Callable[[], TableView | None],
        pin: Pin,
        index: RangeIndex,
    ) -> None:
        self._where = where
        self._catalog = catalog
        self._seen = seen
        self._pin = pin
        self._index = index
        self._view: TableView | None = None

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

    def read(self, partition: int, start: int, end: int, max_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows [start, end), at most `max_rows`, as far as the table has them."""
        end = min(end, start + max_rows)
        if start < 0 or end <= start:
            return
        view = self.view(partition, end)
        position, stale = start, False
        while position < end:
            check_window(view, partition, position)
            try:
                for batch in self._read_pinned(view, partition, position, end):
                    position += batch.num_rows
                    yield batch
                return
            except FileNotFoundError as error:
                # The snapshot was expired and its files removed while we read: go on in the newest.
                if stale:
                    raise Retryable("FileMissing", f"a data file is missing: {error}") from error
                before, view = view, self.view(partition, end, newest=True)
                stale = before.snapshot_id == view.snapshot_id

    def _read_pinned(
        self, view: TableView, partition: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        end = min(end, view.frontiers.get(partition, UNWRITTEN).next)
        if view.snapshot_id is None or start >= end:
            return
        spec = self._where().spec
        wanted = table_arrow_schema(spec)
        with self._pinned(view.snapshot_id):
            files = self._index.files(view.metadata, view.snapshot_id, view.table.io)
            groups = self._index.row_groups(files, view.table.io, partition, start, end)
            reader = RowGroups(self._index, view, partition, wanted, max(1, spec.reader.prefetch))
            try:
                yield from _windows(reader, groups, partition, start, end)
            finally:
                reader.close()

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
            files = self._index.files(view.metadata, view.snapshot_id, view.table.io)
            late = [file for file in files if file.bounds.times[1] >= timestamp_us]
            groups = self._index.row_groups(late, view.table.io, partition, start, end)
            groups = [group for group in groups if group.bounds.times[1] >= timestamp_us]
            reader = RowGroups(self._index, view, partition, wanted, 1)
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
        files = self._index.files(view.metadata, view.snapshot_id, view.table.io)
        groups = self._index.row_groups(files, view.table.io, partition, offset, OFFSET_MAX)
        reader = RowGroups(self._index, view, partition, _position_schema(), 1)
        try:
            for group in groups:
                (rows,) = reader.get([group], [])
                if rows.num_rows and pc.max(rows.column(names.TW_OFFSET)).as_py() >= offset:
                    return True
        finally:
            reader.close()
        return False


def _position_schema(*more: str) -> pa.Schema:
    kinds = {
        names.TW_PARTITION: pa.int32(),
        names.TW_OFFSET: pa.int64(),
        names.TW_TIME: pa.timestamp("us", "UTC"),
    }
    chosen = (names.TW_PARTITION, names.TW_OFFSET, *more)
    return pa.schema([(name, kinds[name]) for name in chosen])


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
        (rows,) = reader.get([group], [])
        times = rows.column(names.TW_TIME).cast(pa.int64())
        late = rows.filter(
            pc.and_(
                pc.greater_equal(times, timestamp_us),
                pc.greater_equal(rows.column(names.TW_OFFSET), start),
            )
        )
        if late.num_rows:
            first = pc.min(late.column(names.TW_OFFSET)).as_py()
            best = first if best is None else min(best, first)
    return best


def _windows(
    reader: RowGroups, groups: list[RowGroup], partition: int, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yield [start, end) window by window."""
    rows = sum(group.rows for group in groups)
    row_bytes = max(1, sum(group.nbytes for group in groups) // max(1, rows))
    window_rows = max(1, min(WINDOW_ROWS_MAX, WINDOW_BYTES_MAX // row_bytes))
    position = start
    while position < end:
        upto = min(end, position + window_rows)
        needed = [
            g for g in groups if g.bounds.offsets[0] < upto and g.bounds.offsets[1] >= position
        ]
        later = [g for g in groups if g.bounds.offsets[0] >= upto]
        parts = [_within(table, position, upto) for table in reader.get(needed, later)]
        window = _ordered([part for part in parts if part.num_rows], position, upto, partition)
        yield from window.to_batches()
        position = upto
        groups = [group for group in groups if group.bounds.offsets[1] >= position]


def _within(rows: pa.Table, start: int, end: int) -> pa.Table:
    """Return the rows with offsets in [start, end)."""
    offsets = _offsets(rows)
    if len(offsets) == 0:
        return rows
    if int(offsets[-1]) - int(offsets[0]) + 1 == len(offsets) and bool(
        np.all(np.diff(offsets) == 1)
    ):
        first = int(offsets[0])
        low, high = max(start, first), min(end, first + len(offsets))
        return rows.slice(low - first, max(0, high - low))
    return rows.filter(pa.array((offsets >= start) & (offsets < end)))


def _offsets(rows: pa.Table) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]] = rows.column(names.TW_OFFSET).to_numpy()
    return offsets


def _ordered(parts: list[pa.Table], start: int, end: int, partition: int) -> pa.Table:
    """Join and sort the rows of a window; every offset must be there once."""
    if not parts:
        raise _missing(partition, start)
    rows = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
    offsets = _offsets(rows)
    if len(offsets) == end - start and offsets[0] == start and bool(np.all(np.diff(offsets) == 1)):
        return rows
    order = np.argsort(offsets, kind="stable")
    offsets = offsets[order]
    doubled = np.flatnonzero(np.diff(offsets) == 0)
    if len(doubled):
        raise Corrupt(
            "RowsDoubled",
            f"offset {int(offsets[doubled[0]])} of partition {partition} is in the table twice",
        )
    if len(offsets) != end - start:
        expected = np.arange(start, end)
        raise _missing(partition, int(np.setdiff1d(expected, offsets)[0]))
    return rows.take(pa.array(order))


def _missing(partition: int, offset: int) -> Corrupt:
    return Corrupt("RowsMissing", f"offset {offset} of partition {partition} is not in the table")
