"""Fetching one partition's messages for one subscription, in bounded memory (G6).

Reading goes on where it stopped as long as that is possible: a stream from the table is not begun
anew for each pull. What was fetched is kept as batches up to a bound; a message that is delivered
again later is read again.
"""

from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

import pyarrow as pa

from tidewater_core import names
from tidewater_core.crd.subscription import Isolation
from tidewater_core.errors import Corrupt
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.filtering import Mask
from tidewater_worker.dispatch.keyshared import key_hash
from tidewater_worker.dispatch.policy import Leased, Order
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.reading import PartitionReader
from tidewater_worker.topic import Topic

KEPT_BYTES_MAX: Final = 8 * 1024 * 1024
"""Batches kept per partition of a subscription, besides the one that is being fetched from."""
FETCH_ROWS_MIN: Final = 256
FETCH_ROWS_MAX: Final = 8_192
NEAR_ROWS: Final = 512
"""Messages to be read again that are this near to each other are read in one go."""
_STREAM_ROWS: Final = 1 << 62


class Piece(NamedTuple):
    """Messages in the table's columns, and the deliveries they are for, in the same order."""

    batch: pa.RecordBatch
    leases: list[Leased]
    row_bytes: int
    """About what one of them takes: exact sizes (`nbytes`) cost more than small messages do."""

    def first(self, count: int) -> "Piece":
        """Return so many of them."""
        return Piece(self.batch.slice(0, count), self.leases[:count], self.row_bytes)


class Window:
    """Reads a partition for a subscription."""

    def __init__(
        self,
        node: Node,
        topic: Topic,
        partition: Partition,
        isolation: Isolation,
        wanted: Mask | None,
    ) -> None:
        self._node, self._topic, self._partition = node, topic, partition
        self._isolation = isolation
        self._wanted = wanted
        self._reader: PartitionReader | None = None
        self._stream: AsyncGenerator[pa.RecordBatch, None] | None = None
        self._left: pa.RecordBatch | None = None
        """What of the last batch was not offered yet."""
        self._at = -1
        """Its first offset, or the stream's next."""
        self._row_bytes = 1
        """About what a row of the batch takes that is being fetched from."""
        self._bases: list[int] = []
        self._kept: list[tuple[pa.RecordBatch, int]] = []
        """Batches, and about what one of their rows takes."""
        self._kept_bytes = 0

    @property
    def end(self) -> int:
        """Offsets below this may be delivered."""
        end = self._partition.readable().end
        if self._isolation is Isolation.COMMITTED:
            return min(end, self._partition.table.next)
        return end

    @property
    def kept_bytes(self) -> int:
        """Bytes of messages held in memory."""
        left = 0 if self._left is None else self._left.num_rows
        return self._kept_bytes + left * self._row_bytes

    async def close(self) -> None:
        """Let go of everything that is held."""
        stream, self._stream, self._left = self._stream, None, None
        self._bases, self._kept, self._kept_bytes = [], [], 0
        if stream is not None:
            await stream.aclose()

    def is_live(self, delivery: Delivery) -> bool:
        """Tell whether the next messages are in memory, so that a fetch waits for nothing."""
        appender = self._partition.appender
        return appender is not None and delivery.fetch_at >= appender.tail.start

    async def fetch(self, delivery: Delivery, want: int) -> bool:
        """Offer the next messages, if there are any and there is room; tell whether.

        One call at a time, and none during a seek.
        """
        begin = delivery.fetch_at
        rows = min(delivery.room, max(want, FETCH_ROWS_MIN), FETCH_ROWS_MAX)
        if rows <= 0 or begin >= self.end:
            return False
        batch = await self._next(begin)
        if batch is None:
            return False
        rows = min(rows, batch.num_rows, self.end - begin)
        if rows <= 0:
            self._left, self._at = batch, begin
            return False
        part = batch.slice(0, rows)
        self._left = batch.slice(rows) if rows < batch.num_rows else None
        self._at = begin + rows
        self._keep(begin, part, delivery.cursor.next)
        delivery.offer(
            begin, self._keys(part, delivery.policy.order), self._wanted and self._wanted(part)
        )
        return True

    async def _next(self, begin: int) -> pa.RecordBatch | None:
        """Return the rest of the last batch or the next one; it begins at `begin`."""
        if self._left is not None and self._at <= begin < self._at + self._left.num_rows:
            return self._left.slice(begin - self._at)
        if self._stream is None or self._at != begin:
            if self._stream is not None:
                await self._stream.aclose()
            self._reader = PartitionReader(self._node, self._topic, self._partition, begin)
            self._stream = self._reader.batches(_STREAM_ROWS)
        self._left, self._at = None, begin
        stream = self._stream
        try:
            batch = await anext(stream)
        except StopAsyncIteration:
            self._stream = None
            return None
        except BaseException:
            self._stream = None
            raise
        self._row_bytes = row_bytes(batch)
        return batch

    def _keys(self, batch: pa.RecordBatch, order: Order) -> list[int | None]:
        column = batch.column(names.TW_KEY)
        if order is not Order.KEY or column.null_count == len(column):
            return [None] * batch.num_rows
        return [None if key is None else key_hash(key) for key in column.to_pylist()]

    # ---- payloads

    def _keep(self, base: int, batch: pa.RecordBatch, done: int) -> None:
        """Keep a batch; let go of those that are acknowledged (below `done`) or too much."""
        self._bases.append(base)
        self._kept.append((batch, self._row_bytes))
        self._kept_bytes += batch.num_rows * self._row_bytes
        while len(self._kept) > 1 and (
            self._kept_bytes > KEPT_BYTES_MAX or self._bases[0] + self._kept[0][0].num_rows <= done
        ):
            del self._bases[0]
            oldest, size = self._kept.pop(0)
            self._kept_bytes -= oldest.num_rows * size

    async def payloads(self, leases: Sequence[Leased]) -> AsyncGenerator[Piece, None]:
        """Yield the messages of deliveries, which are sorted by offset."""
        at = 0
        while at < len(leases):
            i = bisect_right(self._bases, leases[at].offset) - 1
            if i >= 0 and leases[at].offset < self._bases[i] + self._kept[i][0].num_rows:
                (batch, size), base = self._kept[i], self._bases[i]
                here = list(leases[at : at + _count_below(leases, at, base + batch.num_rows)])
                yield Piece(_pick(batch, base, here), here, size)
                at += len(here)
                continue
            upto = self._bases[i + 1] if i + 1 < len(self._bases) else _STREAM_ROWS
            run = _near(leases, at, upto)
            async for piece in self._read_again(run):
                yield piece
            at += len(run)

    async def _read_again(self, run: list[Leased]) -> AsyncGenerator[Piece, None]:
        reader = PartitionReader(self._node, self._topic, self._partition, run[0].offset)
        at = 0
        async with aclosing(reader.batches(run[-1].offset + 1 - run[0].offset)) as batches:
            async for batch in batches:
                base = batch.column(names.TW_OFFSET)[0].as_py()
                count = _count_below(run, at, base + batch.num_rows)
                if count:
                    here = run[at : at + count]
                    yield Piece(_pick(batch, base, here), here, row_bytes(batch))
                    at += count
        if at < len(run):
            raise Corrupt("MessageMissing", f"offset {run[at].offset} cannot be read again")


def row_bytes(batch: pa.RecordBatch) -> int:
    """Return about what one row takes, at least: a slice counts as all that it is cut from."""
    size: int = batch.get_total_buffer_size()
    return max(size // int(batch.num_rows), 1)


def _count_below(leases: Sequence[Leased], at: int, end: int) -> int:
    count = 0
    while at + count < len(leases) and leases[at + count].offset < end:
        count += 1
    return count


def _near(leases: Sequence[Leased], at: int, upto: int) -> list[Leased]:
    """Return the deliveries from `at` on that lie near together and below `upto`."""
    run = [leases[at]]
    for leased in leases[at + 1 :]:
        if leased.offset >= upto or leased.offset - run[-1].offset > NEAR_ROWS:
            break
        run.append(leased)
    return run


def _pick(batch: pa.RecordBatch, base: int, leases: list[Leased]) -> pa.RecordBatch:
    first, last = leases[0].offset, leases[-1].offset
    if last - first + 1 == len(leases):
        return batch.slice(first - base, len(leases))
    return batch.take(pa.array([leased.offset - base for leased in leases], pa.int64()))
