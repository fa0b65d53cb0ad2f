"""Connections between workers: what is left of one answer is no part of the next."""

import asyncio

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
            await chunks.aclose()  # type: ignore[attr-defined]
            assert await (await peers.request(url, "GET", "/new")).read() == NEW
    finally:
        await peers.close()
        server.close()
