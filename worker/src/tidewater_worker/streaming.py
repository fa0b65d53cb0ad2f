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
import pyarrow as pa

from tidewater_core import names
from tidewater_core.errors import Fenced, Invalid, OutcomeUnknown, Retryable, TidewaterError
from tidewater_worker.cluster.arrow_pieces import ArrowPieces
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.reading import PartitionReader, log_of, position
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.topic import Topic

ARROW: Final = b"application/vnd.apache.arrow.stream"
END_HEADER: Final = b"tidewater-end-offset"
"""Of an answer in Arrow: where the partition ended when it began."""
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
            return self._view or self._partition
        return await self._node.forwarding.table_only(self._partition, offset)

    # ---- where

    async def begin(
        self, offset: int | None, timestamp_us: int | None, *, at_end: bool = False
    ) -> None:
        """Go to an offset, to the first message not before a time, to the start or the end."""
        await self._patiently(lambda: self._begin(offset, timestamp_us, at_end))

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
        try:
            await self._node.wait_committed(self._topic, {self.number: self.offset + 1}, wait_s)
        except Retryable:
            return False
        return True

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
            self._view = await self._node.forwarding.table_only(self._partition, self.offset)
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

    async def batches(self, limit: int) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield batches up to the end of the partition, at most `limit` rows."""
        patience = _Patience(self._node.clock.monotonic)
        while limit > 0:
            url = self._url
            source = self._remote(url, limit) if url else self._local(limit)
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

    async def _local(self, limit: int) -> AsyncGenerator[pa.RecordBatch, None]:
        partition = await self._here(self.offset)
        if self._is_committed:
            limit = min(limit, partition.table.next - self.offset)
        if limit <= 0:
            return
        columns = None if self._columns is None else self.schema.names
        reader = PartitionReader(self._node, self._topic, partition, self.offset, columns)
        async with aclosing(reader.batches(limit)) as batches:
            async for batch in batches:
                self.offset = reader.offset
                yield batch if columns is None else batch.select(columns)

    async def _remote(self, url: str, limit: int) -> AsyncGenerator[pa.RecordBatch, None]:
        query: dict[str, Any] = {"offset": self.offset, "limit": limit}
        if self._columns is not None:
            query["columns"] = ",".join(self._columns)
        reply = await self._node.forwarding.proxy(
            url, "GET", self._target(query), [(b"accept", ARROW)], b"", CALL_S
        )
        if reply.status != 200:
            raise _told(reply.status, await reply.read())
        self._remote_end = int(dict(reply.headers).get(END_HEADER, self._remote_end))
        pieces = ArrowPieces()
        async with aclosing(reply.chunks()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                for batch in pieces.feed(chunk):
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
