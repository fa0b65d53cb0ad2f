"""A partition as one stream wherever it is: read here, or through the worker that owns it (G3).

The position is an offset and nothing else, so a stream goes on at the next owner when the partition
moves, and waits a while for an owner that is being replaced.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
import numpy as np
import pyarrow as pa

from tidewater_core import names
from tidewater_core.errors import Fenced, Invalid, OutcomeUnknown, Retryable, TidewaterError
from tidewater_worker.cluster.arrow_pieces import ArrowPieces
from tidewater_worker.node import Node
from tidewater_worker.partition import OFFSET_MAX, Partition, TableEnd
from tidewater_worker.ports import PartitionState, Phase
from tidewater_worker.reading import PartitionReader, log_of, position
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.topic import Topic

ARROW: Final = b"application/vnd.apache.arrow.stream"
END_HEADER: Final = b"tidewater-end-offset"
"""Of an answer in Arrow: where the partition ended when it began."""
GAPS_HEADER: Final = b"tidewater-gaps"
"""Of an answer in Arrow or NDJSON: what was lost with volumes from where it begins."""
CALL_S: Final = 30.0
LOOK_S: Final = 2.0
"""A wait looks this often whether the partition is still where it was."""
PATIENCE_S: Final = 10.0
"""How long a partition may be on its way from one owner to the next."""
RETRY_S: Final = 0.2
_ON_THE_WAY: Final = frozenset(
    {"OwnerUnreachable", "OwnerSilent", "OwnedElsewhere", "PartitionMoving", "PartitionOpening",
     "Fenced"}
)  # fmt: skip
Gaps = tuple[tuple[int, int], ...]
_ALWAYS: Final = (names.TW_PARTITION, names.TW_OFFSET, names.TW_TIME)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def chosen_columns(topic: Topic, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of a read of some columns; partition, offset and time are always there."""
    schema = table_arrow_schema(topic.spec)
    if columns is None:
        return schema
    unknown = [name for name in columns if name not in schema.names]
    if unknown:
        known = ", ".join(schema.names)
        raise Invalid("UnknownColumn", f"there is no column {unknown[0]!r}; there are {known}")
    return pa.schema([field for field in schema if field.name in (*_ALWAYS, *columns)])


def gaps_within(gaps: Gaps, begin: int, end: int) -> list[dict[str, int]]:
    """Name the gaps that lie in [begin, end), or partly."""
    return [{"start": a, "end": b} for a, b in gaps if a < end and b > begin]


def gaps_header(lost: list[dict[str, int]]) -> dict[str, str]:
    """Write the header that names gaps; none, no header."""
    text = ",".join(f"{gap['start']}-{gap['end']}" for gap in lost)
    return {GAPS_HEADER.decode(): text} if text else {}


def parse_gaps(header: bytes) -> Gaps:
    """Read what `gaps_header` wrote."""
    pairs = [gap.split(b"-") for gap in header.split(b",") if gap]
    return tuple((int(start), int(end)) for start, end in pairs)


async def table_only(node: Node, partition: Partition, offset: int | None) -> Partition:
    """Return a partition whose owner is away as far as the table has it.

    By what those who follow the table share: however many read, the catalog is asked once per
    `reader.pollInterval`.
    """
    followed = await node.link.follow(partition.topic, None, 0.0)
    table = followed.partitions.get(partition.number, PartitionState(state=Phase.RUNNING))
    if offset is not None and offset > table.next:
        partition.ready()  # not ours: raises who has it
    return Partition(
        partition.topic, partition.number, partition.directory, partition.epoch,
        table=table, table_end=TableEnd(table.next), refusal=partition.refusal,
        owner=partition.owner, is_elsewhere=True,
    )  # fmt: skip


def rows_below(batch: pa.RecordBatch, end: int) -> pa.RecordBatch:
    """Return the rows before an offset."""
    offsets = batch.column(names.TW_OFFSET)
    if not len(offsets) or offsets[-1].as_py() < end:
        return batch
    return batch.slice(0, int(np.searchsorted(offsets.to_numpy(), end)))


class PartitionStream:
    """Reads one partition from an offset on, here or through its owner."""

    def __init__(
        self,
        node: Node,
        topic: Topic,
        number: int,
        columns: Sequence[str] | None = None,
        *,
        is_committed: bool = False,
        view: Partition | None = None,
    ) -> None:
        self.schema = chosen_columns(topic, columns)
        self.offset = 0
        """The next offset."""
        self._node, self._topic, self._partition = node, topic, topic.partition(number)
        self._columns = columns
        self._is_committed = is_committed
        self._view = view
        """What to read; given for a request that another worker has passed on: none is asked."""
        self._remote_end = 0
        self._gaps: Gaps = () if view is None else view.table.gaps
        self._snapshot: int | None = None
        """The table's, when a commit was last waited for."""

    @property
    def number(self) -> int:
        """The partition's number."""
        return self._partition.number

    @property
    def end(self) -> int:
        """Where the partition ends, as far as that is known here."""
        if self._url:
            return self._remote_end
        try:
            return self._end_of(self._view or self._partition)
        except TidewaterError:
            return self._remote_end

    def lost(self, begin: int, end: int = OFFSET_MAX) -> list[dict[str, int]]:
        """Name the offsets that were lost with volumes and that a read of [begin, end) passed."""
        return gaps_within(self._gaps, begin, end)

    def is_live(self, offset: int) -> bool:
        """Tell whether a message is in this worker's memory."""
        partition = self._partition
        return not partition.is_elsewhere and offset >= partition.readable().tail.start

    @property
    def _url(self) -> str:
        return self._partition.remote_url if self._view is None else ""

    def _end_of(self, partition: Partition) -> int:
        end = log_of(partition).end
        return min(end, partition.table.next) if self._is_committed else end

    async def _here(self, offset: int | None) -> Partition:
        """Return the partition as it can be read without its owner."""
        if self._view is not None or not self._partition.is_elsewhere:
            found = self._view or self._partition
        else:
            found = await table_only(self._node, self._partition, offset)
        self._gaps = found.table.gaps
        return found

    # ---- where

    async def begin(
        self, offset: int | None, timestamp_us: int | None, *, at_end: bool = False
    ) -> None:
        """Go to an offset, to the first message not before a time, to the start or the end."""
        await self._patiently(lambda: self._begin(offset, timestamp_us, at_end))

    async def begin_at(self, snapshot_id: int | None, tag: str | None) -> None:
        """Go to where the partition was in a snapshot of the table, named by its id or tag."""
        ends = await self._node.link.frontier_at(str(self._topic.name), snapshot_id, tag)
        await self.begin(ends.get(self.number), None)

    async def _begin(self, offset: int | None, timestamp_us: int | None, at_end: bool) -> None:
        url = self._url
        if not url:
            partition = await self._here(offset)
            if at_end:
                self.offset = self._end_of(partition)
            else:
                self.offset = await position(
                    self._node, self._topic, partition, offset, timestamp_us
                )
            return
        query: dict[str, Any] = {"limit": 1}
        if at_end:
            query["position"] = "latest"
        elif offset is not None:
            query["offset"] = offset
        elif timestamp_us is not None:
            query["timestamp"] = (_EPOCH + timedelta(microseconds=timestamp_us)).isoformat()
        page = await self._page(url, query, CALL_S)
        messages = page["messages"]
        self.offset = messages[0]["offset"] if messages else page["next_offset"]
        if offset is not None:
            self.offset = offset

    async def wait_past(self, timeout_s: float) -> bool:
        """Wait until there is a message at the offset; tell whether there is."""
        return bool(await self._patiently(lambda: self._wait_past(timeout_s)))

    async def _wait_past(self, timeout_s: float) -> bool:
        now = self._node.clock.monotonic
        deadline = now() + timeout_s
        while True:
            left = max(deadline - now(), 0.0)
            if await self._wait_a_while(min(left, LOOK_S)):
                return True
            if left <= LOOK_S:
                return False

    async def _wait_a_while(self, wait_s: float) -> bool:
        url = self._url
        if url:
            query = {"offset": self.offset, "limit": 1, "wait_ms": round(wait_s * 1000)}
            page = await self._page(url, query, wait_s + CALL_S)
            return bool(page["end_offset"] > self.offset)
        partition = await self._here(self.offset)
        if partition.table_end is not None:
            return await self._follow(wait_s)
        if not self._is_committed:
            return await log_of(partition).wait_past(self.offset, wait_s)
        upto = {self.number: self.offset + 1}
        return await self._node.wait_committed(self._topic, upto, wait_s)

    async def _follow(self, wait_s: float) -> bool:
        """Wait for a commit of rows whose owner is away: another worker may make it."""
        link, name = self._node.link, str(self._topic.name)
        if self._snapshot is None:
            self._snapshot = (await link.follow(name, None, 0.0)).snapshot_id
        followed = await link.follow(name, self._snapshot, wait_s)
        self._snapshot = followed.snapshot_id
        found = followed.partitions.get(self.number)
        if found is None or found.next <= self.offset:
            return False
        if self._view is not None:
            self._view = await table_only(self._node, self._partition, self.offset)
        return True

    async def _page(self, url: str, query: dict[str, Any], timeout_s: float) -> Any:
        page = await self._node.forwarding.call(
            url, "GET", self._target(query), timeout_s=timeout_s
        )
        self._remote_end = page["end_offset"]
        return page

    def _target(self, query: dict[str, Any]) -> str:
        if self._is_committed:
            query["isolation"] = "committed"
        return f"/v1/{self._topic.name}/messages?" + urlencode({"partition": self.number, **query})

    # ---- what

    async def batches(
        self, limit: int, end: int = OFFSET_MAX
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield batches up to the end of the partition, at most `limit` rows, all before `end`."""
        patience = _Patience(self._node.clock.monotonic)
        while limit > 0 and self.offset < end:
            url = self._url
            source = self._remote(url, limit, end) if url else self._local(limit, end)
            try:
                async with aclosing(source) as batches:
                    async for batch in batches:
                        limit -= batch.num_rows
                        yield batch
            except (Retryable, OutcomeUnknown, Fenced) as error:
                if not self._is_on_the_way(error) or patience.is_over():
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            return

    async def _local(self, limit: int, end: int) -> AsyncGenerator[pa.RecordBatch, None]:
        partition = await self._here(self.offset)
        if self._is_committed:
            end = min(end, partition.table.next)
        columns = None if self._columns is None else self.schema.names
        reader = PartitionReader(self._node, self._topic, partition, self.offset, columns)
        async with aclosing(reader.batches(limit, end)) as batches:
            async for batch in batches:
                self.offset = reader.offset
                yield batch if columns is None else batch.select(columns)

    async def _remote(self, url: str, limit: int, end: int) -> AsyncGenerator[pa.RecordBatch, None]:
        query: dict[str, Any] = {"offset": self.offset, "limit": min(limit, end - self.offset)}
        if self._columns is not None:
            query["columns"] = ",".join(self._columns)
        reply = await self._node.forwarding.proxy(
            url, "GET", self._target(query), [(b"accept", ARROW)], b"", CALL_S
        )
        if reply.status != 200:
            raise _told(reply.status, await reply.read())
        told = dict(reply.headers)
        self._remote_end = int(told.get(END_HEADER, self._remote_end))
        self._gaps = parse_gaps(told.get(GAPS_HEADER, b""))
        pieces = ArrowPieces()
        async with aclosing(reply.chunks()) as chunks:
            async for chunk in chunks:
                for whole in pieces.feed(chunk):
                    batch = rows_below(whole, end)
                    if not batch.num_rows:
                        return
                    self.offset = batch.column(names.TW_OFFSET)[-1].as_py() + 1
                    self._remote_end = max(self._remote_end, self.offset)
                    yield batch
        if not pieces.is_complete:
            raise OutcomeUnknown("OwnerSilent", "the owner's answer ended before its end", 200)

    # ---- owners that change

    async def _patiently(self, call: Any) -> Any:
        patience = _Patience(self._node.clock.monotonic)
        while True:
            try:
                return await call()
            except (Retryable, OutcomeUnknown, Fenced) as error:
                if not self._is_on_the_way(error) or patience.is_over():
                    raise
                await asyncio.sleep(RETRY_S)

    def _is_on_the_way(self, error: TidewaterError) -> bool:
        """Tell whether an error passes when the partition has arrived at its next owner."""
        return self._view is None and error.reason in _ON_THE_WAY


class _Patience:
    """Is over when it failed again and again for too long; what worked in between starts anew."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = self._last = float("-inf")

    def is_over(self) -> bool:
        """Note a failure; tell whether it is one too many."""
        at = self._now()
        if at - self._last > CALL_S + LOOK_S:
            self._since = at
        self._last = at
        return at - self._since >= PATIENCE_S


def _told(status: int, data: bytes) -> TidewaterError:
    try:
        return TidewaterError.from_json(msgspec.json.decode(data), status)
    except msgspec.MsgspecError:
        return TidewaterError.from_json({}, status)
