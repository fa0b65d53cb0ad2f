"""HTTP/1.1 with a short way for producing.

uvicorn's protocol parses every connection. A produce request leaves it as soon as its head is
known: no ASGI scope, no task, no events; its body is gathered here and its answer written here.
Requests that a client pipelines on one connection are stored together and answered in order, so
that many messages in flight need neither many connections nor a batch. Everything else goes the
ordinary way through the application.

Who may not produce is refused as soon as the head is known, and the body is not kept. While that
has to be asked, a connection's requests wait in their order, and little of their bodies is read.

Who offers to speak another protocol than HTTP/1.1 or a WebSocket (`Upgrade: h2c`: curl's --http2,
Java's HttpClient) is taken at HTTP/1.1. The parser leaves out the body of every request that
offers an upgrade, so such a request is begun only when a second one reads it without the offer.

Bytes that are no request are the last that is taken; what came before them is answered first.
"""

import asyncio
import logging
import re
from collections import deque
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidewater_core.errors import (
    Invalid,
    Overloaded,
    Retryable,
    TidewaterError,
    TooLarge,
    Unsupported,
)
from tidewater_worker.api import socket
from tidewater_worker.api.door import CHALLENGE
from tidewater_worker.api.errors import error_body, retry_after_seconds
from tidewater_worker.api.produce import Producing
from tidewater_worker.api.socket_session import Sockets
from tidewater_worker.auth.access import PRODUCE, Access, topic
from tidewater_worker.auth.caller import CALLER
from tidewater_worker.auth.guard import Guard
from tidewater_worker.auth.tokens import authorization_of
from tidewater_worker.node import SMALL_BODY_BYTES, Node

_PRODUCE: Final = re.compile(rb"/v1/([a-z0-9-]+)/([a-z0-9-]+)/messages(?:\?(.*))?")
PIPELINED_MAX: Final = 1024
"""Requests of one connection that may be under way; past it the connection is not read."""
UNJUDGED_BYTES_MAX: Final = 64 * 1024
"""Bytes of a body that are taken from somebody who may turn out to be nobody."""
_STATUS: Final = {
    code: b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (code, text)
    for code, text in {
        200: b"OK",
        400: b"Bad Request",
        401: b"Unauthorized",
        403: b"Forbidden",
        404: b"Not Found",
        409: b"Conflict",
        413: b"Content Too Large",
        415: b"Unsupported Media Type",
        429: b"Too Many Requests",
        500: b"Internal Server Error",
        503: b"Service Unavailable",
    }.items()
}
HEAD_BYTES_MAX: Final = 64 * 1024
_OFFER: Final = (b"connection", b"upgrade", b"http2-settings")
"""Headers by which a client offers to speak another protocol."""
_LAST_WORD: Final = (
    b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_TOO_MANY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b"
)
_STATUS[401] += b"www-authenticate: %b\r\n" % CHALLENGE
log = logging.getLogger(__name__)


class _UnderWay:
    """Stands for the short-way requests that an ordinary one must wait for."""

    response_complete = False


class _Slot:
    """A produce request under way on a connection."""

    __slots__ = (
        "answer", "asking", "authorization", "chunks", "headers", "held", "is_judged",
        "keep_alive", "name", "namespace", "query", "refusal", "size",
    )  # fmt: skip

    def __init__(self, namespace: str, name: str, query: str) -> None:
        self.namespace, self.name, self.query = namespace, name, query
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self.size = 0
        """Bytes of the body that came."""
        self.held = 0
        """Those of them that are kept, and count as in flight."""
        self.answer: bytes | None = None
        self.keep_alive = True
        self.is_judged = True
        self.refusal: TidewaterError | None = None
        self.authorization: bytes | None = None
        self.asking: asyncio.Task[None] | None = None


class EdgeProtocol(HttpToolsProtocol):
    """One connection. uvicorn makes it; the first four arguments are bound with `partial`."""

    def __init__(
        self,
        node: Node,
        producing: Producing,
        sockets: Sockets,
        guard: Guard | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._guard = guard
        self._node, self._producing, self._sockets = node, producing, sockets
        self._body_bytes_max = node.settings.limits.request_bytes_max.bytes
        self._slots: deque[_Slot] = deque()
        self._slot: _Slot | None = None
        self._unjudged: deque[_Slot] = deque()
        """Requests that came whole and wait for a verdict, or behind one that does."""
        self._authorization: bytes | None = None
        self._is_in_head = self._is_in_body = False
        self._head_bytes: int | None = None
        """Bytes of a head or a trailer that is not whole yet, but for the piece it began in."""
        self._is_new = True
        self._heard_at = 0.0
        self._closing = False
        self._declined: bytes | None = None
        """The head of a request that offered another protocol, without the offer."""
        self._last_word: bytes | None = None
        """What is said before the connection is closed, after the answers that are due."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse one too many."""
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        most = self._node.settings.limits.connections_max
        if len(self.connections) + self._sockets.open > most:
            body = error_body(Retryable("TooManyConnections", f"{most} connections are open"))
            transport.write(_TOO_MANY % (len(body), body))
            transport.close()

    def close_if_stalled(self, now: float) -> None:
        """Cut off a client that keeps a connection and does not say what for."""
        is_sending = self._is_new or self._is_in_head or self._slot is not None
        is_sending = is_sending or getattr(self.cycle, "more_body", False)
        silent_s = now - self._heard_at
        stall_s = self._node.settings.limits.stall_max.seconds
        if is_sending and not self.flow.read_paused and silent_s > stall_s:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Forget the last request; its ASGI scope is made only if it is needed."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._slot = None
        self._is_in_head, self._is_in_body, self._head_bytes = True, False, None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; behind the body it comes too late to count."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Choose the way."""
        self._is_in_head, self._head_bytes = False, None
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._decline()
            return
        idle = self.cycle is None or (self.cycle.response_complete and not self.pipeline)
        if idle and self.parser.get_method() == b"POST":
            match = _PRODUCE.fullmatch(self.url)
            if match is not None and not self.parser.should_upgrade():
                self._is_in_body = True
                self._begin_produce(match)
                return
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expect
        self.scope["headers"] = headers
        if self._slots and not self.parser.should_upgrade():
            self.cycle = _UnderWay()  # type: ignore[assignment]
        super().on_headers_complete()
        self._is_in_body = True

    def _decline(self) -> None:
        """Begin nothing: without a parser that reads its body the request would be an empty one."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise Unsupported("NoTunnels", "CONNECT is not done here")
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] not in _OFFER]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        self._declined = b"\r\n".join([*lines, b"", b""])

    def _begin_produce(self, match: re.Match[bytes]) -> None:
        query = match[3]
        slot = _Slot(match[1].decode(), match[2].decode(), query.decode("latin-1") if query else "")
        slot.keep_alive = self.parser.should_keep_alive()
        slot.headers = self.headers
        self._slot = slot
        if self._guard is not None:
            self._judge(self._guard, slot)
        if self.expect_100_continue and not self._slots:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _judge(self, guard: Guard, slot: _Slot) -> None:
        """Tell whether the request may be done, from memory or after asking."""
        authorization = authorization_of(slot.headers)
        if authorization != self._authorization:
            self._authorization = authorization
        # The same object as before, where it can be: its hash is known.
        slot.authorization = self._authorization
        needs = topic(PRODUCE, slot.namespace, slot.name)
        try:
            slot.is_judged = guard.quick(slot.authorization, needs) is not None
        except TidewaterError as error:
            slot.refusal = error
        if not slot.is_judged:
            slot.asking = self.loop.create_task(self._ask(guard, slot, needs))

    async def _ask(self, guard: Guard, slot: _Slot, needs: tuple[Access, ...]) -> None:
        try:
            await guard.check(slot.authorization, needs)
        except TidewaterError as error:
            slot.refusal = error
        except Exception:
            log.exception("a request cannot be judged")
            slot.refusal = Retryable("AuthUnavailable", "this is a fault of the worker", 1_000)
        slot.is_judged = True
        if slot.refusal is not None:
            self._let_go(slot)
        is_open = self.transport is not None and not self.transport.is_closing()
        if is_open and len(self._slots) <= PIPELINED_MAX:
            self._read_on()
        while self._unjudged and self._unjudged[0].is_judged:
            self._store(self._unjudged.popleft())

    def on_body(self, body: bytes) -> None:
        """Gather a produce request's body."""
        self._head_bytes = None
        slot = self._slot
        if slot is None:
            super().on_body(body)
            return
        size = len(body)
        slot.size += size
        if slot.size <= self._body_bytes_max and slot.refusal is None:
            slot.chunks.append(body)
            slot.held += size
            self._node.inflight_bytes += size
            # Those that wait for a verdict are many small ones of one connection.
            if (slot.size > SMALL_BODY_BYTES or self._unjudged) and not self._node.has_room:
                slot.refusal = self._node.busy()
                self._let_go(slot)
            elif not slot.is_judged and slot.size > UNJUDGED_BYTES_MAX:
                self.flow.pause_reading()
        else:
            self._let_go(slot)

    def _let_go(self, slot: _Slot) -> None:
        """Keep nothing of a request that is not stored."""
        slot.chunks.clear()
        self._node.inflight_bytes -= slot.held
        slot.held = 0

    def on_message_complete(self) -> None:
        """Store a produce request, or keep it until it is judged."""
        self._is_in_body = False
        slot = self._slot
        if slot is None:
            if self._declined is not None:
                return
            super().on_message_complete()
            return
        self._slot = None
        self._slots.append(slot)
        if len(self._slots) > PIPELINED_MAX:
            self.flow.pause_reading()
        if slot.is_judged and not self._unjudged:
            self._store(slot)
        else:
            self._unjudged.append(slot)

    def _store(self, slot: _Slot) -> None:
        refusal = slot.refusal
        may_shrink = refusal is None or isinstance(refusal, Overloaded)
        if may_shrink and slot.size > self._body_bytes_max:  # to come back would not help
            refusal = TooLarge(
                "RequestTooLarge", f"a request has at most {self._body_bytes_max} bytes"
            )
        if refusal is not None:
            self._respond(slot, refusal.status, error_body(refusal), refusal.retry_after_ms)
            return
        body = slot.chunks[0] if len(slot.chunks) == 1 else b"".join(slot.chunks)
        slot.chunks.clear()
        before = None if self._guard is None else CALLER.set(slot.authorization)
        self._producing(
            slot.namespace, slot.name, slot.query, slot.headers, body,
            lambda status, answer, retry_ms: self._respond(slot, status, answer, retry_ms),
        )  # fmt: skip
        if before is not None:
            CALLER.reset(before)

    def _respond(self, slot: _Slot, status: int, body: bytes, retry_ms: int | None) -> None:
        self._node.inflight_bytes -= slot.held
        slot.held = 0
        retry = (
            b"retry-after: %d\r\n" % retry_after_seconds(retry_ms) if retry_ms is not None else b""
        )
        close = b"" if slot.keep_alive else b"connection: close\r\n"
        slot.answer = b"%bcontent-length: %d\r\n%b%b\r\n%b" % (
            _STATUS.get(status, _STATUS[500]), len(body), retry, close, body,
        )  # fmt: skip
        if self._slots and self._slots[0] is slot:
            self._answer_in_order()

    def _answer_in_order(self) -> None:
        slots = self._slots
        ready = []
        keep_alive = True
        while slots and keep_alive and (answer := slots[0].answer) is not None:
            ready.append(answer)
            keep_alive = slots.popleft().keep_alive
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.write(ready[0] if len(ready) == 1 else b"".join(ready))
        if self.flow.write_paused:
            self.flow.pause_reading()  # or the answers of a client that takes none would pile up
        self.server_state.total_requests += len(ready)
        if not keep_alive or (self._closing and not slots):
            self.transport.close()
        elif not slots:
            self._after_slots()
        elif len(slots) < PIPELINED_MAX:
            self._read_on()

    def _read_on(self) -> None:
        """Read again, unless the client has yet to take its answers."""
        if not self.flow.write_paused:
            self.flow.resume_reading()

    def resume_writing(self) -> None:
        """Go on with a client that has taken its answers."""
        super().resume_writing()
        if len(self._slots) < PIPELINED_MAX and not self.pipeline:
            self._read_on()

    def _after_slots(self) -> None:
        """Go on with an ordinary request that waited, or wait for the next one."""
        self._read_on()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._last_word is not None:
            self._say_last_word()
        elif self._slot is None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Go on after an ordinary request; the last word comes when all are answered."""
        is_last = self._last_word is not None and not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._say_last_word()

    def data_received(self, data: bytes) -> None:
        """Parse what came; a connection that is closing takes nothing more."""
        if self.parser is None or self._last_word is not None:
            return
        self._is_new, self._heard_at = False, self.loop.time()
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("what was sent is no request of HTTP")
            return
        if self._is_in_head or self._is_in_body:
            self._bound_head(len(data))

    def _feed(self, data: bytes) -> None:
        """Parse what came; a request that offers another protocol is parsed without the offer."""
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head, self._declined = self._declined, None
                if head is None:
                    self.handle_websocket_upgrade()
                    return
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
                rest = memoryview(rest)[upgrade.args[0] :]

    def _bound_head(self, size: int) -> None:
        """Cut off a head or a trailer without an end.

        The parser has no bound, and copies all that it has of a value with each piece; and this
        may be anybody.
        """
        if self._head_bytes is None:
            self._head_bytes = 0  # it began somewhere in what came, behind other requests
            return
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            error = TooLarge(
                "HeadTooLarge", f"head and trailer have {HEAD_BYTES_MAX} bytes at most"
            )
            self._end(b"431 Request Header Fields Too Large", error)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, after those before it."""
        self._end(b"400 Bad Request", Invalid("InvalidRequest", msg))

    def _end(self, status: bytes, error: TidewaterError) -> None:
        """Take nothing more; say why when everything that is due was answered, and close."""
        body = error_body(error)
        self._last_word = _LAST_WORD % (status, len(body), body)
        self._is_in_head = False
        if self._slot is not None:  # it is what is wrong
            self._let_go(self._slot)
            self._slot = None
        elif self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        elif getattr(self.cycle, "more_body", False) and not self.cycle.response_complete:
            if self.cycle.response_started:
                self._last_word = b""
            self._say_last_word()
            return
        elif self._is_in_body and self.cycle is not None and self.cycle.response_complete:
            self._last_word = b""  # it has its answer
        self.end_with(self._last_word)

    def end_with(self, word: bytes) -> None:
        """Take nothing more; say this when everything that is due was answered, and close."""
        self._last_word = word
        if not (self.pipeline or self.is_answering):
            self._say_last_word()

    def _say_last_word(self) -> None:
        if self._last_word:
            self.transport.write(self._last_word)
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Tell whether earlier requests of the connection are under way."""
        busy = self.cycle is not None and not self.cycle.response_complete
        return bool(self._slots) or busy

    def _should_upgrade_to_ws(self) -> bool:
        return True

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over."""
        socket.upgrade(self, self._sockets)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a request whose body did not come whole; stored ones finish on their own."""
        if self._slot is not None:
            self._let_go(self._slot)
            self._slot = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close when the last answer is out."""
        if self._slots:
            self._closing = True
        else:
            super().shutdown()
