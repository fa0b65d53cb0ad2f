"""Connections between workers: what is left of one answer is no part of the next."""

import asyncio

import pytest

from tidewater_core.errors import Invalid, OutcomeUnknown
from tidewater_worker.cluster import http
from tidewater_worker.cluster.http import Peers

OLD, NEW = b"old" * 1_000, b"new"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while (head := await reader.readline()) and await reader.readuntil(b"\r\n\r\n"):
        body = OLD if b"/old" in head else NEW
        half = len(body) // 2
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:half], body[half:]))
        writer.write(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
        )
        await writer.drain()
    writer.close()


async def test_an_answer_that_was_not_read_to_its_end() -> None:
    """The connection is used again, since all of it had come: the rest must not be."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    peers = Peers()
    try:
        for _ in range(3):
            chunks = (await peers.request(url, "GET", "/old")).chunks()
            assert OLD.startswith(await anext(chunks))
            await chunks.aclose()
            assert await (await peers.request(url, "GET", "/new")).read() == NEW
    finally:
        await peers.close()
        server.close()


async def test_an_answer_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for an owner that died behind its head holds up all that come after."""
    over = asyncio.Event()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await over.wait()
        writer.close()

    monkeypatch.setattr(http, "BODY_S", 0.05)
    server = await asyncio.start_server(half, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        reply = await Peers().request(url, "GET", "/")
        with pytest.raises(OutcomeUnknown, match="without an end"):
            await reply.read()
    finally:
        over.set()
        server.close()


async def test_a_worker_that_is_never_asked_again_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers come and go by other addresses: each left up to 32 connections open."""
    monkeypatch.setattr(http, "IDLE_S_MAX", 0.05)
    over: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(asyncio.Event())
        await _serve(reader, writer)
        over[-1].set()

    gone = await asyncio.start_server(serve, "127.0.0.1", 0)
    there = await asyncio.start_server(_serve, "127.0.0.1", 0)
    old, new = (f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in (gone, there))
    peers = Peers()
    try:
        await (await peers.request(old, "GET", "/old")).read()
        await asyncio.sleep(0.1)
        assert await (await peers.request(new, "GET", "/new")).read() == NEW
        await asyncio.wait_for(over[0].wait(), 5)
        assert set(peers._idle) == {new}
    finally:
        await peers.close()
        gone.close()
        there.close()


@pytest.mark.parametrize("bad", [b"\r", b"\n", b"\0", b"x\r\n\r\nGET / HTTP/1.1\r\n"])
async def test_a_request_stays_one(bad: bytes) -> None:
    """Nobody is asked: what was smuggled in would be answered to whoever asks next."""
    nowhere = "http://127.0.0.1:1"
    for header in ((b"name", b"v" + bad), (b"n" + bad, b"value")):
        with pytest.raises(Invalid, match="InvalidHeader"):
            await Peers().request(nowhere, "GET", "/", [header])
    with pytest.raises(Invalid, match="InvalidTarget"):
        await Peers().request(nowhere, "GET", "/" + bad.decode())
