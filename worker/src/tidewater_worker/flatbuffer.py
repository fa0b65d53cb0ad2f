"""As much of flatbuffers as it takes to find a field in the metadata of an Arrow IPC message."""

import struct

import pyarrow as pa

MESSAGE_HEADER_TYPE, MESSAGE_HEADER, MESSAGE_BODY_LENGTH = 1, 2, 3
"""Fields of a message."""
BATCH_BUFFERS, BATCH_COMPRESSION = 2, 3
"""Fields of a record batch."""
DICTIONARY_BATCH = 1
"""The field of a dictionary that is its record batch."""
_IS_DICTIONARY, _IS_BATCH = 2, 3

Bytes = bytes | memoryview


def find(data: Bytes, table: int, number: int) -> int | None:
    """Return where a table's field is; None: it is not there."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if 4 + 2 * number >= int(struct.unpack_from("<H", data, vtable)[0]):
        return None
    found = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    return table + found if found else None


def field(data: Bytes, table: int, number: int) -> int:
    """Return where a table's field is, which must be there."""
    at = find(data, table, number)
    if at is None:
        raise ValueError(f"no field {number} in the metadata of an Arrow message")
    return at


def target(data: Bytes, at: int) -> int:
    """Follow an offset."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def uncompressed_bytes(message: pa.Message) -> int:
    """Count the bytes of a message's buffers as it says they are when decompressed.

    Nothing is decompressed for it, and reading the message decompresses to just these lengths.
    """
    metadata = memoryview(message.metadata)
    root = target(metadata, 0)
    kind = metadata[field(metadata, root, MESSAGE_HEADER_TYPE)]
    if kind not in (_IS_BATCH, _IS_DICTIONARY):
        return 0
    batch = target(metadata, field(metadata, root, MESSAGE_HEADER))
    if kind == _IS_DICTIONARY:
        batch = target(metadata, field(metadata, batch, DICTIONARY_BATCH))
    body = memoryview(message.body)
    if find(metadata, batch, BATCH_COMPRESSION) is None:
        return len(body)
    vector = target(metadata, field(metadata, batch, BATCH_BUFFERS))
    count = struct.unpack_from("<I", metadata, vector)[0]
    places = struct.unpack_from(f"<{2 * count}q", metadata, vector + 4)
    total = 0
    for at, length in zip(places[::2], places[1::2], strict=True):
        if at < 0 or length < 0:  # Arrow looks at those alone that its schema asks for
            raise ValueError("a buffer of an Arrow message has an impossible place")
        if length:
            # A compressed buffer begins with its length; -1: it was left as it is.
            size = struct.unpack_from("<q", body, at)[0]
            total += length if size < 0 else size
    return total
