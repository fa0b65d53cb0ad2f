"""What became of messages, told over the socket that they came by."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tidewater.deliveries import Pulled
from tidewater.errors import Conflict, OutcomeUnknown
from tidewater.origin import Origin
from tidewater.sources import Streaming
from tidewater_core.clock import SystemIds

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
Said = dict[str, Any]
Peer = Callable[[Said, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """A consumer that never has room."""

    name = "c"

    async def room_for(self, share: int, owed: Callable[[], int]) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    def take_in(self, origin: Origin, found: list[Pulled] | bytes) -> None:
        raise AssertionError


def say(writer: asyncio.StreamWriter, **said: Any) -> None:
    payload = json.dumps(said).encode()
    assert len(payload) < 65536
    writer.write(b"\x81\x7e" + len(payload).to_bytes(2, "big") + payload)


async def hear(reader: asyncio.StreamReader) -> Said | None:
    """Read a masked text frame; None: the client closes."""
    opcode, size = await reader.readexactly(2)
    size &= 0x7F
    if size == 126:
        size = int.from_bytes(await reader.readexactly(2), "big")
    mask = await reader.readexactly(4)
    data = await reader.readexactly(size)
    text = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
    return json.loads(text) if opcode & 0x0F == 1 else None


@asynccontextmanager
async def streaming(peer: Peer) -> AsyncIterator[Streaming]:
    """Yield a source whose worker answers every word by `peer`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            key = hashlib.sha1(lines[b"Sec-WebSocket-Key"] + GUID, usedforsecurity=False)
            token = base64.b64encode(key.digest())
            writer.write(
                b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %b\r\n\r\n" % token
            )
            while (said := await hear(reader)) is not None:
                await peer(said, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        source = Streaming(
            Engine(), Origin("127.0.0.1", port), "/socket", "s", 10,
            arrow=False, connect_s=5.0, ids=SystemIds(),
        )  # fmt: skip
        taking = asyncio.create_task(_take(source))
        while not source.can_settle:
            await asyncio.sleep(0)
        try:
            yield source
        finally:
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking
            await source.close()


async def _take(source: Streaming) -> None:
    with suppress(OutcomeUnknown):
        while True:
            await source.take()


async def test_answers_find_their_question_in_any_order() -> None:
    asked: list[Said] = []

    async def peer(said: Said, writer: asyncio.StreamWriter) -> None:
        if "subscribe" in said:
            say(writer, subscribed={"id": said["subscribe"]["id"], "consumer": "c"})
        elif "stop" in said:
            say(writer, stopped={"id": said["stop"]["id"]})
        else:
            asked.append(said)
            if len(asked) == 3:
                ack, nack, extend = (next(iter(each.values())) for each in asked)
                say(writer, extended={"id": extend["id"], "count": 1, "refused": []})
                refused = [{"ack_id": "2", "reason": "Stale", "message": "m"}]
                say(writer, rejected={"id": nack["id"], "count": 0, "refused": refused})
                say(writer, acknowledged={"id": ack["id"], "count": 1, "refused": []})

    async with streaming(peer) as source:
        answers = await asyncio.gather(
            source.settle("ack", {"ack_ids": ["1"], "consumer": "c"}, 10),
            source.settle("nack", {"ack_ids": ["2"], "consumer": "c", "delay_ms": 5}, 10),
            source.settle("extend", {"ack_ids": ["3"], "deadline_ms": 7}, 10),
        )
    assert answers[0] == answers[2] == {"refused": []}
    assert answers[1]["refused"][0]["reason"] == "Stale"
    bodies = [{k: v for k, v in next(iter(each.values())).items() if k != "id"} for each in asked]
    assert [next(iter(each)) for each in asked] == ["acknowledge", "reject", "extend"]
    assert bodies == [
        {"ack_ids": ["1"], "subscription": "s"},
        {"ack_ids": ["2"], "subscription": "s", "delay_ms": 5},
        {"ack_ids": ["3"], "subscription": "s", "deadline_ms": 7},
    ]


async def test_a_refusal_is_raised_where_it_was_asked_and_nowhere_else() -> None:
    async def peer(said: Said, writer: asyncio.StreamWriter) -> None:
        if "acknowledge" in said:
            fault = {"reason": "TooManyGaps", "message": "m", "kind": "Conflict", "status": 409}
            say(writer, error={"id": said["acknowledge"]["id"], **fault})
        elif "stop" in said:
            say(writer, stopped={"id": said["stop"]["id"]})

    async with streaming(peer) as source:
        for _ in range(2):
            with pytest.raises(Conflict, match="m"):
                await source.settle("ack", {"ack_ids": ["1"]}, 10)
        assert source.can_settle, "the socket goes on"


async def test_a_socket_that_breaks_leaves_the_outcome_unknown() -> None:
    async def peer(said: Said, writer: asyncio.StreamWriter) -> None:
        if "acknowledge" in said:
            writer.transport.abort()

    async with streaming(peer) as source:
        with pytest.raises(OutcomeUnknown):
            await source.settle("ack", {"ack_ids": ["1"]}, 10)
        assert not source.can_settle


async def test_a_worker_that_does_not_answer_leaves_it_unknown() -> None:
    async def peer(said: Said, writer: asyncio.StreamWriter) -> None:
        if "stop" in said:
            say(writer, stopped={"id": said["stop"]["id"]})

    async with streaming(peer) as source:
        with pytest.raises(OutcomeUnknown, match="in time"):
            await source.settle("ack", {"ack_ids": ["1"]}, 0.05)


async def test_an_error_that_comes_too_late_ends_nothing() -> None:
    async def peer(said: Said, writer: asyncio.StreamWriter) -> None:
        if "acknowledge" in said:
            number = said["acknowledge"]["id"]
            if number > 2:
                say(writer, error={"id": number - 1, "reason": "Late", "message": "m"})
                say(writer, acknowledged={"id": number, "count": 1, "refused": []})
        elif "stop" in said:
            say(writer, stopped={"id": said["stop"]["id"]})

    async with streaming(peer) as source:
        with pytest.raises(OutcomeUnknown, match="in time"):
            await source.settle("ack", {"ack_ids": ["1"]}, 0.05)
        assert await source.settle("ack", {"ack_ids": ["1"]}, 30) == {"refused": []}
        assert source.can_settle
