"""HTTP/1.1 with a short way for producing.

uvicorn's protocol parses every connection. A produce request leaves it as soon as its head is
known: no ASGI scope, no task, no events; its body is gathered here and its answer written here.
Requests that a client pipelines on one connection are stored together and answered in order, so
that many messages in flight need neither many connections nor a batch. Everything else goes the
ordinary way through the application.
"""

import re
from collections import deque
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidewater_core.errors import TooLarge
from tidewater_worker.api import socket
from tidewater_worker.api.errors import error_body, retry_after_seconds
from tidewater_worker.api.produce import Producing
from tidewater_worker.api.socket_session import Sockets
from tidewater_worker.node import Node

_PRODUCE: Final = re.compile(rb"/v1/([a-z0-9-]+)/([a-z0-9-]+)/messages(?:\?(.*))?")
PIPELINED_MAX: Final = 1024
"""Requests of one connection that may be under way; past it the connection is not read."""
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


class _UnderWay:
    """Stands for the short-way requests that an ordinary one must wait for."""

    response_complete = False


class _Slot:
    """A produce request under way on a connection."""

    __slots__ = ("answer", "chunks", "keep_alive", "name", "namespace", "query", "size")

    def __init__(self, namespace: str, name: str, query: str) -> None:
        self.namespace, self.name, self.query = namespace, name, query
        self.chunks: list[bytes] = []
        self.size = 0
        self.answer: bytes | None = None
        self.keep_alive = True


class EdgeProtocol(HttpToolsProtocol):
    """One connection. uvicorn makes it; the first three arguments are bound with `partial`."""

    def __init__(
        self, node: Node, producing: Producing, sockets: Sockets, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._node, self._producing, self._sockets = node, producing, sockets
        self._body_bytes_max = node.settings.limits.request_bytes_max.bytes
        self._slots: deque[_Slot] = deque()
        self._slot: _Slot | None = None
        self._closing = False

    def on_message_begin(self) -> None:
        """Forget the last request; its ASGI scope is made only if it is needed."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._slot = None

    def on_headers_complete(self) -> None:
        """Choose the way."""
        idle = self.cycle is None or (self.cycle.response_complete and not self.pipeline)
        if idle and self.parser.get_method() == b"POST":
            match = _PRODUCE.fullmatch(self.url)
            if match is not None and not self.parser.should_upgrade():
                self._begin_produce(match)
                return
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expect
        self.scope["headers"] = headers
        if self._slots:
            self.cycle = _UnderWay()  # type: ignore[assignment]
        super().on_headers_complete()

    def _begin_produce(self, match: re.Match[bytes]) -> None:
        query = match[3]
        slot = _Slot(match[1].decode(), match[2].decode(), query.decode("latin-1") if query else "")
        slot.keep_alive = self.parser.should_keep_alive()
        self._slot = slot
        if self.expect_100_continue and not self._slots:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Gather a produce request's body."""
        slot = self._slot
        if slot is None:
            super().on_body(body)
            return
        slot.size += len(body)
        self._node.inflight_bytes += len(body)
        if slot.size <= self._body_bytes_max:
            slot.chunks.append(body)
        else:
            slot.chunks.clear()

    def on_message_complete(self) -> None:
        """Store a produce request."""
        slot = self._slot
        if slot is None:
            super().on_message_complete()
            return
        self._slot = None
        self._slots.append(slot)
        if len(self._slots) > PIPELINED_MAX:
            self.flow.pause_reading()
        if slot.size > self._body_bytes_max:
            error = TooLarge(
                "RequestTooLarge", f"a request has at most {self._body_bytes_max} bytes"
            )
            self._respond(slot, error.status, error_body(error), None)
            return
        body = slot.chunks[0] if len(slot.chunks) == 1 else b"".join(slot.chunks)
        slot.chunks.clear()
        self._producing(
            slot.namespace, slot.name, slot.query, self.headers, body,
            lambda status, answer, retry_ms: self._respond(slot, status, answer, retry_ms),
        )  # fmt: skip

    def _respond(self, slot: _Slot, status: int, body: bytes, retry_ms: int | None) -> None:
        self._node.inflight_bytes -= slot.size
        slot.size = 0
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
        self.server_state.total_requests += len(ready)
        if not keep_alive or (self._closing and not slots):
            self.transport.close()
        elif not slots:
            self._after_slots()
        elif len(slots) < PIPELINED_MAX:
            self.flow.resume_reading()

    def _after_slots(self) -> None:
        """Go on with an ordinary request that waited, or wait for the next one."""
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._slot is None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def data_received(self, data: bytes) -> None:
        """Parse what came; a connection that is closing takes nothing more."""
        if self.parser is not None:
            super().data_received(data)

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
            self._node.inflight_bytes -= self._slot.size
            self._slot = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close when the last answer is out."""
        if self._slots:
            self._closing = True
        else:
            super().shutdown()
