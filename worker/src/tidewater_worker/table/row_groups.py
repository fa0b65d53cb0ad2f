"""Decoding row groups for a reader: some ahead of need, each once if memory allows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.schema import Schema

from tidewater_core import names
from tidewater_worker.table.cover import Offsets
from tidewater_worker.table.ranges import RangeIndex, RowGroup
from tidewater_worker.table.reads import Decoded, Reads
from tidewater_worker.table.shape import FIELD_ID
from tidewater_worker.table.view import TableView

DECODED_BYTES_MAX: Final = 20 * 1024 * 1024
"""Row groups that a reader keeps decoded while later windows still need them; one larger than
this is held alone."""

_T = TypeVar("_T")


class Ahead(ABC, Generic[_T]):
    """Makes something of row groups, on threads of its own."""

    def __init__(
        self, index: RangeIndex, view: TableView, partition: int, ahead: int, reads: Reads
    ) -> None:
        self._index = index
        self._reads = reads
        self._io = view.table.io
        self._schema = view.metadata.schema()
        self._partition = partition
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(max(1, ahead), thread_name_prefix="history")
        self._decoded: dict[RowGroup, Future[_T]] = {}

    def close(self, position: int = -1) -> None:
        """Stop reading ahead; `position` says how far was read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._decoded.clear()

    def each(self, needed: list[RowGroup], later: list[RowGroup], end: int) -> Iterator[_T]:
        """Yield what is made of the row groups, beginning with some of what follows.

        What has rows at `end` or past it is kept for the next time, as far as memory allows.
        """
        queue = needed + later
        for group in set(self._decoded).difference(queue):
            del self._decoded[group]
        for position, group in enumerate(needed):
            self._begin(queue[position : position + 1 + self._ahead])
            yield self._decoded[group].result()
            if group.bounds.offsets[1] < end or self._held() > DECODED_BYTES_MAX:
                del self._decoded[group]

    def _begin(self, queue: list[RowGroup]) -> None:
        """Decode the first of the queue, and those after it that fit into memory."""
        for group in queue:
            if group not in self._decoded:
                if group is not queue[0] and self._held() + group.nbytes > DECODED_BYTES_MAX:
                    return
                self._decoded[group] = self._pool.submit(self._decode, group)

    def _held(self) -> int:
        return sum(group.nbytes for group in self._decoded)

    @abstractmethod
    def _decode(self, group: RowGroup) -> _T:
        """Make it; on one of the threads."""

    def _read(self, group: RowGroup, wanted: pa.Schema) -> pa.Table:
        """Read some columns of a row group: the partition's rows."""
        with self._reads.one(), self._io.new_input(group.path).open() as source:
            footer = self._index.footer(group.path, self._io)
            file = pq.ParquetFile(source, metadata=footer, pre_buffer=True)
            columns = columns_by_name(file.schema_arrow, self._schema, wanted)
            rows = file.read_row_group(
                group.index, columns=list(columns.values()), use_threads=False
            )
        low, high = group.bounds.partitions
        if low != self._partition or high != self._partition:
            rows = rows.filter(pc.equal(rows.column(columns[names.TW_PARTITION]), self._partition))
        return conform(rows, columns, wanted)


class RowGroups(Ahead[pa.Table]):
    """Decodes the row groups of one reader."""

    def __init__(
        self,
        index: RangeIndex,
        view: TableView,
        partition: int,
        wanted: pa.Schema,
        ahead: int,
        reads: Reads,
        shared: Decoded | None = None,
    ) -> None:
        super().__init__(index, view, partition, ahead, reads)
        self._wanted = wanted
        self._shared = shared

    def close(self, position: int = -1) -> None:
        """Stop reading ahead. A row group that was read up to `position` only is kept for the next.

        Whoever reads a partition page by page would otherwise decode it once per page.
        """
        self._pool.shutdown(wait=True, cancel_futures=True)
        for group, future in self._decoded.items():
            low, high = group.bounds.offsets
            if low < position <= high and not future.cancelled() and future.exception() is None:
                self._index.keep_leftover(self._key(group), future.result(), group.nbytes)
        super().close()

    def within(
        self, needed: list[RowGroup], later: list[RowGroup], start: int, end: int
    ) -> list[pa.Table]:
        """Return the rows with offsets in [start, end), beginning to read some of what follows."""
        parts = (rows_within(rows, start, end) for rows in self.each(needed, later, end))
        return [part for part in parts if part.num_rows]

    def _key(self, group: RowGroup) -> str:
        return f"{group.path}#{group.index}#{self._partition}#{','.join(self._wanted.names)}"

    def _decode(self, group: RowGroup) -> pa.Table:
        left = self._index.take_leftover(self._key(group))
        if left is not None and left.schema == self._wanted:
            return left
        if self._shared is None:
            return self._read(group, self._wanted)
        # Columns are found by the table's schema, and types by the topic's.
        key = f"{self._key(group)}#{self._schema.schema_id}#{self._wanted.types}"
        return self._shared.get(key, group.nbytes, lambda: self._read(group, self._wanted))


def offsets_of(rows: pa.Table) -> Offsets:
    """Return the offsets of rows."""
    offsets: Offsets = rows.column(names.TW_OFFSET).to_numpy()
    return offsets


def rows_within(rows: pa.Table, start: int, end: int) -> pa.Table:
    """Return the rows with offsets in [start, end)."""
    offsets = offsets_of(rows)
    if len(offsets) == 0:
        return rows
    first = int(offsets[0])
    if int(offsets[-1]) - first + 1 == len(offsets) and bool(np.all(np.diff(offsets) == 1)):
        low, high = max(start, first), min(end, first + len(offsets))
        return rows.slice(low - first, max(0, high - low))
    return rows.filter(pa.array((offsets >= start) & (offsets < end)))


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
