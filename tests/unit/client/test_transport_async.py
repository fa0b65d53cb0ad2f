import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from tidewater.http1 import request_bytes
from tidewater.origin import Origin
from tidewater.transport_async import AsyncTransport, PipelinedConnection, connect
from tidewater_core.errors import OutcomeUnknown, Retryable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[Origin]:
    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    listener = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield Origin("127.0.0.1", listener.sockets[0].getsockname()[1])
    finally:
        listener.close()
        await listener.wait_closed()


async def read_body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


def answer(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (extra, len(body), body)


def post(origin: Origin, body: bytes) -> bytes:
    return request_bytes(origin.head("POST", "/"), body)


@contextlib.asynccontextmanager
async def connected(origin: Origin, timeout_s: float = 5.0) -> AsyncIterator[PipelinedConnection]:
    connection = await connect(origin, timeout_s)
    try:
        yield connection
    finally:
        await connection.close()


async def test_requests_are_in_flight_together_and_answered_in_order() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Answers nothing until all have arrived: only pipelining gets past this.
        bodies = [await read_body(reader) for _ in range(50)]
        data = b"".join(answer(b) for b in bodies)
        for at in range(0, len(data), 97):
            writer.write(data[at : at + 97])
            await writer.drain()
            await asyncio.sleep(0)

    async with server(serve) as origin, connected(origin) as connection:
        futures = [connection.send(post(origin, b"%d" % i)) for i in range(50)]
        assert connection.in_flight == 50
        answers = await asyncio.gather(*futures)
        assert [a.body for a in answers] == [b"%d" % i for i in range(50)]
        assert connection.in_flight == 0


async def test_requests_of_one_turn_leave_in_one_write() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(answer(await read_body(reader)))

    async with server(serve) as origin, connected(origin) as connection:
        writes: list[int] = []
        transport = connection._transport
        assert transport is not None

        class Spy:
            def __init__(self, inner: asyncio.Transport) -> None:
                self.inner = inner

            def write(self, data: bytes) -> None:
                writes.append(1)
                self.inner.write(data)

            def writelines(self, data: list[bytes]) -> None:
                writes.append(len(data))
                self.inner.writelines(data)

            def is_closing(self) -> bool:
                return self.inner.is_closing()

        connection._transport = Spy(transport)  # type: ignore[assignment]
        await asyncio.gather(*(connection.send(post(origin, b"x")) for _ in range(9)))
        connection._transport = transport
        assert writes == [1, 8]


async def test_what_is_in_flight_when_the_connection_breaks_is_unknown() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies = [await read_body(reader) for _ in range(3)]
        writer.write(answer(bodies[0]))
        await writer.drain()

    async with server(serve) as origin, connected(origin) as connection:
        first, *rest = [connection.send(post(origin, b"%d" % i)) for i in range(3)]
        assert (await first).body == b"0"
        for future in rest:
            with pytest.raises(OutcomeUnknown):
                await future
        assert not connection.usable
        with pytest.raises(Retryable):
            await connection.send(post(origin, b"late"))


async def test_what_stands_behind_a_closing_answer_was_not_processed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await read_body(reader)
        writer.write(answer(body, b"Connection: close\r\n"))
        await writer.drain()

    async with server(serve) as origin, connected(origin) as connection:
        first, second = [connection.send(post(origin, b"%d" % i)) for i in range(2)]
        assert (await first).body == b"0"
        with pytest.raises(Retryable):
            await second


async def test_an_overdue_answer_ends_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await read_body(reader)))
        await read_body(reader)
        await reader.read()

    async with server(serve) as origin, connected(origin, 0.2) as connection:
        assert (await connection.send(post(origin, b"a"))).body == b"a"
        with pytest.raises(OutcomeUnknown, match="no answer"):
            await connection.send(post(origin, b"b"))
        assert not connection.usable


@pytest.mark.parametrize(
    "reply", [b"garbage\r\n\r\n", answer(b"1") + answer(b"nobody asked"), b"HTTP/1.1 200 OK\r\nCo"]
)
async def test_a_peer_that_does_not_speak_http(reply: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_body(reader)
        writer.write(reply)
        await writer.drain()

    async with server(serve) as origin, connected(origin) as connection:
        future = connection.send(post(origin, b"a"))
        if b"nobody" in reply:
            assert (await future).body == b"1"
        else:
            with pytest.raises(OutcomeUnknown):
                await future
        await asyncio.sleep(0.05)
        assert not connection.usable


async def test_a_cancelled_request_does_not_shift_the_answers() -> None:
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies = [await read_body(reader) for _ in range(3)]
        await go.wait()
        writer.write(b"".join(map(answer, bodies)))
        await writer.drain()

    async with server(serve) as origin, connected(origin) as connection:
        a, b, c = [connection.send(post(origin, body)) for body in (b"a", b"b", b"c")]
        b.cancel()
        go.set()
        assert [(await a).body, (await c).body] == [b"a", b"c"]


async def test_the_pool_spreads_and_stays_in_bounds() -> None:
    connections = 0
    in_flight_max = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            body = await read_body(reader)
            await asyncio.sleep(0.001)
            writer.write(answer(body))

    async with server(serve) as origin:
        async with AsyncTransport(origin, connections_max=3, pipeline_max=2) as transport:

            async def one(i: int) -> bytes:
                nonlocal in_flight_max
                response = await transport.request("POST", "/", b"%d" % i)
                in_flight_max = max(in_flight_max, max(c.in_flight for c in transport._connections))
                return response.body

            assert await asyncio.gather(*map(one, range(60))) == [b"%d" % i for i in range(60)]
        assert connections == 3
        assert in_flight_max <= 3


async def test_the_pool_replaces_a_broken_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await read_body(reader)))
        await writer.drain()

    async with server(serve) as origin, AsyncTransport(origin) as transport:
        for _ in range(3):
            assert (await transport.request("POST", "/", b"x")).body == b"x"
            await asyncio.sleep(0.05)


def test_other_event_loops_serve_as_well() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(answer(await read_body(reader)))

    async def main() -> list[bytes]:
        async with server(serve) as origin, connected(origin) as connection:
            futures = [connection.send(post(origin, b"%d" % i)) for i in range(5)]
            return [r.body for r in await asyncio.gather(*futures)]

    assert uvloop.run(main()) == [b"0", b"1", b"2", b"3", b"4"]


async def test_nobody_listens() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    async with server(serve) as origin:
        pass
    with pytest.raises(Retryable, match="Unreachable"):
        await connect(origin)
