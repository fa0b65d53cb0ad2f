"""The WebSocket of a topic: `GET /v1/{ns}/{topic}/socket`.

The connection begins as HTTP in `protocol` and is taken over here. Everything about the wire is
here: frames, pings, back pressure and the end; what is said over it is the session's.

Memory is bounded: past `UNDER_WAY_MAX` unanswered commands, or while the client does not take
what it was sent, the connection is not read. A client that takes nothing for two pings is gone.
"""

import asyncio
import logging
import re
from typing import Any, Final

from fastapi import FastAPI

from tidewater_core.errors import Invalid, NotFound, Retryable, TidewaterError
from tidewater_worker.api import socket_frames as frames
from tidewater_worker.api.door import CHALLENGE
from tidewater_worker.api.errors import error_body
from tidewater_worker.api.socket_frames import Close, FrameError, FrameReader, Opcode
from tidewater_worker.api.socket_handshake import UpgradeRequired, accept
from tidewater_worker.api.socket_session import Session, Sockets
from tidewater_worker.auth.access import CONSUME, PRODUCE, topic
from tidewater_worker.auth.caller import CALLER, working_for
from tidewater_worker.auth.guard import Guard
from tidewater_worker.auth.tokens import socket_authorization_of
from tidewater_worker.node import SMALL_BODY_BYTES

_PATH: Final = re.compile(rb"/v1/([a-z0-9-]+)/([a-z0-9-]+)/socket(?:\?.*)?")
UNDER_WAY_MAX: Final = 1024
PINGS_MAX: Final = 2
"""A client that answers none of so many pings is gone; so is one that takes nothing meanwhile."""
BUSY_RETRY_S: Final = 0.05
BUSY_S: Final = 10.0
"""How long an unfinished message waits for room; it is not read meanwhile."""
CLOSE_S: Final = 2.0
"""How long a client may take to answer a close."""
_STATUS: Final = {
    400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    426: b"Upgrade Required", 429: b"Too Many Requests", 500: b"Internal Server Error",
    503: b"Service Unavailable",
}  # fmt: skip
log = logging.getLogger(__name__)


def upgrade(http: Any, sockets: Sockets) -> None:
    """Take a connection over from HTTP, or refuse to; `http` is its `EdgeProtocol`."""
    authorization, _ = socket_authorization_of(http.headers)
    if sockets.guard is None:
        _open(http, sockets, authorization)
        return
    http.transport.pause_reading()  # until it is known who this is
    sockets.node.spawn(_judge(http, sockets, sockets.guard, authorization))


async def _judge(http: Any, sockets: Sockets, guard: Guard, authorization: bytes | None) -> None:
    """Let in who may produce or read; what they do inside is judged again each time."""
    match = _PATH.fullmatch(http.url)
    try:
        if match is None:
            await guard.check(authorization)
        else:
            where = match[1].decode(), match[2].decode()
            either = (topic(CONSUME, *where), topic(PRODUCE, *where))
            await guard.check_any(authorization, either)
    except TidewaterError as error:
        _refuse(http, error, error.status)
        return
    except Exception:
        log.exception("a socket cannot be opened")
        _fail(http)
        return
    if not http.transport.is_closing():
        with working_for(authorization):
            _open(http, sockets, authorization)
        if not http.transport.is_closing():
            http.transport.resume_reading()


def _open(http: Any, sockets: Sockets, authorization: bytes | None) -> None:
    try:
        match = _PATH.fullmatch(http.url)
        if match is None or http.scope["method"] != "GET":
            raise NotFound("NoSocket", "sockets are at GET /v1/{namespace}/{topic}/socket")
        namespace, name = match[1].decode(), match[2].decode()
        sockets.node.topic(namespace, name)
        headers = dict(http.headers)
        _, headers[b"sec-websocket-protocol"] = socket_authorization_of(http.headers)
        answer = accept(headers, sockets.node.settings.socket_origins)
        if http.is_answering:
            raise Invalid("InvalidHandshake", "earlier requests of this connection are under way")
    except TidewaterError as error:
        _refuse(http, error, error.status)
        return
    except Exception:
        log.exception("a socket cannot be opened")
        _fail(http)
        return
    connection = SocketConnection(
        sockets, namespace, name, http.connections, http.loop, authorization
    )
    http.connections.discard(http)
    http.transport.write(answer)
    http.transport.set_protocol(connection)
    connection.connection_made(http.transport)


def _fail(http: Any) -> None:
    """Close whatever happens: a connection that is not read would never be seen to end."""
    _refuse(http, Retryable("Internal", "this is a fault of the worker; its log has more"), 500)


def _refuse(http: Any, error: TidewaterError, status: int) -> None:
    body = error_body(error)
    more = b"www-authenticate: %b\r\n" % CHALLENGE if status == 401 else b""
    # Behind the answers that are due: a client would take it for one of them.
    http.end_with(
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"sec-websocket-version: 13\r\n%bconnection: close\r\n\r\n%b"
        % (status, _STATUS.get(status, b"Refused"), len(body), more, body)
    )


def add_socket(app: FastAPI) -> None:
    """Answer who asks for a socket without speaking its protocol."""

    @app.get("/v1/{namespace}/{name}/socket")
    async def socket(namespace: str, name: str) -> None:
        """Open a WebSocket: produce and read on one connection (docs/websocket.md)."""
        raise UpgradeRequired("UpgradeRequired", f"/v1/{namespace}/{name}/socket is a WebSocket")


class SocketConnection(asyncio.Protocol):
    """One open socket."""

    def __init__(
        self,
        sockets: Sockets,
        namespace: str,
        name: str,
        connections: set[Any],
        loop: asyncio.AbstractEventLoop,
        authorization: bytes | None = None,
    ) -> None:
        limits = sockets.node.settings.limits
        self._sockets, self._node, self._loop = sockets, sockets.node, loop
        self._connections = connections
        self._bytes_max = limits.request_bytes_max.bytes
        self._ping_s = limits.socket_ping.seconds
        self._frames = FrameReader(self._bytes_max)
        self._authorization = authorization
        self._session = Session(sockets, namespace, name, self, self._relax, authorization)
        self._out: list[bytes] = []
        self._held = 0
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._is_closing = False
        self._is_broken = False
        self._leaving: tuple[Close, str] | None = None
        """What ends it when all is answered that was asked for."""
        self._room_by: float | None = None
        """Until when an unfinished message waits for room."""
        self._is_reading = True
        self._silent_pings = 0
        self._blocked_pings = 0
        self._drained: asyncio.Event = asyncio.Event()
        self._drained.set()
        self._timer: asyncio.TimerHandle | None = None

    # ---- the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        self._transport = transport
        self._connections.add(self)
        self._sockets.open += 1
        self._timer = self._loop.call_later(self._ping_s, self._beat)
        self._session.welcome()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._silent_pings = 0
        if self._is_broken:
            return
        try:
            messages = self._frames.feed(data)
        except FrameError as error:
            self._is_broken = True
            self._end(error.code, error.message)
            return
        self._account(self._frames.held_bytes)
        before = CALLER.set(self._authorization)
        try:
            self._take(messages)
            self._session.producer.flush()
        except Exception:
            log.exception("a socket fails")
            self._end(Close.INTERNAL, "see the worker's log")
        finally:
            CALLER.reset(before)
        session = self._session
        too_much = session.producer.under_way_bytes > self._bytes_max
        if too_much or session.is_waiting or session.under_way >= UNDER_WAY_MAX:
            self._read(False)
        large = self._held > SMALL_BODY_BYTES
        if large and not self._node.has_room and self._room_by is None and not self._is_closing:
            self._read(False)
            self._room_by = self._loop.time() + BUSY_S
            self._look_for_room(self._room_by)

    def _take(self, messages: list[frames.Message]) -> None:
        for opcode, payload in messages:
            if opcode == Opcode.CLOSE:
                self._closed_by_peer(payload)
                return
            if self._is_closing:
                continue
            if opcode == Opcode.TEXT:
                self._session.text(payload)
            elif opcode == Opcode.BINARY:
                self._session.binary(payload)
            elif opcode == Opcode.PING:
                self.send(frames.head(Opcode.PONG, len(payload)) + payload)

    def pause_writing(self) -> None:
        """Wait for a client that does not take what it gets."""
        self._drained.clear()
        self._read(False)

    def resume_writing(self) -> None:
        """Go on."""
        self._blocked_pings = 0
        self._drained.set()
        self._relax()

    def eof_received(self) -> bool:
        """Close: a socket is of no use in one direction."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client; what it produced is stored all the same."""
        self._is_closing = True
        self._connections.discard(self)
        self._sockets.open -= 1
        self._account(0)
        self._drained.set()
        if self._timer is not None:
            self._timer.cancel()
        self._session.stop()

    # ---- what the session and the server call

    def send(self, frame: bytes) -> None:
        """Send at the end of this turn of the loop, together with what else is said in it."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    async def drained(self) -> None:
        """Wait until the client has taken most of what was sent."""
        if self._out:
            self._flush()
        await self._drained.wait()

    def shutdown(self) -> None:
        """Close when the last acknowledgement is out (uvicorn calls it at the end)."""
        self._leave(Close.GOING_AWAY, "the worker is shutting down")

    # ---- inside

    def _leave(self, code: Close, reason: str) -> None:
        self._leaving = code, reason
        self._session.stop()
        self._relax()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self._transport.is_closing():
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _account(self, held: int) -> None:
        if held != self._held:
            self._node.inflight_bytes += held - self._held
            self._held = held

    def _read(self, wanted: bool) -> None:
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _relax(self) -> None:
        session = self._session
        if self._leaving is not None and session.under_way == 0:
            self._end(*self._leaving)
        elif not self._is_reading and self._drained.is_set() and self._room_by is None:
            few = session.under_way <= UNDER_WAY_MAX // 2
            few = few and not session.is_waiting
            if few and session.producer.under_way_bytes <= self._bytes_max // 2:
                self._read(True)

    def _look_for_room(self, until: float) -> None:
        """Read on when there is room for the rest of a message; let go of it if there is none.

        All that is held may be unfinished messages, each of which waits for the others.
        """
        if self._is_closing:
            return
        if self._node.has_room:
            self._room_by = None
            self._relax()
        elif self._loop.time() < until:
            self._loop.call_later(BUSY_RETRY_S, self._look_for_room, until)
        else:
            self._is_broken = True
            self._frames = FrameReader(self._bytes_max)
            self._account(0)
            self._leave(Close.TRY_LATER, f"{self._node.busy()}")

    def _beat(self) -> None:
        """Ping; give up a client that neither says nor takes anything."""
        blocked = not self._drained.is_set()
        if self._silent_pings >= PINGS_MAX or self._blocked_pings >= PINGS_MAX:
            log.info("a socket's client is gone or takes nothing; closing")
            self._end(Close.POLICY, "no answer to two pings")
            self._transport.abort()
            return
        self._blocked_pings += blocked
        if not blocked:
            self._silent_pings += self._is_reading
            self.send(frames.head(Opcode.PING, 0))
        self._timer = self._loop.call_later(self._ping_s, self._beat)

    def _closed_by_peer(self, payload: bytes) -> None:
        try:
            code = frames.close_code(payload)
        except FrameError as error:
            code = error.code
        self._end(code, "")
        self._transport.close()

    def _end(self, code: int, reason: str) -> None:
        """Say why, and close when the client has heard it or after a while."""
        if self._is_closing:
            return
        self._is_closing = True
        self._session.stop()
        self._out.append(frames.close(code, reason))
        self._flush()
        self._read(True)  # for the client's answer
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_S, self._transport.abort)
