"""The asyncio transport: connections that carry many requests at once (pipelining).

Requests are written without waiting for the answers of those before them, and answers are matched
in order, as HTTP/1.1 defines it. Requests made in one turn of the event loop leave in one write.
What was in flight when a connection broke is `OutcomeUnknown`; what stood behind an answer that
says `Connection: close` is `Retryable`, because a server reads nothing past that answer.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Final, Self, cast

from tidewater.http1 import ProtocolError, Response, ResponseParser, request_bytes
from tidewater.origin import Origin
from tidewater.transport import TIMEOUT_S
from tidewater_core.errors import OutcomeUnknown, Retryable, TidewaterError

CONNECTIONS_MAX: Final = 8
"""Connections that one transport opens."""
PIPELINE_MAX: Final = 16
"""Requests in flight on one connection of a pool."""


class PipelinedConnection(asyncio.Protocol):
    """One connection with many requests in flight, answered in order."""

    def __init__(self, origin: Origin, timeout_s: float) -> None:
        """Prepare a connection; `connect` makes one."""
        self._origin = origin
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._parser = ResponseParser()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[asyncio.Future[Response], float]] = deque()
        self._outgoing: list[bytes] = []
        self._watchdog: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = self._loop.create_future()

    @property
    def in_flight(self) -> int:
        """Return the number of requests without an answer."""
        return len(self._waiting)

    @property
    def usable(self) -> bool:
        """Tell whether a further request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> asyncio.Future[Response]:
        """Send the bytes of one request; the future holds its response or a `TidewaterError`."""
        future: asyncio.Future[Response] = self._loop.create_future()
        if self._transport is None or self._transport.is_closing():
            future.set_exception(Retryable("ConnectionLost", f"not connected to {self._origin}"))
            return future
        if not self._waiting:
            # Nothing to join it with: the lone request leaves at once.
            self._transport.write(request)
        else:
            if not self._outgoing:
                self._loop.call_soon(self._write)
            self._outgoing.append(request)
        self._waiting.append((future, self._loop.time() + self._timeout_s))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._timeout_s, self._check_overdue)
        return future

    async def writable(self) -> None:
        """Wait while the peer takes less than is sent."""
        await self._writable.wait()

    async def close(self) -> None:
        """Close the connection; requests without an answer fail."""
        if self._transport is not None:
            # At once: a server that hangs would never take the bytes that are left.
            self._transport.abort()
            await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; the event loop has set TCP_NODELAY on it."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Match answers to requests."""
        parser = self._parser
        parser.feed(data)
        try:
            while (response := parser.response()) is not None:
                if not self._waiting:
                    raise ProtocolError("an answer that nobody asked for")
                self._answer(response)
        except ProtocolError as error:
            self._abort(OutcomeUnknown("BadAnswer", f"{self._origin} answered: {error}"))

    def eof_received(self) -> None:
        """End a body that lasts until the peer closes."""
        self._parser.feed_eof()
        self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whatever is still in flight."""
        why = f": {exc}" if exc else ""
        self._fail(OutcomeUnknown("NoAnswer", f"{self._origin} closed the connection{why}"))
        self._writable.set()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        """Let senders wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._writable.set()

    def _write(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(outgoing)

    def _answer(self, response: Response) -> None:
        future, _ = self._waiting.popleft()
        if not future.done():
            future.set_result(response)
        if response.head.close and self._transport is not None:
            self._fail(Retryable("ConnectionLost", f"{self._origin} closed the connection"))
            self._transport.close()

    def _check_overdue(self) -> None:
        self._watchdog = None
        if not self._waiting:
            return
        overdue_at = self._waiting[0][1]
        if overdue_at <= self._loop.time():
            # Answers come in order: all that follow the overdue one are stuck behind it.
            self._abort(
                OutcomeUnknown("NoAnswer", f"no answer from {self._origin} in {self._timeout_s} s")
            )
        else:
            self._watchdog = self._loop.call_at(overdue_at, self._check_overdue)

    def _abort(self, error: TidewaterError) -> None:
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: TidewaterError) -> None:
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)


async def connect(
    origin: Origin, timeout_s: float = TIMEOUT_S, connect_s: float | None = None
) -> PipelinedConnection:
    """Open a connection within `connect_s`, or raise `Retryable`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s if connect_s is None else connect_s):
            _, connection = await loop.create_connection(
                lambda: PipelinedConnection(origin, timeout_s),
                origin.host,
                origin.port,
                ssl=origin.tls_context(),
            )
    except (OSError, TimeoutError) as error:
        raise Retryable("Unreachable", f"cannot connect to {origin}: {error}") from error
    return connection


class AsyncTransport:
    """A pool of pipelined connections to one server."""

    def __init__(
        self,
        origin: Origin,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_s: float | None = None,
        connections_max: int = CONNECTIONS_MAX,
        pipeline_max: int = PIPELINE_MAX,
    ) -> None:
        """Make an empty pool; long polls want `pipeline_max=1`, lest others wait behind them."""
        self.origin = origin
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._connections_max = connections_max
        self._connections: list[PipelinedConnection] = []
        self._slots = asyncio.Semaphore(connections_max * pipeline_max)
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Return the transport itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self.close()

    async def request(
        self, method: str, target: str, body: bytes = b"", **headers: str | None
    ) -> Response:
        """Send one request; header names are given with `_` for `-`."""
        return await self.send(request_bytes(self.origin.head(method, target, **headers), body))

    async def send(self, request: bytes) -> Response:
        """Send the bytes of one request over the least loaded connection."""
        async with self._slots:
            connection = self._least_loaded()
            if connection is None:
                connection = await self._open()
            await connection.writable()
            return await connection.send(request)

    async def close(self) -> None:
        """Close all connections."""
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()

    def _least_loaded(self) -> PipelinedConnection | None:
        """Return a free connection, a busy one if no more may be opened, or None to open one."""
        best: PipelinedConnection | None = None
        for connection in self._connections:
            if connection.usable and (best is None or connection.in_flight < best.in_flight):
                best = connection
        if best is None or (best.in_flight and len(self._connections) < self._connections_max):
            return None
        return best

    async def _open(self) -> PipelinedConnection:
        async with self._opening:
            self._connections = [c for c in self._connections if c.usable]
            # Another request may have opened one while this one waited for the lock.
            connection = self._least_loaded()
            if connection is None:
                connection = await connect(self.origin, self._timeout_s, self._connect_s)
                self._connections.append(connection)
            return connection
