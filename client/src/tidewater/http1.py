"""HTTP/1.1 as the client speaks it: request bytes out, response bytes in, no I/O.

    request  := method SP target SP "HTTP/1.1" CRLF header* CRLF body
    response := status-line header* CRLF body
    body     := nothing                          1xx, 204, 304
              | byte[Content-Length]
              | chunk* "0" CRLF trailer* CRLF    Transfer-Encoding: chunked
              | byte* until the peer closes      neither of the two

One parser serves the blocking and the asyncio transport. It takes bytes in any cut and gives
back whole responses (`response`) or, for bodies too large to hold, their pieces (`head`, `piece`).
A general-purpose client costs more per request than the server spends on it; this one reads only
the three headers that frame a message and leaves the others as bytes until someone asks.
"""

from functools import lru_cache
from typing import Final

from tidewater_core.errors import Invalid

HEAD_BYTES_MAX: Final = 64 * 1024
"""A response head longer than this is not one of ours."""
CHUNK_LINE_BYTES_MAX: Final = 4 * 1024
"""Bound on a chunk-size line and on one trailer line."""
BODY_BYTES_MAX: Final = 1 << 30
"""Bound on a body that is held in memory as a whole; larger ones are read in pieces."""

END: Final = b""
"""What `piece` returns once the body is complete."""

_HEAD, _LENGTH, _CHUNK_SIZE, _CHUNK, _CHUNK_END, _TRAILER, _UNTIL_CLOSE, _DONE = range(8)
_BAD_IN_HEADER: Final = ("\r", "\n", "\0")


class ProtocolError(Exception):
    """The peer does not speak HTTP/1.1, or stopped in the middle of a response."""


class Head:
    """Status line and headers of a response; headers stay bytes until they are asked for."""

    __slots__ = ("chunked", "close", "length", "raw", "status")

    def __init__(self, raw: bytes) -> None:
        """Read the status and what frames the body."""
        if not raw.startswith(b"HTTP/1.") or not raw[9:12].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 response: {raw[:60]!r}")
        self.raw = raw
        self.status = int(raw[9:12])
        lowered = raw.lower()
        self.chunked = b"chunked" in _field(lowered, b"transfer-encoding")
        connection = _field(lowered, b"connection")
        # HTTP/1.0 closes unless told otherwise, HTTP/1.1 keeps open unless told otherwise.
        self.close = b"close" in connection or (
            raw.startswith(b"HTTP/1.0") and b"keep-alive" not in connection
        )
        self.length = self._body_length(lowered)

    def _body_length(self, lowered: bytes) -> int | None:
        if self.status in {204, 304} or self.status < 200:
            return 0
        if self.chunked:
            return None
        field = _field(lowered, b"content-length")
        if not field:
            return None
        # Repeated equal lengths may be folded into one list; different ones are an attack.
        lengths = {part.strip() for part in field.split(b",")}
        if len(lengths) != 1 or not (text := lengths.pop()).isdigit():
            raise ProtocolError(f"bad Content-Length: {field!r}")
        return int(text)

    def header(self, name: str) -> str | None:
        """Return the value of a header, by any case of its name, or None."""
        wanted = name.lower()
        for line in self.raw.decode("latin-1").split("\r\n")[1:]:
            field, _, value = line.partition(":")
            if field.lower() == wanted:
                return value.strip()
        return None


@lru_cache(maxsize=256)
def read_head(raw: bytes) -> Head:
    """Read a head; a server's answers to like requests have few different ones, so it remembers."""
    return Head(raw)


class Response:
    """A whole response."""

    __slots__ = ("body", "head")

    def __init__(self, head: Head, body: bytes) -> None:
        """Join a head and its body."""
        self.head = head
        self.body = body

    @property
    def status(self) -> int:
        """Return the status code."""
        return self.head.status

    def header(self, name: str) -> str | None:
        """Return the value of a header, by any case of its name, or None."""
        return self.head.header(name)


def _field(lowered: bytes, name: bytes) -> bytes:
    """Return the value of the header `name` in a lower-cased head, joined if it is repeated."""
    at = lowered.find(b"\r\n" + name + b":")
    if at < 0:
        return b""
    begin = at + len(name) + 3
    end = lowered.find(b"\r\n", begin)
    value = lowered[begin:] if end < 0 else lowered[begin:end]
    rest = _field(lowered[end:], name) if end >= 0 else b""
    return value.strip() + b"," + rest if rest else value.strip()


def header_line(name: str, value: str) -> bytes:
    """Return one header line; refuse what would end it early."""
    if any(bad in value for bad in _BAD_IN_HEADER) or any(bad in name for bad in _BAD_IN_HEADER):
        raise Invalid("BadHeader", f"header {name!r} holds a line break or a zero byte")
    try:
        return f"{name}: {value}\r\n".encode("latin-1")
    except UnicodeEncodeError as error:
        raise Invalid("BadHeader", f"header {name!r} holds characters past latin-1") from error


def request_head(method: str, target: str, headers: bytes) -> bytes:
    """Return the part of a request that is the same for every request of its kind."""
    if not target.isascii() or any(c in target for c in " \r\n\0"):
        raise Invalid("BadTarget", f"not a request target: {target!r}")
    return f"{method} {target} HTTP/1.1\r\n".encode("ascii") + headers


def request_bytes(head: bytes, body: bytes = b"", headers: bytes = b"") -> bytes:
    """Return a whole request: a head from `request_head`, further header lines, the body."""
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (head, headers, len(body), body)


class ResponseParser:
    """Take bytes in any cut, give back responses in order."""

    __slots__ = ("_buffer", "_eof", "_head", "_left", "_parts", "_parts_bytes", "_pos", "_state")

    def __init__(self) -> None:
        """Start before the first response."""
        self._buffer = b""
        self._pos = 0
        self._eof = False
        self._state = _HEAD
        self._left = 0
        self._head: Head | None = None
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    @property
    def idle(self) -> bool:
        """Tell whether the parser stands between two responses with no byte left over."""
        return self._state == _HEAD and self._pos == len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._pos == len(self._buffer):
            self._buffer = data
        else:
            self._buffer = self._buffer[self._pos :] + data
        self._pos = 0

    def feed_eof(self) -> None:
        """Note that the peer closed its side."""
        self._eof = True

    def response(self) -> Response | None:
        """Return the next whole response, or None until more bytes are fed."""
        head = self._head
        if head is None:
            head = self.head()
            if head is None:
                return None
        if self._state == _LENGTH and not self._parts:
            # The usual case: the whole body is already here, and one slice takes it.
            end = self._pos + self._left
            if end <= len(self._buffer):
                body = self._buffer[self._pos : end]
                self._pos = end
                self._reset()
                return Response(head, body)
        while True:
            piece = self.piece()
            if piece is None:
                return None
            if piece == END:
                body = b"".join(self._parts)
                self._reset()
                return Response(head, body)
            self._parts_bytes += len(piece)
            if self._parts_bytes > BODY_BYTES_MAX:
                raise ProtocolError(f"a response body of more than {BODY_BYTES_MAX} bytes")
            self._parts.append(piece)

    def head(self) -> Head | None:
        """Return the head of the next response, or None until more bytes are fed."""
        while True:
            end = self._buffer.find(b"\r\n\r\n", self._pos)
            if end < 0:
                if len(self._buffer) - self._pos > HEAD_BYTES_MAX:
                    raise ProtocolError(f"a response head of more than {HEAD_BYTES_MAX} bytes")
                if self._eof and self._pos < len(self._buffer):
                    raise ProtocolError("the peer closed in the middle of a response head")
                return None
            head = read_head(self._buffer[self._pos : end])
            self._pos = end + 4
            if head.status >= 200 or head.status == 101:
                break
            # An interim answer (100, 103) stands before the real one.
        self._head = head
        if head.length is not None:
            self._state, self._left = _LENGTH, head.length
        else:
            self._state = _CHUNK_SIZE if head.chunked else _UNTIL_CLOSE
        return head

    def piece(self) -> bytes | None:
        """Return the next bytes of the current body, `END` after the last, None to be fed."""
        while self._state not in {_LENGTH, _CHUNK, _UNTIL_CLOSE}:
            if self._state in {_HEAD, _DONE}:
                return END
            if not self._chunk_line():
                self._check_open()
                return None
        available = len(self._buffer) - self._pos
        if self._state == _UNTIL_CLOSE:
            if available == 0:
                return END if self._eof else None
            return self._take(available)
        if self._left == 0:
            self._state = _DONE
            return END
        if available == 0:
            self._check_open()
            return None
        piece = self._take(min(available, self._left))
        self._left -= len(piece)
        if self._left == 0:
            self._state = _CHUNK_END if self._state == _CHUNK else _DONE
        return piece

    def finish(self) -> None:
        """Stand before the next response, once `piece` returned `END`."""
        self._reset()

    def _take(self, count: int) -> bytes:
        begin = self._pos
        self._pos = begin + count
        if begin == 0 and self._pos == len(self._buffer):
            return self._buffer
        return self._buffer[begin : self._pos]

    def _check_open(self) -> None:
        if self._eof:
            raise ProtocolError("the peer closed in the middle of a response body")

    def _chunk_line(self) -> bool:
        """Take one line between chunks; False until it is whole."""
        end = self._buffer.find(b"\r\n", self._pos)
        if end < 0:
            if len(self._buffer) - self._pos > CHUNK_LINE_BYTES_MAX:
                raise ProtocolError("a chunk-size line without an end")
            return False
        line = self._buffer[self._pos : end]
        self._pos = end + 2
        if self._state == _CHUNK_END:
            if line:
                raise ProtocolError("a chunk is longer than it said")
            self._state = _CHUNK_SIZE
        elif self._state == _TRAILER:
            if not line:
                self._state = _DONE
        else:
            self._left = _chunk_size(line)
            self._state = _CHUNK if self._left else _TRAILER
        return True

    def _reset(self) -> None:
        self._state = _HEAD
        self._head = None
        if self._parts:
            self._parts = []
            self._parts_bytes = 0


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    # int() would also take signs, underscores and 0x, which are no chunk size.
    if not digits or digits.strip(b"0123456789abcdefABCDEF") or len(digits) > 16:
        raise ProtocolError(f"bad chunk size: {line[:40]!r}")
    return int(digits, 16)
