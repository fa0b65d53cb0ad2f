"""RFC 6455 frames: from bytes to messages and back. Pure.

    frame   := fin:1 rsv:3 opcode:4  masked:1 length:7  [length:u16 | length:u64]  [mask:4]  payload
    message := frame(text|binary, fin) | frame(text|binary) frame(continuation)* frame(…, fin)

A client masks every frame with a key of its choice, a server masks none. Extensions are not
negotiated, so reserved bits are an error. A message is refused for its size when its head is
seen, before any of it is kept.
"""

from enum import IntEnum
from typing import Final

import numpy as np


class Opcode(IntEnum):
    """What a frame is."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class Close(IntEnum):
    """Why a connection ends."""

    NORMAL = 1000
    GOING_AWAY = 1001
    """The worker is shutting down: connect again, to another or later."""
    PROTOCOL_ERROR = 1002
    INVALID_DATA = 1007
    POLICY = 1008
    """The client does not keep to the limits."""
    TOO_BIG = 1009
    INTERNAL = 1011
    TRY_LATER = 1013


CONTROL_BYTES_MAX: Final = 125
REASON_BYTES_MAX: Final = 123
FRAGMENTS_MAX: Final = 65_536
_SHORT_MAX: Final = 125
_MEDIUM: Final = 126
_LONG: Final = 127
_MEDIUM_MAX: Final = 0xFFFF
_WORDS_BY_NUMPY_FROM: Final = 2048
"""Bytes from which numpy is faster than one large integer."""
_CLOSE_CODES: Final = frozenset({*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)})

Message = tuple[int, bytes]
"""Opcode (text, binary, close, ping, pong) and payload."""


class FrameError(Exception):
    """The peer broke the protocol; the connection ends with this code."""

    def __init__(self, code: Close, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


def unmask(mask: bytes, data: bytes) -> bytes:
    """Apply a mask; twice gives the data back."""
    size = len(data)
    if size < _WORDS_BY_NUMPY_FROM:
        key = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
        return (int.from_bytes(data, "little") ^ key).to_bytes(size, "little")
    words = size // 4
    whole = np.frombuffer(data, np.uint32, words) ^ np.frombuffer(mask, np.uint32)[0]
    rest = bytes(byte ^ mask[i] for i, byte in enumerate(data[words * 4 :]))
    return bytes(whole.tobytes() + rest)


class FrameReader:
    """Takes bytes as they come, gives whole messages."""

    def __init__(self, message_bytes_max: int) -> None:
        self._max = message_bytes_max
        self._buffer = bytearray()
        self._need = 0
        """Bytes that the buffer must have before looking at it again is worth while."""
        self._opcode = 0
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of a message that is not whole yet."""
        return len(self._buffer) + self._parts_bytes

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are whole now; raise FrameError on a broken one."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._need:
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        self._need = 0
        messages: list[Message] = []
        at, size = 0, len(data)
        while size - at >= 2:
            first, second = data[at], data[at + 1]
            begin = at + 6
            length = second & 0x7F
            if length > _SHORT_MAX:
                wide = 2 if length == _MEDIUM else 8
                begin += wide
                if size - at < 2 + wide:
                    break
                length = int.from_bytes(data[at + 2 : at + 2 + wide], "big")
            self._check_head(first, second, length)
            end = begin + length
            if end > size:
                self._need = end - at
                break
            payload = unmask(data[begin - 4 : begin], data[begin:end])
            at = end
            if first & 0x80 and first & 0x0F:  # whole in one frame
                messages.append((first & 0x0F, payload))
            elif (message := self._join(first, payload)) is not None:
                messages.append(message)
        if at < size:
            self._buffer += data[at:] if at else data
        return messages

    def _check_head(self, first: int, second: int, length: int) -> None:
        opcode = first & 0x0F
        if first & 0x70:
            raise FrameError(Close.PROTOCOL_ERROR, "reserved bits: no extension was agreed on")
        if not second & 0x80:
            raise FrameError(Close.PROTOCOL_ERROR, "a client's frame must be masked")
        if opcode >= Opcode.CLOSE:
            if not first & 0x80 or length > CONTROL_BYTES_MAX:
                raise FrameError(Close.PROTOCOL_ERROR, "a control frame is short and whole")
            if opcode > Opcode.PONG:
                raise FrameError(Close.PROTOCOL_ERROR, f"opcode {opcode} is unknown")
        elif opcode > Opcode.BINARY:
            raise FrameError(Close.PROTOCOL_ERROR, f"opcode {opcode} is unknown")
        elif (opcode == Opcode.CONTINUATION) != bool(self._opcode):
            raise FrameError(Close.PROTOCOL_ERROR, "a fragment is out of order")
        elif length + self._parts_bytes > self._max:
            raise FrameError(Close.TOO_BIG, f"a message has at most {self._max} bytes")

    def _join(self, first: int, payload: bytes) -> Message | None:
        """Add a fragment; return the message when it was the last."""
        self._opcode = self._opcode or first & 0x0F
        self._parts.append(payload)
        self._parts_bytes += len(payload)
        if not first & 0x80:
            if len(self._parts) > FRAGMENTS_MAX:
                raise FrameError(Close.POLICY, "a message comes in too many fragments")
            return None
        message = (self._opcode, b"".join(self._parts))
        self._opcode, self._parts, self._parts_bytes = 0, [], 0
        return message


def head(opcode: int, length: int) -> bytes:
    """Begin an unmasked frame that is a whole message."""
    if length <= _SHORT_MAX:
        return bytes((0x80 | opcode, length))
    if length <= _MEDIUM_MAX:
        return bytes((0x80 | opcode, _MEDIUM)) + length.to_bytes(2, "big")
    return bytes((0x80 | opcode, _LONG)) + length.to_bytes(8, "big")


def text(payload: bytes) -> bytes:
    """Frame a text message."""
    return head(Opcode.TEXT, len(payload)) + payload


def close(code: int, reason: str) -> bytes:
    """Frame the end of a connection; a long reason is cut."""
    data = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore").encode()
    return head(Opcode.CLOSE, 2 + len(data)) + code.to_bytes(2, "big") + data


def close_code(payload: bytes) -> int:
    """Read the peer's reason; raise FrameError on one that may not be sent."""
    if not payload:
        return Close.NORMAL
    code = int.from_bytes(payload[:2], "big") if len(payload) > 1 else 0
    if code not in _CLOSE_CODES:
        raise FrameError(Close.PROTOCOL_ERROR, f"{code} is no reason to close")
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        raise FrameError(Close.INVALID_DATA, "the reason to close is not UTF-8") from None
    return code
