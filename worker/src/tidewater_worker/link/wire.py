"""Messages on the local socket.

    message := length:u32  kind:u8  payload
    kind    := 'J' JSON · 'A' id:u64 and one Arrow IPC stream (a piece of history)

The edge calls with an `id` and the table process answers it; both may also send without one
(`assign`, `durable`; `state`). A piece of history is sent only after the edge asked for it
(`more`), so that a slow reader holds one piece in memory and no thread for long.
"""

import struct
from typing import Any, Final

import msgspec

JSON: Final = ord("J")
ARROW: Final = ord("A")
MESSAGE_BYTES_MAX: Final = 512 * 1024 * 1024
_HEAD: Final = struct.Struct("<IB")
_ID: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _HEAD.size


def pack_json(value: Any) -> bytes:
    """Encode a JSON message."""
    payload = msgspec.json.encode(value)
    return _HEAD.pack(len(payload), JSON) + payload


def arrow_head(call_id: int, length: int) -> bytes:
    """Encode what goes before one piece of history: an Arrow stream of so many bytes."""
    return _HEAD.pack(_ID.size + length, ARROW) + _ID.pack(call_id)


def unpack_head(head: bytes) -> tuple[int, int]:
    """Return (payload bytes, kind)."""
    length, kind = _HEAD.unpack(head)
    if length > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes on the local socket")
    return length, kind


def unpack_arrow(payload: bytes) -> tuple[int, memoryview]:
    """Return (call id, Arrow IPC stream)."""
    return _ID.unpack_from(payload)[0], memoryview(payload)[_ID.size :]
