"""Opening a partition's log after a stop of any kind.

Only the last segment can be torn, and only at its end: all before was sealed and fsynced. So:
* sealed segments must follow each other without a gap; one whose index is missing is read whole;
* the last segment is read whole and every frame checked. A torn tail after its last valid frame
  is copied to `<segment>.broken` and cut;
* a disk writes in any order: of frames that no fsync had covered a later one may be there and an
  earlier one not. A frame says how many messages before it were in that state (`tw_unsynced`);
* damage to what may be acknowledged is refused (G7): a bad frame with a valid one *behind* it that
  was written after the bad one was fsynced, or a frame that is all there but wrong. A write that
  was cut short leaves the zeros that stood there before, in whole sectors or up to the end of the
  file; a flipped bit does not.
Nothing is decided from a file's length.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import UUID

import pyarrow as pa

from tidewater_core import names
from tidewater_core.errors import Corrupt
from tidewater_worker.log import frame as fmt
from tidewater_worker.log import index as idx
from tidewater_worker.log.producers import Producers, Request, Stored
from tidewater_worker.log.reader import list_segments, segment_name
from tidewater_worker.log.segment import fsync_directory

PRODUCERS_SUFFIX: Final = ".producers"
BROKEN_SUFFIX: Final = ".broken"
PADDING_BYTES_MAX: Final = 64
"""A body may end with this many zeros, which look like the preallocated ones behind it."""
SECTOR_BYTES: Final = 512
"""A disk writes this much whole or not at all."""


@dataclass(slots=True)
class Segment:
    """A segment of the log as the writer knows it."""

    base_offset: int
    index: idx.SparseIndex
    sealed_at_us: int = 0
    is_cached: bool = True
    """Whether its bytes may still be in the kernel's memory."""

    @property
    def end_offset(self) -> int:
        """Return the offset after its last message."""
        return self.index.end_offset


@dataclass(slots=True)
class Recovered:
    """What a log directory holds."""

    segments: list[Segment] = field(default_factory=list)
    next_offset: int = 0
    last_time_us: int = 0
    producers: Producers = field(default_factory=Producers)
    schema: pa.Schema | None = None
    """Of the last segment; another one asks for rotation."""
    cut_bytes: int = 0
    """Bytes of a torn tail that were moved to a `.broken` file."""


def save_producers(directory: Path, base_offset: int, producers: Producers) -> None:
    """Write the producers as they are before `base_offset`, durably."""
    data = producers.to_bytes()
    path = directory / f"{base_offset:020d}{PRODUCERS_SUFFIX}"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(zlib.crc32(data).to_bytes(4, "little") + data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def load_producers(directory: Path, base_offset: int) -> Producers | None:
    """Read the producers saved at `base_offset`; None if there is no whole file."""
    try:
        data = (directory / f"{base_offset:020d}{PRODUCERS_SUFFIX}").read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < 4 or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
        return None
    return Producers.from_bytes(data[4:])


def replay_producers(producers: Producers, base_offset: int, batch: pa.RecordBatch) -> None:
    """Note the requests of one frame."""
    column = batch.column(names.TW_PRODUCER)
    begin = 0
    for end, value in zip(column.run_ends.to_pylist(), column.values.to_pylist(), strict=True):
        if value is not None:
            producers.store(Request.decode(value), Stored(base_offset + begin, end - begin))
        begin = end


def valid_frames(data: fmt.Bytes, after: int, offset: int) -> Iterator[tuple[int, fmt.Frame]]:
    """Look behind bad bytes for valid frames of later offsets; yield each with its byte."""
    used = len(bytes(data).rstrip(b"\0"))
    at = after + fmt.ALIGN_BYTES
    while at < used - fmt.FRAME_HEAD_BYTES:
        base, size = fmt.peek_frame(data, at)
        # A cheap look at the head first: a checksum of every position would take minutes.
        if size and offset < base < offset + 2**32 and at + size <= len(data):
            frame = fmt.decode_frame(data, at)
            if isinstance(frame, fmt.Frame):
                yield at, frame
                at = frame.end_at
                continue
        at += fmt.ALIGN_BYTES


def _synced_before(buffer: pa.Buffer, frame: fmt.Frame, schema: pa.Schema) -> int | None:
    """Return the offset below which all was fsynced when a frame was written; None: unknown."""
    body = buffer.slice(frame.body_at, frame.end_at - frame.body_at)
    batch = pa.ipc.read_record_batch(body, schema)
    if names.TW_UNSYNCED not in schema.names:
        return None
    return int(frame.base_offset - batch.column(names.TW_UNSYNCED).values[0].as_py())


def why_damaged(data: bytes, at: int, offset: int, schema: pa.Schema) -> str | None:
    """Say why bad bytes are more than a write that was cut short; None if they are just that."""
    end_at = len(data)
    buffer = pa.py_buffer(data)
    for behind, frame in valid_frames(data, at, offset):
        end_at = min(end_at, behind)
        synced = _synced_before(buffer, frame, schema)
        if synced is None or synced > offset:
            return f"and a valid frame that was written later follows at byte {behind}"
    if not _is_torn(memoryview(data)[:end_at], at, offset):
        return "but the frame is all there"
    return None


def _is_torn(view: memoryview, at: int, offset: int) -> bool:
    """Tell a write that was cut short from damage to a whole frame; `view` ends behind it."""
    whole = _whole_but_for_its_head(view, at, offset)
    if whole is not None:
        # All but the head's offset or length is proven: torn only if it is a sector that they lack.
        return any(
            not any(view[at + begin : at + stop]) and any(whole[begin:stop])
            for begin, stop in _sectors(at, len(whole))
        )
    used = len(bytes(view[at:]).rstrip(b"\0"))
    _, size = fmt.peek_frame(view, at)
    length = max(size, used, fmt.FRAME_HEAD_BYTES)
    if at + length > len(view):
        return True
    return any(not any(view[at + begin : at + stop]) for begin, stop in _sectors(at, length))


def _whole_but_for_its_head(view: memoryview, at: int, offset: int) -> bytes | None:
    """Return the frame that stands here if only its offset or length is not what was written."""
    used = len(bytes(view[at:]).rstrip(b"\0"))
    aligned = -(-used // fmt.ALIGN_BYTES) * fmt.ALIGN_BYTES
    for length in range(aligned, aligned + PADDING_BYTES_MAX, fmt.ALIGN_BYTES):
        body = view[at + fmt.FRAME_HEAD_BYTES : at + length]
        if body:
            head = fmt.encode_frame_head(offset, body)
            if head[12:16] == view[at + 12 : at + 16]:
                return head + body
    return None


def _sectors(at: int, length: int) -> list[tuple[int, int]]:
    """Cut [at, at + length) at sector boundaries; the pieces count from `at`."""
    first = SECTOR_BYTES - at % SECTOR_BYTES
    cuts = [0, *range(first, length, SECTOR_BYTES), length]
    return list(pairwise(cuts))


def _scan_last(path: Path, into: Recovered, *, repair: bool) -> Segment:
    data = path.read_bytes()
    header = fmt.decode_header(data, path.name)
    into.schema = header.schema
    index = idx.SparseIndex()
    index.end_offset, index.size = header.base_offset, header.size
    buffer = pa.py_buffer(data)
    at = header.size
    while isinstance(decoded := fmt.decode_frame(data, at), fmt.Frame):
        if decoded.base_offset != index.end_offset:
            decoded = fmt.Torn(at, f"offset {decoded.base_offset}, expected {index.end_offset}")
            break
        body = buffer.slice(decoded.body_at, decoded.end_at - decoded.body_at)
        batch = pa.ipc.read_record_batch(body, header.schema)
        time_us = idx.first_time_us(batch)
        index.note(decoded.base_offset, batch.num_rows, at, decoded.end_at, time_us)
        replay_producers(into.producers, decoded.base_offset, batch)
        at = decoded.end_at
    if isinstance(decoded, fmt.End) and any(data[at:].lstrip(b"\0")[:1]):
        decoded = fmt.Torn(at, "zeros before other bytes")
    if isinstance(decoded, fmt.Torn):
        if damage := why_damaged(data, at, index.end_offset, header.schema):
            raise Corrupt(
                "FrameCorrupt",
                f"{path} byte {at}: {decoded.why}, {damage}: damage from offset "
                f"{index.end_offset} on, not a torn tail; nothing was changed",
            )
        into.cut_bytes = len(data.rstrip(b"\0")) - at
        if repair:
            _cut(path, data, at)
    if repair:
        # What a killed process wrote but did not sync is only in the page cache: before it counts
        # as durable it must be.
        with path.open("r+b") as file:
            os.fdatasync(file.fileno())
    return Segment(header.base_offset, index)


def _free_broken_name(path: Path) -> Path:
    broken = path.with_name(path.name + BROKEN_SUFFIX)
    number = 0
    while broken.exists():
        number += 1
        broken = path.with_name(f"{path.name}{BROKEN_SUFFIX}.{number}")
    return broken


def set_aside(directory: Path, base_offset: int) -> None:
    """Take a segment out of the log but keep its bytes."""
    path = directory / segment_name(base_offset)
    path.rename(_free_broken_name(path))
    path.with_suffix(idx.SUFFIX).unlink(missing_ok=True)


def _cut(path: Path, data: bytes, at: int) -> None:
    """Keep the torn bytes as evidence, then cut them."""
    with _free_broken_name(path).open("wb") as file:
        file.write(data[at:].rstrip(b"\0"))
        file.flush()
        os.fsync(file.fileno())
    with path.open("r+b") as file:
        file.truncate(at)
        os.fsync(file.fileno())
    fsync_directory(path.parent)


def _sealed(path: Path) -> Segment:
    index = idx.load(path)
    if index is None:
        data = path.read_bytes()
        header = fmt.decode_header(data, path.name)
        index = idx.rebuild(data, header, str(path))
        path.with_suffix(idx.SUFFIX).write_bytes(index.to_bytes())
    return Segment(int(path.stem), index, int(path.stat().st_mtime * 1e6))


def _is_unborn(path: Path) -> bool:
    """Tell whether a crash came between making the last segment's file and its header.

    The header is fsynced before the first frame is written: without a header, no message. A
    header that was damaged later has frames behind it, and is not unborn.
    """
    data = path.read_bytes()
    try:
        fmt.decode_header(data, path.name)
    except Corrupt as error:
        if error.reason == "SegmentVersionUnknown":
            return False
        return next(valid_frames(data, -fmt.ALIGN_BYTES, int(path.stem) - 1), None) is None
    return False


def recover(directory: Path, topic_uuid: UUID, partition: int, *, repair: bool = True) -> Recovered:
    """Read what a partition directory holds; cut a torn tail; refuse damage."""
    into = Recovered()
    bases = list_segments(directory)
    if bases and _is_unborn(directory / segment_name(bases[-1])):
        base = bases.pop()
        if repair:
            path = directory / segment_name(base)
            if path.stat().st_size:
                path.rename(_free_broken_name(path))
            else:
                path.unlink()
            fsync_directory(directory)
    for i, base in enumerate(bases):
        path = directory / segment_name(base)
        is_last = i == len(bases) - 1
        if is_last:
            header = fmt.decode_header(path.read_bytes()[: fmt.SCHEMA_BYTES_MAX], path.name)
            if (header.topic_uuid, header.partition) != (topic_uuid, partition):
                raise Corrupt(
                    "ForeignLog",
                    f"{path} belongs to topic {header.topic_uuid} partition {header.partition}, "
                    f"not to {topic_uuid} partition {partition}",
                )
            into.producers = _producers_before(directory, bases)
            segment = _scan_last(path, into, repair=repair)
        else:
            segment = _sealed(path)
            if segment.end_offset != bases[i + 1]:
                raise Corrupt(
                    "LogGap",
                    f"{directory}: segment {base} ends at offset {segment.end_offset}, "
                    f"the next begins at {bases[i + 1]}",
                )
        into.segments.append(segment)
    if into.segments:
        into.next_offset = into.segments[-1].end_offset
        into.last_time_us = max(segment.index.last_time_us for segment in into.segments)
    return into


def _producers_before(directory: Path, bases: list[int]) -> Producers:
    """Return the producers as they were when the last segment began."""
    saved = load_producers(directory, bases[-1])
    if saved is not None:
        return saved
    producers = Producers()
    for base in bases[:-1]:
        path = directory / segment_name(base)
        data = path.read_bytes()
        header = fmt.decode_header(data, path.name)
        buffer = pa.py_buffer(data)
        at = header.size
        while isinstance(decoded := fmt.decode_frame(data, at), fmt.Frame):
            body = buffer.slice(decoded.body_at, decoded.end_at - decoded.body_at)
            replay_producers(
                producers, decoded.base_offset, pa.ipc.read_record_batch(body, header.schema)
            )
            at = decoded.end_at
    return producers
