"""Fetching one partition's messages for one subscription, in bounded memory (G6).

Reading goes on where it stopped as long as that is possible: a stream from the table is not begun
anew for each pull. What was fetched is kept as batches up to a bound; a message that is delivered
again later is read again. What a filter leaves out is not fetched at all: an answer is the wanted
messages and the range of offsets that they were found in.
"""

from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from tidewater_core import names
from tidewater_core.crd.subscription import Isolation
from tidewater_core.errors import Corrupt
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.keyshared import key_hash
from tidewater_worker.dispatch.policy import Leased, Order
from tidewater_worker.filters.wanted import Wanted
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.ports import Sifted
from tidewater_worker.reading import PartitionReader
from tidewater_worker.topic import Topic

KEPT_BYTES_MAX: Final = 8 * 1024 * 1024
"""Batches kept per partition of a subscription, besides the one that is being fetched from."""
FETCH_ROWS_MIN: Final = 256
FETCH_ROWS_MAX: Final = 8_192
NEAR_ROWS: Final = 512
"""Messages to be read again that are this near to each other are read in one go."""
_OFFSET_MAX: Final = 1 << 62


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
        wanted: Wanted | None,
    ) -> None:
        self._node, self._topic, self._partition = node, topic, partition
        self._isolation = isolation
        self._wanted = wanted
        self._stream: AsyncGenerator[Sifted, None] | None = None
        self._at = -1
        """The stream's next offset."""
        self._left: Sifted | None = None
        """What of the last answer was not offered yet."""
        self._row_bytes = 1
        """About what a message of the answer takes that is being offered."""
        self._starts: list[int] = []
        self._kept: list[tuple[Sifted, int]] = []
        """What was offered, and about what one message of it takes."""
        self._kept_bytes = 0

    @property
    def end(self) -> int:
        """Offsets below this may be delivered."""
        end = self._partition.readable().end
        if self._isolation is Isolation.COMMITTED:
            return min(end, self._partition.table.next)
        return end

    async def close(self) -> None:
        """Let go of everything that is held."""
        stream, self._stream, self._left = self._stream, None, None
        self._starts, self._kept, self._kept_bytes = [], [], 0
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
        begin, end = delivery.fetch_at, self.end
        rows = min(delivery.room, max(want, FETCH_ROWS_MIN), FETCH_ROWS_MAX)
        if rows <= 0 or begin >= end:
            return False
        found = await self._next(begin)
        if found is None:
            return False
        part, self._left = _cut(found, rows, min(self.end, found.end))
        if part.end <= begin:
            return False
        self._keep(part, delivery.cursor.next)
        delivery.offer(begin, part.end, self._keys(part.rows, delivery.policy.order))
        return True

    async def _next(self, begin: int) -> Sifted | None:
        """Return the rest of the last answer or the next one; it begins at `begin`."""
        if self._left is not None and self._left.start <= begin < self._left.end:
            return _from(self._left, begin)
        self._left = None
        if self._stream is None or self._at != begin:
            if self._stream is not None:
                await self._stream.aclose()
            reader = PartitionReader(self._node, self._topic, self._partition, begin)
            self._stream = reader.sifted(self._wanted)
        stream = self._stream
        try:
            found = await anext(stream)
        except StopAsyncIteration:
            self._stream = None
            return None
        except BaseException:
            self._stream = None
            raise
        self._at = found.end
        self._row_bytes = row_bytes(found.rows)
        return found

    def _keys(self, rows: pa.RecordBatch, order: Order) -> dict[int, int | None]:
        """Return the messages by offset, each with what orders it."""
        offsets, column = rows.column(names.TW_OFFSET).to_pylist(), rows.column(names.TW_KEY)
        if order is not Order.KEY or column.null_count == len(column):
            return dict.fromkeys(offsets)
        keys = [None if key is None else key_hash(key) for key in column.to_pylist()]
        return dict(zip(offsets, keys, strict=True))

    # ---- payloads

    def _keep(self, part: Sifted, done: int) -> None:
        """Keep messages; let go of those that are acknowledged (below `done`) or too much."""
        if not part.rows.num_rows:
            return
        self._starts.append(part.start)
        self._kept.append((part, self._row_bytes))
        self._kept_bytes += part.rows.num_rows * self._row_bytes
        while len(self._kept) > 1 and (
            self._kept_bytes > KEPT_BYTES_MAX or self._kept[0][0].end <= done
        ):
            del self._starts[0]
            oldest, size = self._kept.pop(0)
            self._kept_bytes -= oldest.rows.num_rows * size

    async def payloads(self, leases: Sequence[Leased]) -> AsyncGenerator[Piece, None]:
        """Yield the messages of deliveries, which are sorted by offset."""
        at = 0
        while at < len(leases):
            i = bisect_right(self._starts, leases[at].offset) - 1
            upto = self._starts[i + 1] if i + 1 < len(self._starts) else _OFFSET_MAX
            if i >= 0 and leases[at].offset < self._kept[i][0].end:
                kept, size = self._kept[i]
                here = list(leases[at : at + _count_below(leases, at, kept.end)])
                picked = _pick(kept.rows, here)
                if picked is not None:
                    yield Piece(picked, here, size)
                    at += len(here)
                    continue
                # One among them was not wanted when this was fetched: an ack was taken back.
                upto = kept.end
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
                    picked = _pick(batch, here)
                    assert picked is not None, "these are all messages"
                    yield Piece(picked, here, row_bytes(batch))
                    at += count
        if at < len(run):
            raise Corrupt("MessageMissing", f"offset {run[at].offset} cannot be read again")


def row_bytes(batch: pa.RecordBatch) -> int:
    """Return about what one row takes, at least: a slice counts as all that it is cut from."""
    size: int = batch.get_total_buffer_size()
    return max(size // max(int(batch.num_rows), 1), 1)


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


def _pick(rows: pa.RecordBatch, leases: list[Leased]) -> pa.RecordBatch | None:
    """Return the messages of deliveries, which are sorted; None if one is not there."""
    if rows.num_rows == len(leases) == 1:
        return rows if rows.column(names.TW_OFFSET)[0].as_py() == leases[0].offset else None
    offsets = rows.column(names.TW_OFFSET).to_numpy()
    wanted = np.fromiter((leased.offset for leased in leases), np.int64, len(leases))
    at = np.searchsorted(offsets, wanted)
    if at[-1] >= len(offsets) or not bool(np.all(offsets[at] == wanted)):
        return None
    first, last = int(at[0]), int(at[-1])
    if last - first + 1 == len(leases):
        return rows.slice(first, len(leases))
    return rows.take(pa.array(at))


def _from(found: Sifted, start: int) -> Sifted:
    """Return an answer from an offset on."""
    skip = int(np.searchsorted(found.rows.column(names.TW_OFFSET).to_numpy(), start))
    return Sifted(start, found.end, found.rows.slice(skip))


def _cut(found: Sifted, rows_max: int, end: int) -> tuple[Sifted, Sifted | None]:
    """Divide an answer: so many messages at most, and none from `end` on; the rest, if any."""
    if found.end <= end and found.rows.num_rows <= rows_max:
        return found, None
    offsets = found.rows.column(names.TW_OFFSET).to_numpy()
    count = min(rows_max, int(np.searchsorted(offsets, end)))
    if count < len(offsets):
        end = min(end, int(offsets[count]))
    if end >= found.end:
        return found, None
    return (
        Sifted(found.start, end, found.rows.slice(0, count)),
        Sifted(end, found.end, found.rows.slice(count)),
    )
