"""The bytes of a log segment: grammar, encoder and decoder. Pure.

    segment := header frame* zeros?
    header  := magic "TWLOG001"  version:u16  flags:u16  topic-uuid:16  partition:u32
               base-offset:u64  schema-length:u32  schema (Arrow IPC schema message)  crc32:u32
    frame   := base-offset:u64  length:u32  crc32:u32  body:u8[length]
    body    := Arrow IPC record batch message (columns of the log schema, one row a message)

Integers are little-endian. A checksum covers everything of its header or frame but itself.
IPC messages are padded to 8 bytes, so every body begins at a multiple of 8 and can be read
without a copy. Segments are preallocated with zeros: a frame of length 0 is the end.

A torn tail is a value (`Torn`), not an exception: what it means depends on what follows it,
and that is for `recover` to decide.
"""

import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import pyarrow as pa

# The same CRC-32 as zlib's at the speed of memory; zlib's would be a tenth of a bulk load's work.
from isal.isal_zlib import crc32

from tidewater_core.errors import Corrupt

MAGIC: Final = b"TWLOG001"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sHH16sIQI")
_FRAME: Final = struct.Struct("<QII")
_CRC: Final = struct.Struct("<I")
_OFFSET_LENGTH: Final = struct.Struct("<QI")
FRAME_HEAD_BYTES: Final = _FRAME.size
ALIGN_BYTES: Final = 8
FRAME_BODY_BYTES_MAX: Final = 256 * 1024 * 1024
SCHEMA_BYTES_MAX: Final = 1024 * 1024

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Who a segment belongs to and what its batches look like."""

    topic_uuid: UUID
    partition: int
    base_offset: int
    schema: pa.Schema
    size: int
    """Bytes of the header: where the first frame begins."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One valid frame."""

    base_offset: int
    body_at: int
    """Byte of the buffer at which the body begins."""
    end_at: int
    """Byte after the frame."""


@dataclass(frozen=True, slots=True)
class End:
    """Nothing was written here: zeros or the end of the buffer."""

    at: int


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes that are not a whole, valid frame."""

    at: int
    why: str


def encode_header(topic_uuid: UUID, partition: int, base_offset: int, schema: pa.Schema) -> bytes:
    """Encode a segment header."""
    schema_bytes = schema.serialize().to_pybytes()
    fixed = _HEADER.pack(
        MAGIC, VERSION, 0, topic_uuid.bytes, partition, base_offset, len(schema_bytes)
    )
    checked = fixed + schema_bytes
    header: bytes = checked + _CRC.pack(crc32(checked))
    assert len(header) % ALIGN_BYTES == 0, "frames must begin aligned"
    return header


def header_size(data: Bytes) -> int:
    """Return the bytes of a header as its beginning claims; 0 if that is not all there."""
    if len(data) < _HEADER.size:
        return 0
    schema_length: int = _HEADER.unpack_from(data)[-1]
    return _HEADER.size + min(schema_length, SCHEMA_BYTES_MAX) + _CRC.size


def decode_header(data: Bytes, name: str) -> SegmentHeader:
    """Decode a segment header, or raise `Corrupt` naming the segment."""
    if len(data) < _HEADER.size:
        raise Corrupt("SegmentHeaderTorn", f"{name}: shorter than a header")
    magic, version, flags, uuid_bytes, partition, base, schema_length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt("NotASegment", f"{name}: does not begin with {MAGIC.decode()}")
    if version != VERSION or flags != 0:
        raise Corrupt(
            "SegmentVersionUnknown",
            f"{name}: version {version}, flags {flags}; this program reads version {VERSION}",
        )
    crc_at = _HEADER.size + schema_length
    if schema_length > SCHEMA_BYTES_MAX or len(data) < crc_at + _CRC.size:
        raise Corrupt("SegmentHeaderTorn", f"{name}: the schema is cut off")
    if crc32(memoryview(data)[:crc_at]) != _CRC.unpack_from(data, crc_at)[0]:
        raise Corrupt("SegmentHeaderCorrupt", f"{name}: header checksum does not match")
    schema = pa.ipc.read_schema(pa.py_buffer(bytes(data[_HEADER.size : crc_at])))
    return SegmentHeader(UUID(bytes=uuid_bytes), partition, base, schema, crc_at + _CRC.size)


def encode_frame_head(base_offset: int, *body: Bytes) -> bytes:
    """Encode what stands before a frame's body, which may be in pieces."""
    length = sum(map(len, body))
    crc = crc32(_OFFSET_LENGTH.pack(base_offset, length))
    for piece in body:
        crc = crc32(piece, crc)
    return _FRAME.pack(base_offset, length, crc)


def peek_frame(data: Bytes, at: int) -> tuple[int, int]:
    """Return (base offset, bytes of the whole frame) as its head claims; (0, 0) at the end."""
    if at + FRAME_HEAD_BYTES > len(data):
        return 0, 0
    base_offset, length, _ = _FRAME.unpack_from(data, at)
    return base_offset, FRAME_HEAD_BYTES + length if length else 0


def decode_frame(data: Bytes, at: int) -> Frame | End | Torn:
    """Decode the frame at byte `at`; the checksum is verified."""
    left = len(data) - at
    if left == 0:
        return End(at)
    if left < FRAME_HEAD_BYTES:
        return End(at) if not any(data[at:]) else Torn(at, "head cut off")
    base_offset, length, crc = _FRAME.unpack_from(data, at)
    if length == 0:
        if base_offset == 0 and crc == 0:
            return End(at)
        return Torn(at, "length 0 in a head that is not empty")
    if length > FRAME_BODY_BYTES_MAX:
        return Torn(at, f"length {length} is past the limit of {FRAME_BODY_BYTES_MAX}")
    body_at = at + FRAME_HEAD_BYTES
    end_at = body_at + length
    if end_at > len(data):
        return Torn(at, f"body cut off: {length} bytes claimed, {len(data) - body_at} there")
    body = memoryview(data)[body_at:end_at]
    if crc32(body, crc32(_OFFSET_LENGTH.pack(base_offset, length))) != crc:
        return Torn(at, "checksum does not match")
    return Frame(base_offset, body_at, end_at)
