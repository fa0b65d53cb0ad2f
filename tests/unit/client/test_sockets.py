"""The client's WebSocket against bytes that a test writes."""

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tidewater.errors import NotFound, OutcomeUnknown, Retryable
from tidewater.origin import Origin
from tidewater.sockets import HEARD, NoSocketError, Socket, open_socket
from tidewater_core.clock import SystemIds

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@asynccontextmanager
async def dialled(peer: Peer) -> AsyncIterator[Socket]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = next(
            line.split(b": ")[1] for line in head.split(b"\r\n") if b"Sec-WebSocket-Key" in line
        )
        token = base64.b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())
        try:
            await peer(reader, writer, token)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        socket = await open_socket(Origin("127.0.0.1", port), "/socket", 2.0, SystemIds())
        try:
            yield socket
        finally:
            await socket.close()


def switching(token: bytes) -> bytes:
    return b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %b\r\n\r\n" % token


def frame(opcode: int, payload: bytes) -> bytes:
    size = len(payload)
    head = bytes((0x80 | opcode,))
    if size < 126:
        return head + bytes((size,)) + payload
    if size < 65536:
        return head + b"\x7e" + size.to_bytes(2, "big") + payload
    return head + b"\x7f" + size.to_bytes(8, "big") + payload


@pytest.mark.parametrize("cut", [1, 3, 7, 100_000])
async def test_messages_come_whole_in_any_cut(cut: int) -> None:
    sizes = (0, 5, 125, 126, 300, 70_000) if cut > 100 else (5, 126)

    async def peer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> None:
        data = switching(token) + b"".join(frame(1, b"x" * size) for size in sizes if size)
        for at in range(0, len(data), cut):
            writer.write(data[at : at + cut])
            await writer.drain()
            if cut < 10:
                await asyncio.sleep(0)

    async with dialled(peer) as socket:
        for size in sizes:
            if size:
                assert len(await socket.receive()) == size
        with pytest.raises(OutcomeUnknown, match="closed the socket"):
            await socket.receive()


@pytest.mark.parametrize("size", [4, 200, 70_000])
async def test_what_is_sent_is_masked_and_pings_are_answered(size: int) -> None:
    heard: list[bytes] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, t: bytes) -> None:
        writer.write(switching(t) + frame(9, b"are you there"))
        for _ in range(2):
            first, second = await reader.readexactly(2)
            length = second & 0x7F
            assert second & 0x80, "masked"
            if length >= 126:
                length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
            mask = await reader.readexactly(4)
            data = await reader.readexactly(length)
            heard.append(bytes((first & 15,)) + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))
        writer.write(frame(1, b"done"))
        await writer.drain()

    async with dialled(peer) as socket:
        assert await socket.receive() == HEARD
        socket.send(b"y" * size)
        assert await socket.receive() == b"done"
    assert heard == [b"\x0aare you there", b"\x01" + b"y" * size]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"HTTP/1.1 426 X\r\nContent-Length: 2\r\n\r\nno", NoSocketError),
        (b"HTTP/1.1 101 X\r\nSec-WebSocket-Accept: other\r\n\r\n", NoSocketError),
        (b"HTTP/1.1 200 X\r\nContent-Length: 0\r\n\r\n", NoSocketError),
        (b"HTTP/1.1 404 X\r\nContent-Length: 2\r\n\r\n{}", NotFound),
        (b"HTTP/1.1 503 X\r\nContent-Length: 2\r\n\r\n{}", Retryable),
        (b"nonsense\r\n\r\n", OutcomeUnknown),
        (b"", OutcomeUnknown),
    ],
)
async def test_handshakes_that_fail(reply: bytes, kind: type[Exception]) -> None:
    async def peer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        writer.write(reply)
        await writer.drain()

    with pytest.raises(kind):
        async with dialled(peer):
            pass


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (frame(8, b"\x03\xe9bye"), Retryable),
        (b"\x01\x02ab", OutcomeUnknown),
        (b"\x81\x82abcdef", OutcomeUnknown),
        (b"\xc1\x01a", OutcomeUnknown),
        (b"\x81\x7f" + b"\xff" * 8, OutcomeUnknown),
    ],
)
async def test_frames_that_end_it(data: bytes, kind: type[Exception]) -> None:
    async def peer(r: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> None:
        writer.write(switching(token) + frame(1, b"first") + data)
        await writer.drain()
        await r.read(100)

    async with dialled(peer) as socket:
        assert await socket.receive() == b"first"
        with pytest.raises(kind):
            await socket.receive()


async def test_nobody_there() -> None:
    with pytest.raises(Retryable, match="Unreachable"):
        await open_socket(Origin("127.0.0.1", 1), "/", 2.0, SystemIds())


async def test_whoever_gives_up_leaves_no_connection_behind() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        opening.cancel()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        origin = Origin("127.0.0.1", server.sockets[0].getsockname()[1])
        opening = asyncio.ensure_future(open_socket(origin, "/", 30.0, SystemIds()))
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.wait_for(ended.wait(), 30)


async def test_a_worker_that_takes_nothing_does_not_hold_up_a_close() -> None:
    release = asyncio.Event()

    async def peer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> None:
        writer.write(switching(token))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await release.wait()

    async with dialled(peer) as socket:
        for _ in range(64):
            socket.send(b"x" * 1_000_000)
        await asyncio.wait_for(socket.close(), 30)
        release.set()
