"""A WebSocket as the client speaks it (RFC 6455): text out, whole messages in.

    frame := fin:1 rsv:3 opcode:4  mask:1 length:7  [length:16 or 64]  [key:32]  payload

The worker sends every message in one frame and pings; what a client sends is masked. A handshake
that is refused raises what the server answered; `NoSocketError` means that there is no WebSocket on
this way (a proxy that does not pass it on), and polling does the same, slower.
"""

import asyncio
import base64
import hashlib
from collections import deque
from typing import Final, cast

from tidewater import wire
from tidewater.errors import OutcomeUnknown, Retryable, TidewaterError
from tidewater.http1 import Head, ProtocolError, ResponseParser
from tidewater.origin import Origin
from tidewater_core.clock import IdSource

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
CLOSE_S: Final = 1.0
FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
HEARD: Final = b""
"""Stands for a ping among messages: the worker is there."""
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_NO_SOCKET: Final = frozenset({200, 400, 405, 411, 426, 501, 502, 505})
"""Statuses of a server or proxy that does not speak WebSocket here."""


class NoSocketError(Exception):
    """There is no WebSocket at this address."""


class Socket(asyncio.Protocol):
    """One WebSocket."""

    def __init__(self, origin: Origin, ids: IdSource, key: bytes) -> None:
        """Prepare; `open_socket` makes one."""
        self._origin, self._ids = origin, ids
        digest = hashlib.sha1(key + _GUID, usedforsecurity=False).digest()
        self._accept = base64.b64encode(digest).decode()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._messages: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._failed: Exception | None = None
        self._is_open = False
        self.opened = asyncio.get_running_loop().create_future()
        self._closed = asyncio.get_running_loop().create_future()

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        self._buffer += data
        try:
            if not self._is_open and not self._handshake():
                return
            while self._frame():
                pass
        except (ProtocolError, TidewaterError, NoSocketError) as error:
            self._fail(error)
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let whoever waits know."""
        why = f": {exc}" if exc else ""
        self._fail(OutcomeUnknown("ConnectionLost", f"{self._origin} closed the socket{why}"))
        if not self._closed.done():
            self._closed.set_result(None)

    def _handshake(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = Head(bytes(self._buffer[:end]))
        if head.status != 101:
            self._refused(head)
            return False
        if head.header("Sec-WebSocket-Accept") != self._accept:
            raise NoSocketError("the handshake was answered by something else")
        del self._buffer[: end + 4]
        self._is_open = True
        if not self.opened.done():
            self.opened.set_result(None)
        return True

    def _refused(self, head: Head) -> None:
        parser = ResponseParser()
        parser.feed(bytes(self._buffer))
        response = parser.response()
        if response is None:
            return  # its body is still on the way
        if head.status in _NO_SOCKET:
            raise NoSocketError(f"{self._origin} answered {head.status}")
        raise wire.error_of(response)

    def _frame(self) -> bool:
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        size, begin = buffer[1], 2
        if size & 0x80 or not buffer[0] & 0x80 or buffer[0] & 0x70:
            raise ProtocolError("a frame that is masked, in parts or of an unknown kind")
        if size >= 126:
            begin = 4 if size == 126 else 10
            if len(buffer) < begin:
                return False
            size = int.from_bytes(buffer[2:begin], "big")
        if size > FRAME_BYTES_MAX:
            raise ProtocolError(f"a message of {size} bytes")
        if len(buffer) < begin + size:
            return False
        payload = bytes(buffer[begin : begin + size])
        opcode = buffer[0] & 0x0F
        del buffer[: begin + size]
        if opcode in (TEXT, BINARY):
            self._messages.append(payload)
        elif opcode == PING:
            self._write(PONG, payload)
            self._messages.append(HEARD)
        elif opcode == CLOSE:
            reason = payload[2:].decode("utf-8", "replace")
            raise Retryable("SocketClosed", f"{self._origin} closed the socket: {reason}")
        return True

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            error = OutcomeUnknown("BadAnswer", f"{self._origin} answered: {error}")
        if self._failed is None:
            self._failed = error
        if not self.opened.done():
            self.opened.set_exception(error)
        self._changed.set()
        if self._transport is not None:
            self._transport.close()

    # ---- what the consumer calls

    def send(self, text: bytes) -> None:
        """Send a message; nothing happens on a socket that is broken: `receive` says so."""
        self._write(TEXT, text)

    def _write(self, opcode: int, payload: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        size = len(payload)
        head = bytes((0x80 | opcode,))
        if size < 126:
            head += bytes((0x80 | size,))
        else:
            head += (
                b"\xfe" + size.to_bytes(2, "big")
                if size < 65536
                else (b"\xff" + size.to_bytes(8, "big"))
            )
        mask = self._ids.uuid().bytes[:4]
        key = (mask * (size // 4 + 1))[:size]
        masked = int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")
        self._transport.write(head + mask + masked.to_bytes(size, "big"))

    async def receive(self) -> bytes:
        """Return the next message, `HEARD` for a ping; raise why there are none."""
        while not self._messages:
            if self._failed is not None:
                raise self._failed
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

    async def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._write(CLOSE, (1000).to_bytes(2, "big"))
            self._transport.close()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.shield(self._closed)
            except TimeoutError:
                pass  # a worker that hangs does not take the last bytes
            finally:
                self._transport.abort()


async def open_socket(origin: Origin, target: str, connect_s: float, ids: IdSource) -> Socket:
    """Open a WebSocket within `connect_s`; raise `Retryable`, what it answered, `NoSocketError`."""
    loop = asyncio.get_running_loop()
    key = base64.b64encode(ids.uuid().bytes)
    try:
        async with asyncio.timeout(connect_s):
            transport, socket = await loop.create_connection(
                lambda: Socket(origin, ids, key), origin.host, origin.port, ssl=origin.tls_context()
            )
    except (OSError, TimeoutError) as error:
        raise Retryable("Unreachable", f"cannot connect to {origin}: {error}") from error
    head = origin.head(
        "GET", target, Upgrade="websocket", Connection="Upgrade",
        Sec_WebSocket_Version="13", Sec_WebSocket_Key=key.decode(),
    )  # fmt: skip
    transport.write(head + b"\r\n")
    try:
        async with asyncio.timeout(connect_s):
            await socket.opened
    except TimeoutError as error:
        transport.abort()
        raise NoSocketError(f"{origin} did not answer the handshake") from error
    except BaseException:
        transport.abort()  # whoever wanted it is gone; nobody else would close it
        raise
    return socket
