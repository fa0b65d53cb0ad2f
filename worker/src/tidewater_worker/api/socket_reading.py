"""A partition as one live stream over a socket, as fast as the client's credit allows.

The stream is read in chunks. Readers that follow the end of a log all want the same chunk at the
same moment: it is read and encoded once and kept for a little while (`Chunks`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from tidewater_core import names
from tidewater_worker.api import encode
from tidewater_worker.api import socket_frames as frames
from tidewater_worker.api import socket_messages as say
from tidewater_worker.api.routes import check_one_start, timestamp_us
from tidewater_worker.node import Node
from tidewater_worker.streaming import PartitionStream
from tidewater_worker.topic import Topic

CHUNK_ROWS: Final = {"json": 1_000, "arrow": 100_000}
CHUNK_BYTES: Final = {"json": 512 * 1024, "arrow": 2 * 1024 * 1024}
"""One message to a client holds about this much at most, unless a single row is larger."""
KEPT_CHUNK_BYTES_MAX: Final = 256 * 1024
KEPT_BYTES_MAX: Final = 4 * 1024 * 1024
IDLE_SOURCE_S: Final = 5.0
"""A client that gives no credit for this long does not keep files and a snapshot in use."""
FOLLOW_S: Final = 3600.0


class Client(Protocol):
    """Where messages go."""

    def send(self, frame: bytes) -> None:
        """Send a frame, soon."""

    async def drained(self) -> None:
        """Wait until the client has taken most of what was sent."""


class Chunk(NamedTuple):
    """Encoded messages: a JSON array or an Arrow stream."""

    rows: int
    data: bytes


class Chunks:
    """The chunks that were encoded last, at most so many bytes."""

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Any, Chunk] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Any) -> Chunk | None:
        """Return a chunk that begins where the key says, if one is kept."""
        return self._kept.get(key)

    def put(self, key: Any, chunk: Chunk) -> None:
        """Keep a chunk; the oldest go."""
        if len(chunk.data) > KEPT_CHUNK_BYTES_MAX or key in self._kept:
            return
        self._kept[key] = chunk
        self.nbytes += len(chunk.data)
        while self.nbytes > self._bytes_max:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= len(dropped.data)


class Source:
    """The batches of a partition from an offset on, cut to the size that is wanted."""

    def __init__(self, stream: PartitionStream) -> None:
        self.stream = stream
        self.offset = stream.offset
        """The next offset to give."""
        self._batches: AsyncIterator[pa.RecordBatch] | None = None
        self._rest: pa.RecordBatch | None = None

    @property
    def is_idle(self) -> bool:
        """Tell that nothing is held."""
        return self._batches is None

    async def release(self) -> None:
        """Let go of files, snapshot and rows; the next `take` begins again at `offset`."""
        batches, self._batches, self._rest = self._batches, None, None
        if batches is not None:
            await batches.aclose()  # type: ignore[attr-defined]

    async def take(self, rows_max: int, bytes_max: int) -> list[pa.RecordBatch]:
        """Return the next rows as far as there are any now, at most about so many."""
        taken: list[pa.RecordBatch] = []
        while rows_max > 0 and bytes_max > 0:
            batch = await self._next()
            if batch is None:
                break
            per_row = max(batch.nbytes // batch.num_rows, 1)
            rows = min(rows_max, batch.num_rows, max(bytes_max // per_row, 0 if taken else 1))
            if rows < batch.num_rows:
                self._rest = batch.slice(rows)
                batch = batch.slice(0, rows)
            if rows == 0:
                break
            taken.append(batch)
            self.offset = batch.column(names.TW_OFFSET)[-1].as_py() + 1
            rows_max -= rows
            bytes_max -= rows * per_row
        return taken

    async def _next(self) -> pa.RecordBatch | None:
        if self._rest is not None:
            batch, self._rest = self._rest, None
            return batch
        if self._batches is None:
            self.stream.offset = self.offset
            self._batches = self.stream.batches(say.ID_MAX)
        try:
            return await anext(self._batches)
        except StopAsyncIteration:
            self._batches = None
            return None


class Following:
    """One `read` of a client."""

    def __init__(
        self, node: Node, topic: Topic, chunks: Chunks, client: Client, command: say.Read
    ) -> None:
        self._node, self._topic, self._chunks, self._client = node, topic, chunks, client
        self._command = command
        self._credit = command.credit
        self._more = asyncio.Event()
        self._source: Source | None = None

    @property
    def next_offset(self) -> int | None:
        """The first offset that was not sent."""
        return self._source.offset if self._source is not None else None

    def add_credit(self, messages: int) -> None:
        """Allow so many messages more."""
        self._credit = min(self._credit + messages, say.ID_MAX)
        self._more.set()

    async def run(self) -> None:
        """Send until it is cancelled; raise what ends it."""
        command, client = self._command, self._client
        stream = PartitionStream(
            self._node, self._topic, command.partition, command.columns,
            is_committed=command.isolation == "committed",
        )  # fmt: skip
        await self._begin(stream)
        source = self._source = Source(stream)
        client.send(
            frames.text(
                b'{"reading":{"id":%d,"partition":%d,"offset":%d,"end_offset":%d}}'
                % (command.id, command.partition, stream.offset, max(stream.end, stream.offset))
            )
        )
        try:
            while True:
                await self._wait_for_credit(source)
                await client.drained()
                if source.is_idle:
                    stream.offset = source.offset
                    await stream.wait_past(FOLLOW_S)
                begin = source.offset
                chunk = await self._chunk(source)
                if chunk is None:
                    continue
                self._credit -= chunk.rows
                self._send(chunk, begin, source.offset, stream)
                await asyncio.sleep(0)  # others have their turn between the chunks
        finally:
            await source.release()

    async def _begin(self, stream: PartitionStream) -> None:
        command = self._command
        check_one_start(command.offset, command.timestamp, command.snapshot_id, command.tag)
        if command.snapshot_id is not None or command.tag is not None:
            await stream.begin_at(command.snapshot_id, command.tag)
            return
        at_end = (
            command.offset is None and command.timestamp is None and command.position == "latest"
        )
        time_us = timestamp_us(None if command.timestamp is None else str(command.timestamp))
        await stream.begin(command.offset, time_us, at_end=at_end)

    async def _wait_for_credit(self, source: Source) -> None:
        while self._credit <= 0:
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), None if source.is_idle else IDLE_SOURCE_S)
            except TimeoutError:
                await source.release()

    async def _chunk(self, source: Source) -> Chunk | None:
        """Return the next chunk: one that another reader had made, or a new one."""
        command, kind, stream = self._command, self._command.format, source.stream
        columns = None if command.columns is None else tuple(command.columns)
        key = (self._topic.uuid, stream.number, source.offset, kind, columns, command.isolation)
        if source.is_idle:
            kept = self._chunks.get(key)
            if kept is not None and kept.rows <= self._credit:
                source.offset += kept.rows
                return kept
        is_live = stream.is_live(source.offset)
        rows_max = min(self._credit, CHUNK_ROWS[kind])
        batches = await source.take(rows_max, CHUNK_BYTES[kind])
        if not batches:
            return None
        chunk = encode_chunk(stream.schema, batches, kind)
        if is_live:
            self._chunks.put(key, chunk)
        return chunk

    def _send(self, chunk: Chunk, begin: int, next_offset: int, stream: PartitionStream) -> None:
        command, end_offset = self._command, max(stream.end, next_offset)
        numbers = (command.id, command.partition, chunk.rows, next_offset, end_offset)
        head = (
            b'{"messages":{"id":%d,"partition":%d,"count":%d,"next_offset":%d,"end_offset":%d'
            % numbers
        )
        lost = stream.lost(begin, next_offset)
        if lost:
            head += b',"gaps":' + msgspec.json.encode(lost)
        if command.format == "json":
            parts = [head, b',"messages":', chunk.data, b"}}"]
            opcode = frames.Opcode.TEXT
        else:
            parts = [say.binary(head + b"}}", chunk.data)]
            opcode = frames.Opcode.BINARY
        size = sum(len(part) for part in parts)
        self._client.send(b"".join((frames.head(opcode, size), *parts)))


def encode_chunk(schema: pa.Schema, batches: list[pa.RecordBatch], kind: str) -> Chunk:
    """Encode batches as a JSON array of messages or as an Arrow stream."""
    rows = sum(batch.num_rows for batch in batches)
    if kind == "json":
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return Chunk(rows, msgspec.json.encode(encode.to_messages(batch)))
    pieces = [encode.arrow_schema_message(schema)]
    joined = batches if len(batches) == 1 else [pa.concat_batches(batches)]
    pieces += [encode.arrow_batch_message(batch) for batch in joined]
    return Chunk(rows, b"".join([*pieces, encode.ARROW_END]))
