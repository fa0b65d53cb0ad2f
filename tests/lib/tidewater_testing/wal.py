"""A second decoder of the log, written from the text of its format and from nothing else.

It shares no code with the worker: its checksum is crcmod's, its parsing its own. Where the two
disagree, one of them does not do what `docs/formats/log.md` says.

    segment := header frame* zeros?
    header  := magic "TWLOG001"  version:u16  flags:u16  topic-uuid:16  partition:u32
               base-offset:u64  schema-length:u32  schema (Arrow IPC schema message)  crc32:u32
    frame   := base-offset:u64  length:u32  crc32:u32  body:u8[length]

Integers are little-endian; a checksum covers everything of its header or frame but itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from uuid import UUID

import crcmod.predefined
import pyarrow as pa

crc32 = cast("Callable[[bytes], int]", crcmod.predefined.mkCrcFun("crc-32"))

MAGIC = b"TWLOG001"
_HEADER_FIXED_BYTES = 8 + 2 + 2 + 16 + 4 + 8 + 4
_FRAME_HEAD_BYTES = 8 + 4 + 4
_CRC_BYTES = 4


class LogFormatError(ValueError):
    """The bytes are not what the format allows; says where."""


@dataclass(frozen=True)
class Header:
    """The beginning of a segment."""

    topic_uuid: UUID
    partition: int
    base_offset: int
    schema: pa.Schema
    size: int


@dataclass(frozen=True)
class Frame:
    """One frame that checks out."""

    at: int
    end: int
    base_offset: int
    batch: pa.RecordBatch

    @property
    def rows(self) -> int:
        """Its messages."""
        return int(self.batch.num_rows)


@dataclass(frozen=True)
class Segment:
    """A segment file, decoded as far as it is valid."""

    path: Path
    header: Header
    frames: tuple[Frame, ...]
    trailing: bytes
    """What follows the last valid frame, without the zeros of preallocation."""

    @property
    def end_offset(self) -> int:
        """The offset after the last row."""
        if not self.frames:
            return self.header.base_offset
        last = self.frames[-1]
        return last.base_offset + last.rows


def decode_header(data: bytes, name: str) -> Header:
    """Decode a segment's header and check its checksum."""
    if len(data) < _HEADER_FIXED_BYTES or not data.startswith(MAGIC):
        raise LogFormatError(f"{name}: no segment header")
    version = _int(data, 8, 2)
    if version != 1:
        raise LogFormatError(f"{name}: version {version}")
    schema_end = _HEADER_FIXED_BYTES + _int(data, 40, 4)
    size = schema_end + _CRC_BYTES
    if len(data) < size or _int(data, schema_end, _CRC_BYTES) != crc32(data[:schema_end]):
        raise LogFormatError(f"{name}: the header's checksum does not hold")
    schema = pa.ipc.read_schema(pa.py_buffer(data[_HEADER_FIXED_BYTES:schema_end]))
    return Header(UUID(bytes=data[12:28]), _int(data, 28, 4), _int(data, 32, 8), schema, size)


def decode_frames(data: bytes, header: Header) -> Iterator[Frame]:
    """Yield the valid frames from the header on; ends at the first that is not."""
    at = header.size
    expected = header.base_offset
    while at + _FRAME_HEAD_BYTES <= len(data):
        base, length, crc = _int(data, at, 8), _int(data, at + 8, 4), _int(data, at + 12, 4)
        end = at + _FRAME_HEAD_BYTES + length
        if length == 0 or end > len(data):
            return
        body = data[at + _FRAME_HEAD_BYTES : end]
        if crc != crc32(data[at : at + 12] + body):
            return
        if base != expected:
            raise LogFormatError(f"byte {at}: valid frame of offset {base}, expected {expected}")
        batch = pa.ipc.read_record_batch(pa.py_buffer(body), header.schema)
        yield Frame(at, end, base, batch)
        expected += int(batch.num_rows)
        at = end


def read_segment(path: Path) -> Segment:
    """Decode one segment file."""
    data = path.read_bytes()
    header = decode_header(data, path.name)
    if path.stem != f"{header.base_offset:020d}":
        raise LogFormatError(f"{path.name}: its header says offset {header.base_offset}")
    frames = tuple(decode_frames(data, header))
    valid_end = frames[-1].end if frames else header.size
    return Segment(path, header, frames, data[valid_end:].rstrip(b"\0"))


def read_log(directory: Path) -> list[Segment]:
    """Decode a partition's directory: its segments follow each other without a gap.

    Only the last one may end in bytes that are no frame: a write that was under way.
    """
    paths = sorted(directory.glob("*.wal"))
    segments: list[Segment] = []
    for path in paths:
        try:
            segment = read_segment(path)
        except LogFormatError:
            if path == paths[-1] and segments:
                break  # made, but its header was not yet durable: it holds nothing acknowledged
            raise
        if segments:
            _check_seam(segments[-1], segment)
        segments.append(segment)
    return segments


def _check_seam(before: Segment, after: Segment) -> None:
    if before.trailing:
        raise LogFormatError(f"{before.path.name}: {len(before.trailing)} bytes that are no frame")
    if before.end_offset != after.header.base_offset:
        raise LogFormatError(
            f"{before.path.name} ends at offset {before.end_offset}, "
            f"{after.path.name} begins at {after.header.base_offset}"
        )
    if before.header.topic_uuid != after.header.topic_uuid:
        raise LogFormatError(f"{after.path.name}: of another topic than {before.path.name}")


def _int(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
