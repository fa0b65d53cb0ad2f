"""An Arrow IPC stream that comes over the network in pieces, cut into its batches. Pure.

    stream  := message* end          message := 0xffffffff  length:i32  metadata  body
    end     := 0xffffffff 0:i32      metadata: a flatbuffer whose field 3 is the body's length

pyarrow's own reader waits for its input in the calling thread; the event loop cannot.
"""

import struct
from typing import Final

import pyarrow as pa

from tidewater_core.errors import Corrupt

MESSAGE_BYTES_MAX: Final = 512 * 1024 * 1024
_HEAD: Final = struct.Struct("<Ii")
_CONTINUES: Final = 0xFFFFFFFF
_BODY_LENGTH: Final = 3
"""Number of the field."""


class ArrowPieces:
    """Takes pieces of a stream and gives its batches."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.schema: pa.Schema | None = None
        self.is_complete = False
        """The stream's end was seen."""

    def feed(self, piece: bytes) -> list[pa.RecordBatch]:
        """Take a piece; return the batches that are complete now."""
        self._buffer += piece
        batches: list[pa.RecordBatch] = []
        while not self.is_complete:
            size = self._size()
            if size is None or len(self._buffer) < size:
                break
            message = pa.py_buffer(bytes(memoryview(self._buffer)[:size]))
            del self._buffer[:size]
            if size == _HEAD.size:
                self.is_complete = True
            elif self.schema is None:
                self.schema = pa.ipc.read_schema(message)
            else:
                batches.append(pa.ipc.read_record_batch(message, self.schema))
        return batches

    def _size(self) -> int | None:
        """Return the size of the next message; None: more of it must come to tell."""
        data = self._buffer
        if len(data) < _HEAD.size:
            return None
        mark, length = _HEAD.unpack_from(data)
        if mark != _CONTINUES or not 0 <= length <= MESSAGE_BYTES_MAX:
            raise Corrupt("InvalidArrow", "another worker's answer is not an Arrow stream")
        at = int(_HEAD.size + length)
        if not length or len(data) < at:
            return at if not length else None
        body = _body_length(data)
        if not 0 <= body <= MESSAGE_BYTES_MAX:
            raise Corrupt("InvalidArrow", "another worker's answer has an impossible length")
        return at + body


def _body_length(data: bytearray) -> int:
    table = _HEAD.size + struct.unpack_from("<I", data, _HEAD.size)[0]
    vtable = table - struct.unpack_from("<i", data, table)[0]
    place = 4 + 2 * _BODY_LENGTH
    if struct.unpack_from("<H", data, vtable)[0] <= place:
        return 0  # fields at the end that have their default are not written
    field = struct.unpack_from("<H", data, vtable + place)[0]
    return int(struct.unpack_from("<q", data, table + field)[0]) if field else 0
