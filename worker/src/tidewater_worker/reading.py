"""Reading a partition as one ordered stream: table, then log files, then memory (G3).

The position is an offset and nothing else. Each step asks anew which of the three holds it, so
that commits, deleted segments and a restarted table process in between do not matter.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from tidewater_core import names
from tidewater_core.errors import Corrupt, Invalid, NotFound, Retryable, TidewaterError
from tidewater_worker.filters.wanted import Wanted
from tidewater_worker.log.appender import Appender
from tidewater_worker.log.reader import LogBatch, LogReader
from tidewater_worker.node import Node
from tidewater_worker.partition import OFFSET_MAX, Partition
from tidewater_worker.ports import Sifted
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.topic import Topic

STEP_BYTES: Final = 4 * 1024 * 1024
SMALL_ROWS: Final = 16
"""Frames of so few messages are many: what all of them need is made once."""
OFFSET_EXPIRED: Final = "OffsetExpired"
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
        if partition.refusal is not None:
            raise partition.refusal.with_traceback(None)
        raise Retryable(
            "PartitionOpening", f"{partition.topic} partition {partition.number} is opening", 200
        )
    return appender


def _log_reader(partition: Partition) -> LogReader:
    """Return a reader of the segments; their indexes, in the appender's memory, save it a walk."""
    appender = partition.appender
    return LogReader(partition.directory, () if appender is None else appender.segments)


@dataclass(slots=True)
class PartitionReader:
    """Reads one partition from an offset on."""

    node: Node
    topic: Topic
    partition: Partition
    offset: int
    columns: Sequence[str] | None = None
    """These alone, partition, offset and time among them; None: all."""

    async def batches(
        self, limit: int, end: int = OFFSET_MAX
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield batches of the table's schema up to the end of the log, at most `limit` rows.

        None at or past the offset `end`: where offsets were lost, that is not a number of rows.
        """
        schema = table_arrow_schema(self.topic.spec)
        if self.columns is not None:
            schema = pa.schema([field for field in schema if field.name in self.columns])
        log = _log_reader(self.partition)
        try:
            while limit > 0:
                appender = log_of(self.partition)
                self.offset = self.partition.past_gap(self.offset)
                if self.offset >= min(appender.end, end):
                    return
                if self.offset < appender.start:
                    async for batch in self._history(appender, limit, end):
                        limit -= batch.num_rows
                        yield batch
                    continue
                for found in await self._log_step(appender, log):
                    skip = self.offset - found.base_offset
                    rows = min(found.rows - skip, limit, end - self.offset)
                    batch = found.batch.slice(skip, rows)
                    batch = with_offsets(batch, schema, self.partition.number, self.offset)
                    self.offset += batch.num_rows
                    limit -= batch.num_rows
                    yield batch
                    if limit <= 0 or self.offset >= end:
                        return
        finally:
            log.end()

    async def sifted(self, wanted: Wanted | None) -> AsyncGenerator[Sifted, None]:
        """Yield the wanted messages (None: all) up to the end of the log, in the table's columns.

        Each answer begins where the one before it ended: what lies between wanted messages was
        looked at, or its statistics say that nothing in it is wanted, or it was lost with a volume.
        """
        schema = table_arrow_schema(self.topic.spec)
        log = _log_reader(self.partition)
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
            log.end()

    async def _sifted_history(
        self, appender: Appender, wanted: Wanted | None
    ) -> AsyncIterator[Sifted]:
        if wanted is None:
            async for batch in self._history(appender, _ALL, OFFSET_MAX):
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
                raise await self._named(error) from None
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
                OFFSET_EXPIRED,
                f"offset {self.offset} is past retention; the first kept is {table.start}",
            )
        end = min(table.next, appender.start, self.partition.gap_after(self.offset))
        if end <= self.offset:
            raise Retryable(
                "HistoryNotReady", "the table's frontier is not known yet; try again", 500
            )
        return end

    async def _history(
        self, appender: Appender, limit: int, end: int
    ) -> AsyncIterator[pa.RecordBatch]:
        end = min(end, self._history_end(appender))
        try:
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
        except Invalid as error:
            raise await self._named(error) from None

    async def _named(self, error: Invalid) -> TidewaterError:
        """Say of what the table no longer keeps that it is gone, and know it the next time."""
        if error.reason != OFFSET_EXPIRED:
            return error
        await learn_starts(self.node, self.topic, [self.partition])
        return Gone(OFFSET_EXPIRED, error.message)


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


async def learn_starts(node: Node, topic: Topic, partitions: Iterable[Partition]) -> None:
    """Ask the table for its first offsets, where it alone has them.

    Retention raises them without a word to us: while nothing is committed, nobody else would say.
    """
    asked = [p for p in partitions if p.table.next > 0 and p.table.start < log_of(p).start]
    if not asked:
        return
    with suppress(Retryable):  # the catalog is away: what is known is all there is to go by
        bounds = await node.link.bounds(str(topic.name))
        for partition in asked:
            if partition.number in bounds:
                partition.note_start(bounds[partition.number].start)


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
        await learn_starts(node, topic, [partition])
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
    reader = LogReader(partition.directory, appender.segments)
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
