"""The edge's end of the local socket: reconnects for ever, and then says everything again."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.errors import Retryable, TidewaterError
from tidewater_worker.link import wire
from tidewater_worker.ports import (
    FlushResult,
    Followed,
    OfferAnswer,
    PartitionState,
    Sifted,
    TopicAssignment,
    TopicState,
)

RECONNECT_S: Final = 0.05
RECONNECT_S_MAX: Final = 1.0
CALL_TIMEOUT_S: Final = 30.0
DROP_TIMEOUT_S: Final = 600.0
"""Removing the files of a large table takes long; without an answer the caller asks again."""
READ_BUFFER_BYTES: Final = 8 * 1024 * 1024
UNSENT_BYTES_MAX: Final = 128 * 1024 * 1024
"""More than the largest message. A table process that takes nothing for so long is stopped, or
hangs: it is told everything again on another connection."""
log = logging.getLogger(__name__)


OnOffer = Callable[[dict[str, Any], Callable[[OfferAnswer], None]], None]


def _away() -> Retryable:
    return Retryable("TableProcessAway", "the table process is restarting", 200)


def _sifted(piece: memoryview) -> Iterator[Sifted]:
    with pa.ipc.open_stream(piece) as reader:
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            yield Sifted(int(metadata[b"start"]), int(metadata[b"end"]), batch)


class TableLink:
    """Calls and notices between the edge and the table process."""

    def __init__(
        self,
        socket_path: Path,
        assignments: Callable[[], list[TopicAssignment]],
        on_state: Callable[[TopicState], None],
    ) -> None:
        self._path = socket_path
        self._assignments = assignments
        self._on_state = on_state
        self.on_offer: OnOffer | None = None
        """Passes an offer of our table process on; its second argument is called once, later."""
        self._writer: asyncio.StreamWriter | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = count(1)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Tell whether the table process is there."""
        return self._writer is not None

    def start(self) -> None:
        """Connect, and stay connected."""
        self._task = asyncio.create_task(self._stay_connected())

    async def close(self) -> None:
        """Hang up."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def assign(self) -> None:
        """Tell the table process what is owned now."""
        self._send({"op": "assign", "topics": self._assignments()})

    def durable(self, ends: dict[str, dict[int, int]]) -> None:
        """Tell how far partitions are durable."""
        self._send({"op": "durable", "ends": ends})

    async def flush(self, topic: str, upto: dict[int, int], timeout_s: float) -> FlushResult:
        """Commit until every frontier reaches `upto`."""
        result = await self._call(
            {"op": "flush", "topic": topic, "upto": upto, "timeout_s": timeout_s},
            timeout_s + CALL_TIMEOUT_S,
        )
        return msgspec.convert(result, FlushResult, str_keys=True)

    async def stats(self, topic: str) -> dict[str, Any]:
        """Return the table's health."""
        result: dict[str, Any] = await self._call({"op": "stats", "topic": topic})
        return result

    async def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """Return the first offset in the table not before a time."""
        result: int | None = await self._call(
            {"op": "offset_at", "topic": topic, "partition": partition,
             "timestamp_us": timestamp_us}
        )  # fmt: skip
        return result

    async def bounds(self, topic: str) -> dict[int, PartitionState]:
        """Return how far each partition is in the table now."""
        result = await self._call({"op": "bounds", "topic": topic})
        return msgspec.convert(result, dict[int, PartitionState], str_keys=True)

    async def frontier_at(
        self, topic: str, snapshot_id: int | None, tag: str | None
    ) -> dict[int, int]:
        """Return each partition's frontier in a snapshot, named by its id or tag."""
        result: dict[str, int] = await self._call(
            {"op": "frontier_at", "topic": topic, "snapshot_id": snapshot_id, "tag": tag}
        )
        return {int(partition): end for partition, end in result.items()}

    async def ping(self, timeout_s: float) -> None:
        """Make sure that the table process is there and runs; `Retryable` if not."""
        await self._call({"op": "ping"}, timeout_s)

    async def commit(self, offer: Any, timeout_s: float) -> OfferAnswer:
        """Have the table process commit another worker's files (an `Offer`) with its own."""
        result = await self._call({"op": "commit", "offer": offer}, timeout_s)
        return msgspec.convert(result, OfferAnswer, str_keys=True)

    async def drop_table(self, topic: str) -> bool:
        """Drop the table of a topic that is being deleted, with its files; False if none is there.

        Every partition must be drained and `assign` have told so. Calling it twice does no harm.
        """
        found: bool = await self._call({"op": "drop_table", "topic": topic}, DROP_TIMEOUT_S)
        return found

    async def follow(self, topic: str, known: int | None, timeout_s: float) -> Followed:
        """Wait until the table's snapshot is not `known`, at most `timeout_s`; tell how it stands.

        However many wait, the table process asks the catalog once per `reader.pollInterval`.
        """
        message = {"op": "follow", "topic": topic, "known": known, "timeout_s": timeout_s}
        result = await self._call(message, timeout_s + CALL_TIMEOUT_S)
        return msgspec.convert(result, Followed, str_keys=True)

    async def history(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        max_rows: int,
        columns: Sequence[str] | None = None,
    ) -> AsyncIterator[pa.RecordBatch]:
        """Read a range of offsets from the table, in order. `columns`: these and `tw_offset`."""
        message: dict[str, Any] = {
            "op": "history", "topic": topic, "partition": partition, "start": start, "end": end,
            "max_rows": max_rows,
        }  # fmt: skip
        if columns is not None:
            message["columns"] = list(columns)
        async with aclosing(self._pieces(message)) as pieces:
            async for piece in pieces:
                with pa.ipc.open_stream(piece) as reader:
                    for batch in reader:
                        yield batch

    async def sift(
        self, topic: str, partition: int, start: int, end: int, wanted: FilterSpec
    ) -> AsyncGenerator[Sifted, None]:
        """Read what a filter wants of a range of offsets; the answers follow each other.

        Files and row groups whose statistics rule it out are not read.
        """
        message: dict[str, Any] = {
            "op": "sift", "topic": topic, "partition": partition, "start": start, "end": end,
            "wanted": wanted.model_dump(mode="json", by_alias=True, exclude_none=True),
        }  # fmt: skip
        async with aclosing(self._pieces(message)) as pieces:
            async for piece in pieces:
                for sifted in _sifted(piece):
                    yield sifted

    async def _pieces(self, message: dict[str, Any]) -> AsyncGenerator[memoryview, None]:
        """Ask for one piece after the other; whoever stops early lets the table process know."""
        call_id = next(self._ids)
        finished = False
        try:
            while True:
                piece = await self._call(message, CALL_TIMEOUT_S, call_id)
                if piece is None:
                    finished = True
                    return
                yield piece
                message = {"op": "more"}
        finally:
            if not finished:
                self._send({"op": "cancel", "id": call_id})

    def _send(self, message: dict[str, Any]) -> None:
        writer = self._writer
        if writer is None:
            return
        data = wire.pack_json(message)
        if writer.transport.get_write_buffer_size() + len(data) <= UNSENT_BYTES_MAX:
            writer.write(data)
            return
        log.error("the table process takes nothing: what waits for it is thrown away")
        self._writer = None
        writer.transport.abort()

    async def _call(
        self, message: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S, call_id: int = 0
    ) -> Any:
        if self._writer is None:
            raise _away()
        call_id = call_id or next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send({"id": call_id, **message})
            return await asyncio.wait_for(future, timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            # What has not begun over there need not: others wait behind it.
            self._send({"op": "cancel", "id": call_id})
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Retryable(
                "TableProcessSlow", f"no answer to {message['op']} within {timeout_s:.0f} s"
            ) from None
        finally:
            self._calls.pop(call_id, None)

    async def _stay_connected(self) -> None:
        wait_s = RECONNECT_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(
                    str(self._path), limit=READ_BUFFER_BYTES
                )
            except OSError:
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, RECONNECT_S_MAX)
                continue
            wait_s = RECONNECT_S
            self._writer = writer
            self.assign()
            try:
                await self._read(reader)
            except (OSError, EOFError, ValueError) as error:
                log.warning("the table process went away: %s", error or type(error).__name__)
            except Exception:
                # A fault of ours: without this connection nothing would reach the table any more.
                log.exception("what the table process said could not be taken")
                await asyncio.sleep(RECONNECT_S_MAX)
            finally:
                self._writer = None
                writer.close()
                for future in self._calls.values():
                    if not future.done():
                        future.set_exception(_away())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            length, kind = wire.unpack_head(await reader.readexactly(wire.HEAD_BYTES))
            payload = await reader.readexactly(length)
            if kind == wire.ARROW:
                call_id, stream = wire.unpack_arrow(payload)
                self._resolve(call_id, stream)
                continue
            message = msgspec.json.decode(payload)
            if "offer" in message:
                self._hand_over(message["call"], message["offer"])
            elif "state" in message:
                self._on_state(msgspec.convert(message["state"], TopicState, str_keys=True))
            elif "error" in message:
                self._resolve(message["id"], TidewaterError.from_json(message["error"]))
            else:
                self._resolve(message["id"], message["result"])

    def _hand_over(self, call: int, offer: dict[str, Any]) -> None:
        """Pass files of this worker on to the committing one."""
        writer = self._writer

        def answered(answer: OfferAnswer) -> None:
            if self._writer is writer:  # another table process asks the table
                self._send({"op": "offered", "call": call, "answer": answer})

        if self.on_offer is None:
            answered(OfferAnswer(landed=False, reason="NoCommitter", message="nobody to ask"))
        else:
            self.on_offer(offer, answered)

    def _resolve(self, call_id: int, result: Any) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return
        if isinstance(result, TidewaterError):
            future.set_exception(result)
        else:
            future.set_result(result)
