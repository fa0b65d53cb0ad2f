"""The blocking transport: keep-alive connections to one server, safe to share between threads.

Failures carry what the caller may do next. A request that could not be handed over as a whole was
not processed (`Retryable`): the server acts only on complete requests. A request that was handed
over and got no answer may or may not have been processed (`OutcomeUnknown`).
"""

import contextlib
import io
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from tidewater.http1 import END, Head, ProtocolError, Response, ResponseParser, request_bytes
from tidewater.origin import Origin
from tidewater_core.errors import OutcomeUnknown, Retryable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

TIMEOUT_S: Final = 30.0
"""How long one send or receive may make no progress."""
IDLE_CONNECTIONS_MAX: Final = 8
"""Connections that are kept open for the next request."""
TRUST_IDLE_S: Final = 1.0
"""A connection unused for longer is looked at before use: the server may have closed it."""
ANSWER_BYTES: Final = 32 * 1024
"""Room for the first bytes of an answer: most fit, and a larger buffer costs more than it saves."""
RECEIVE_BYTES: Final = 256 * 1024
"""Room for the bytes that follow."""


class Connection:
    """One connection with one request in flight."""

    def __init__(self, origin: Origin, timeout_s: float, connect_s: float | None = None) -> None:
        """Connect within `connect_s`, or raise `Retryable`."""
        self._origin = origin
        self._timeout_s = timeout_s
        self._parser = ResponseParser()
        self._used_at = time.monotonic()
        try:
            sock = socket.create_connection(
                (origin.host, origin.port), timeout=timeout_s if connect_s is None else connect_s
            )
            # A request is one send: waiting to join it with a next one only adds latency.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context = origin.tls_context()
            if context is None:
                _limit_in_kernel(sock, timeout_s)
                self._sock = sock
            else:
                self._sock = context.wrap_socket(sock, server_hostname=origin.host)
                self._sock.settimeout(timeout_s)
        except OSError as error:
            raise Retryable("Unreachable", f"cannot connect to {origin}: {error}") from error

    def exchange(self, request: bytes) -> Response:
        """Send a request and return its whole response."""
        early = self._send(request)
        if early is not None:
            return early
        room = ANSWER_BYTES
        while True:
            self._receive(room)
            response = self._parser.response()
            if response is not None:
                self._used_at = time.monotonic()
                return response
            room = RECEIVE_BYTES

    def open(self, request: bytes) -> Head:
        """Send a request and return the head of its response; `piece` then gives the body."""
        early = self._send(request)
        if early is not None:
            raise Retryable("Closed", f"{self._origin} closed the connection ({early.status})")
        while (head := self._parser.head()) is None:
            self._receive()
        return head

    def piece(self) -> bytes:
        """Return the next bytes of the body that `open` began, `END` after the last."""
        while (piece := self._parser.piece()) is None:
            self._receive()
        if piece == END:
            self._parser.finish()
            self._used_at = time.monotonic()
        return piece

    @property
    def reusable(self) -> bool:
        """Tell whether the next request may go over this connection."""
        if not self._parser.idle:
            return False
        if time.monotonic() - self._used_at < TRUST_IDLE_S:
            return True
        return not _readable(self._sock)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _send(self, request: bytes) -> Response | None:
        try:
            self._sock.sendall(request)
        except OSError as error:
            # It may have answered and closed before it read all (413, 431): that tells more.
            with contextlib.suppress(OutcomeUnknown, ProtocolError):
                self._receive()
                if (response := self._parser.response()) is not None:
                    return response
            raise Retryable(
                "ConnectionLost", f"could not send to {self._origin}: {error}"
            ) from error
        return None

    def _receive(self, room: int = RECEIVE_BYTES) -> None:
        try:
            data = self._sock.recv(room)
        except (TimeoutError, BlockingIOError) as error:
            raise OutcomeUnknown(
                "NoAnswer", f"no answer from {self._origin} within {self._timeout_s} s"
            ) from error
        except OSError as error:
            raise OutcomeUnknown("NoAnswer", f"no answer from {self._origin}: {error}") from error
        if data:
            self._parser.feed(data)
            return
        if self._parser.idle:
            raise OutcomeUnknown("NoAnswer", f"{self._origin} closed the connection unanswered")
        self._parser.feed_eof()


class Transport:
    """A pool of connections to one server."""

    def __init__(
        self,
        origin: Origin,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_s: float | None = None,
        idle_connections_max: int = IDLE_CONNECTIONS_MAX,
    ) -> None:
        """Make an empty pool; connections open when they are needed."""
        self.origin = origin
        self.timeout_s = timeout_s
        self._connect_s = connect_s
        # append and pop of a deque are atomic: no lock on the way of a request.
        self._idle: deque[Connection] = deque()
        self._idle_max = idle_connections_max
        self._closed = False

    def __enter__(self) -> Self:
        """Return the transport itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        self.close()

    def beside(self, origin: Origin, connect_s: float) -> "Transport":
        """Return a transport of the same kind to another worker."""
        return Transport(
            origin,
            timeout_s=self.timeout_s,
            connect_s=connect_s,
            idle_connections_max=self._idle_max,
        )

    def request(
        self, method: str, target: str, body: bytes = b"", **headers: str | None
    ) -> Response:
        """Send one request; header names are given with `_` for `-`."""
        return self.send(request_bytes(self.origin.head(method, target, **headers), body))

    def send(self, request: bytes) -> Response:
        """Send the bytes of one request and return its response."""
        connection = self._take()
        try:
            response = connection.exchange(request)
        except ProtocolError as error:
            connection.close()
            raise OutcomeUnknown("BadAnswer", f"{self.origin} answered: {error}") from error
        except BaseException:
            connection.close()
            raise
        if response.head.close:
            connection.close()
        else:
            self._give_back(connection)
        return response

    @contextlib.contextmanager
    def stream(self, request: bytes) -> Iterator[tuple[Head, "BodyReader"]]:
        """Send the bytes of one request and read the response's body as it comes."""
        connection = self._take()
        try:
            head = connection.open(request)
            body = BodyReader(connection)
            yield head, body
            reusable = body.complete and not head.close
        except ProtocolError as error:
            connection.close()
            raise OutcomeUnknown("BadAnswer", f"{self.origin} answered: {error}") from error
        except BaseException:
            connection.close()
            raise
        if reusable:
            self._give_back(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all idle connections; those in use close when their request ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection:
        while True:
            try:
                # The one used last is the one least likely to have been closed by the server.
                connection = self._idle.pop()
            except IndexError:
                return Connection(self.origin, self.timeout_s, self._connect_s)
            if connection.reusable:
                return connection
            connection.close()

    def _give_back(self, connection: Connection) -> None:
        if self._closed or len(self._idle) >= self._idle_max:
            connection.close()
        else:
            self._idle.append(connection)


class BodyReader(io.RawIOBase):
    """A response body as a file, in the pieces in which it arrives."""

    def __init__(self, connection: Connection) -> None:
        """Begin at the first byte of the body."""
        super().__init__()
        self._connection = connection
        self._rest = memoryview(b"")
        self.complete = False

    def readable(self) -> bool:
        """Tell that this file can be read."""
        return True

    def piece(self) -> bytes:
        """Return the next bytes as they arrived, empty at the end."""
        if self._rest:
            rest, self._rest = bytes(self._rest), memoryview(b"")
            return rest
        if self.complete:
            return END
        piece = self._connection.piece()
        self.complete = piece == END
        return piece

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill `buffer` with what there is; 0 at the end."""
        target = memoryview(buffer).cast("B")
        if not self._rest:
            self._rest = memoryview(self.piece())
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _limit_in_kernel(sock: socket.socket, timeout_s: float) -> None:
    """Bound each send and receive without Python's way, which asks poll() before every one."""
    # Zero would mean no limit at all.
    limit = struct.pack("@ll", *divmod(max(1, round(timeout_s * 1_000_000)), 1_000_000))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _readable(sock: socket.socket) -> bool:
    """Tell whether an idle socket has something to say: its end, or bytes that nobody asked for."""
    timeout_s = sock.gettimeout()
    sock.setblocking(False)
    try:
        sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    else:
        return True
    finally:
        sock.settimeout(timeout_s)
