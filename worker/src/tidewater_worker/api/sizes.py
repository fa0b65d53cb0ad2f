"""What messages take in the log's form, counted before they have it.

Of a cast above all, which makes much of little: a dictionary's values and the bytes of a view are
there once for all the rows that name them, and a null of no type takes nothing. In the log every
row has its own. Pure.
"""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core.errors import Invalid, TooLarge
from tidewater_core.settings import Limits
from tidewater_worker.log.group import Headers, Rows
from tidewater_worker.topic import Payload

ROW_BYTES: Final = 64
"""What a row takes beside its bytes, about."""
OFFSET_BITS: Final = 32
"""What a text, a list or a map takes in a column beside what is in it."""


def log_bytes_max(limits: Limits) -> int:
    """Return how many bytes a request may have in the log's form.

    What never has room in a partition would be told to come back for ever.
    """
    return min(limits.frame_bytes_max.bytes, limits.partition_inflight_bytes_max.bytes)


def check_log_bytes(nbytes: int, most: int) -> None:
    """Refuse more than `log_bytes_max`."""
    if nbytes > most:
        raise TooLarge(
            "RequestTooLarge", f"{nbytes} bytes in the log's form; at most {most} are taken"
        )


def held_bytes(payload: Payload) -> int:
    """Count the bytes of a payload's buffers, each as often as it is used.

    Not `get_total_buffer_size`, which counts an address once: a frame has all of them. Nor
    `nbytes`, which looks for the part of each buffer that is used, and takes longer.
    """
    if isinstance(payload, Rows):
        return sum(map(_row_bytes, payload.keys, payload.headers, payload.values))
    return sum(buffer.size for column in payload.columns for buffer in column.buffers() if buffer)


def _row_bytes(key: bytes | None, headers: Headers | None, value: bytes | None) -> int:
    nbytes = ROW_BYTES + len(value or b"") + len(key or b"")
    if headers:
        nbytes += sum(len(name) + len(text) for name, text in headers)
    return nbytes


def cast_bytes(given: pa.Array, kind: pa.DataType, most: int) -> int:
    """Count the bytes that a column takes as another type, or enough of them to be past `most`.

    They are the least where numbers become text, which is never many times as large.
    """
    if isinstance(given, pa.ExtensionArray):
        given = given.storage
    shape = given.type
    if pa.types.is_list_view(shape) or pa.types.is_large_list_view(shape):
        raise Invalid("WrongType", f"{shape} is not taken: a cast of it loses what is in it")
    check_views(given)
    has_offsets = _is_text(kind) or pa.types.is_nested(kind)
    nbytes = len(given) * (OFFSET_BITS if has_offsets else kind.bit_width) // 8
    if nbytes > most:  # before anything is made for so many
        return nbytes
    if _is_text(kind):
        return nbytes + (pc.sum(lengths(given)).as_py() or 0)
    if pa.types.is_map(kind) and pa.types.is_map(shape):
        nbytes += cast_bytes(given.keys, kind.key_type, most)
        return nbytes + cast_bytes(given.items, kind.item_type, most)
    if pa.types.is_list(kind) and _is_list(shape):
        return nbytes + cast_bytes(given.values, kind.value_type, most)
    return nbytes


def check_views(given: pa.Array) -> None:
    """Refuse views that point nowhere where a null hides them from Arrow's own look.

    Its casts follow them all the same, and the process ends.
    """
    while pa.types.is_dictionary(given.type):
        given = given.dictionary
    is_view = pa.types.is_string_view(given.type) or pa.types.is_binary_view(given.type)
    if is_view and given.null_count:
        hiding_none = [None, *given.buffers()[1:]]
        seen = pa.Array.from_buffers(pa.binary_view(), len(given), hiding_none, offset=given.offset)
        seen.validate(full=True)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    every = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_one(kind) for is_one in every)


def lengths(given: pa.Array) -> pa.Array:
    """Return how long each text is; of a number, the least that it can be."""
    kind = given.type
    if pa.types.is_dictionary(kind):
        return lengths(given.dictionary).take(given.indices)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        # A view is 16 bytes, and the first four say how long it is.
        views = np.frombuffer(given.buffers()[1], np.int32, 4 * len(given), 16 * given.offset)
        hidden = given.is_null().to_numpy(zero_copy_only=False) if given.null_count else None
        return pa.array(views[::4], pa.int32(), mask=hidden)
    if _is_text(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(given)
    least = 0 if pa.types.is_null(kind) else 1
    if pa.types.is_fixed_size_binary(kind):
        least = kind.byte_width
    return pa.array(np.full(len(given), least, np.int32))
