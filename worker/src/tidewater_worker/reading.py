"""Reading a partition as one ordered stream: table, then log files, then memory (G3).

The position is an offset and nothing else. Each step asks anew which of the three holds it, so
that commits, deleted segments and a restarted table process in between do not matter.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from tidewater_core import names
from tidewater_core.errors import Corrupt, Invalid, NotFound, Retryable
from tidewater_worker.filters.wanted import Wanted
from tidewater_worker.log.appender import Appender
from tidewater_worker.log.reader import LogBatch, LogReader
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.ports import Sifted
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.topic import Topic

STEP_BYTES: Final = 4 * 1024 * 1024
SMALL_ROWS: Final = 16
"""Frames of so few messages are many: what all of them need is made once."""
_ALL: Final = 1 << 62


class Gone(NotFound):
    """The messages were there, and retention has let them go."""

    status = 410


def log_of(partition: Partition) -> Appender:
    """Return a partition's log to read from, or raise why that cannot be done now.

    An empty log that has yet to hear from the table does not know where it ends: whoever takes it
    for the end would skip all that the table has.
    """
    appender = partition.readable()
    if partition.table_end is None and not partition.is_open and not appender.segments:
        raise partition.refusal or Retryable(
            "PartitionOpening", f"{partition.topic} partition {partition.number} is opening", 200
        )
    return appender


@dataclass(slots=True)
class PartitionReader:
    """Reads one partition from an offset on."""

    node: Node
    topic: Topic
    partition: Partition
    offset: int
    columns: Sequence[str] | None = None
    """These alone, partition, offset and time among them; None: all."""

    async def batches(self, limit: int) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield batches of the table's schema up to the end of the log, at most `limit` rows."""
        schema = table_arrow_schema(self.topic.spec)
        if self.columns is not None:
            schema = pa.schema([field for field in schema if field.name in self.columns])
        log = LogReader(self.partition.directory)
        try:
            while limit > 0:
                appender = log_of(self.partition)
                self.offset = self.partition.past_gap(self.offset)
                if self.offset >= appender.end:
                    return
                if self.offset < appender.start:
                    async for batch in self._history(appender, limit):
                        limit -= batch.num_rows
                        yield batch
                    continue
                for found in await self._log_step(appender, log):
                    skip = self.offset - found.base_offset
                    batch = found.batch.slice(skip, min(found.rows - skip, limit))
                    batch = with_offsets(batch, schema, self.partition.number, self.offset)
                    self.offset += batch.num_rows
                    limit -= batch.num_rows
                    yield batch
                    if limit <= 0:
                        return
        finally:
            log.close()

    async def sifted(self, wanted: Wanted | None) -> AsyncGenerator[Sifted, None]:
        """Yield the wanted messages (None: all) up to the end of the log, in the table's columns.

        Each answer begins where the one before it ended: what lies between wanted messages was
        looked at, or its statistics say that nothing in it is wanted, or it was lost with a volume.
        """
        schema = table_arrow_schema(self.topic.spec)
        log = LogReader(self.partition.directory)
        try:
            while True:
                appender = log_of(self.partition)
                start, past = self.offset, self.partition.past_gap(self.offset)
                if past > start:
                    self.offset = past
                    yield Sifted(start, past, pa.RecordBatch.from_pylist([], schema))
                    continue
                if start >= appender.end:
                    return
                if start < appender.start:
                    async for found in self._sifted_history(appender, wanted):
                        yield found
                    continue
                for each in await self._log_step(appender, log):
                    start = self.offset
                    batch = each.batch.slice(start - each.base_offset)
                    batch = with_offsets(batch, schema, self.partition.number, start)
                    self.offset += batch.num_rows
                    kept = batch if wanted is None else wanted.keep(batch)
                    yield Sifted(start, self.offset, kept)
        finally:
            log.close()

    async def _sifted_history(
        self, appender: Appender, wanted: Wanted | None
    ) -> AsyncIterator[Sifted]:
        if wanted is None:
            async for batch in self._history(appender, _ALL):
                yield Sifted(self.offset - batch.num_rows, self.offset, batch)
            return
        end = self._history_end(appender)
        try:
            async for found in self.node.link.sift(
                str(self.topic.name), self.partition.number, self.offset, end, wanted.spec
            ):
                if found.start != self.offset or found.end <= found.start:
                    raise Corrupt(
                        "HistoryGap",
                        f"[{found.start}, {found.end}) was read where {self.offset} is expected",
                    )
                self.offset = found.end
                yield found
        except Invalid as error:
            if error.reason != "InvalidFilter":
                raise
            # It is valid here: the table process has yet to hear of the topic's new columns.
            raise Retryable("HistoryNotReady", error.message, 500) from error

    async def _log_step(self, appender: Appender, log: LogReader) -> list[LogBatch]:
        found = appender.tail.read(self.offset, appender.end, STEP_BYTES)
        if found:
            return found
        try:
            return await asyncio.to_thread(log.read, self.offset, appender.end, STEP_BYTES)
        except (Corrupt, Retryable):
            if self.offset < appender.start:
                return []  # the segment went meanwhile: the table has it
            raise

    def _history_end(self, appender: Appender) -> int:
        """Return how far the table is to be read from here, or raise why it cannot be."""
        table = self.partition.table
        if self.offset < table.start:
            raise Gone(
                "OffsetExpired",
                f"offset {self.offset} is past retention; the first kept is {table.start}",
            )
        end = min(table.next, appender.start, self.partition.gap_after(self.offset))
        if end <= self.offset:
            raise Retryable(
                "HistoryNotReady", "the table's frontier is not known yet; try again", 500
            )
        return end

    async def _history(self, appender: Appender, limit: int) -> AsyncIterator[pa.RecordBatch]:
        end = self._history_end(appender)
        async for batch in self.node.link.history(
            str(self.topic.name), self.partition.number, self.offset, end, limit, self.columns
        ):
            first = batch.column(names.TW_OFFSET)[0].as_py()
            if first != self.offset:
                raise Corrupt(
                    "HistoryGap", f"offset {first} was read where {self.offset} is expected"
                )
            self.offset += batch.num_rows
            yield batch


def with_offsets(
    batch: pa.RecordBatch, schema: pa.Schema, partition: int, offset: int
) -> pa.RecordBatch:
    """Bring a batch of the log into the table's columns."""
    rows = batch.num_rows
    repeated = _repeated if rows <= SMALL_ROWS else _repeated.__wrapped__
    columns = [
        repeated(partition, rows),
        pa.array(np.arange(offset, offset + rows, dtype=np.int64)),
    ]
    at = {name: i for i, name in enumerate(batch.schema.names)}
    for name in schema.names[2:]:
        i = at.get(name)
        columns.append(pa.nulls(rows, schema.field(name).type) if i is None else batch.column(i))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@lru_cache(maxsize=1024)
def _repeated(partition: int, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(partition, pa.int32()), rows)


async def position(
    node: Node, topic: Topic, partition: Partition, offset: int | None, timestamp_us: int | None
) -> int:
    """Return the offset to read from: given, or the first not before a time, or the start."""
    appender = log_of(partition)
    if offset is not None:
        if offset > appender.end:
            raise Invalid(
                "OffsetInFuture",
                f"offset {offset} does not exist yet; the next message gets {appender.end}",
            )
        return offset
    if timestamp_us is None:
        return min(partition.table.start, appender.start)
    found = appender.tail.offset_at(timestamp_us)
    if found is not None:
        return found
    if appender.start > partition.table.start and partition.table.next > 0:
        in_table = await node.link.offset_at(str(topic.name), partition.number, timestamp_us)
        if in_table is not None and in_table < appender.start:
            return in_table
    return await asyncio.to_thread(_offset_in_log, appender, partition, timestamp_us)


def _offset_in_log(appender: Appender, partition: Partition, timestamp_us: int) -> int:
    """Find the first offset in the segments whose time is not before `timestamp_us`."""
    begin = appender.start
    for segment in list(appender.segments):
        near = segment.index.offset_before(timestamp_us)
        if segment.index.last_time_us >= timestamp_us or segment is appender.segments[-1]:
            begin = near if near is not None else segment.base_offset
            break
    reader = LogReader(partition.directory)
    try:
        while begin < appender.end:
            for found in reader.read(begin, appender.end, STEP_BYTES):
                # All rows of a frame have its time.
                if found.batch.column(names.TW_TIME)[0].value >= timestamp_us:
                    return found.base_offset
                begin = found.base_offset + found.rows
    finally:
        reader.close()
    return begin
