"""Opening a partition's log after a stop of any kind.

Only the last segment can be torn, and only at its end: all before was sealed and fsynced. So:
* sealed segments must follow each other without a gap; one whose index is missing is read whole;
* the last segment is read whole and every frame checked. A torn tail after its last valid frame
  is copied to `<segment>.broken` and cut;
* a disk writes in any order: of frames that no fsync had covered a later one may be there and an
  earlier one not. A frame says how many messages before it were in that state (`tw_unsynced`);
* damage to what may be acknowledged is refused (G7; `scan` tells one from the other), and so is
  whatever ends before the note of what was fsynced (`durable`);
* the disk is asked, not the kernel's memory: that may show bytes which never got to the disk.
Nothing is decided from a file's length.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID

import pyarrow as pa

# The same CRC-32 as zlib's, several times as fast: this can be many megabytes.
from isal.isal_zlib import crc32

from tidewater_core import names
from tidewater_core.errors import Corrupt
from tidewater_worker.log import frame as fmt
from tidewater_worker.log import index as idx
from tidewater_worker.log.durable import durable_end, forget_durable, why_lost
from tidewater_worker.log.producers import PRODUCERS_MAX, Producers, Request, Stored
from tidewater_worker.log.reader import list_segments, segment_name
from tidewater_worker.log.scan import Scan, is_unborn, why_damaged
from tidewater_worker.log.segment import fsync_directory

PRODUCERS_SUFFIX: Final = ".producers"
BROKEN_SUFFIX: Final = ".broken"


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
    parts = producers.parts()
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    path = directory / f"{base_offset:020d}{PRODUCERS_SUFFIX}"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(crc.to_bytes(4, "little"))
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def load_producers(directory: Path, base_offset: int) -> Producers | None:
    """Read the producers saved at `base_offset`; None if there is no whole file."""
    try:
        data = (directory / f"{base_offset:020d}{PRODUCERS_SUFFIX}").read_bytes()
        if len(data) < 4 or crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            return None
        return Producers.from_bytes(data[4:])
    except (FileNotFoundError, ValueError):
        return None


def replay_producers(producers: Producers, base_offset: int, batch: pa.RecordBatch) -> None:
    """Note the requests of one frame."""
    column = batch.column(names.TW_PRODUCER)
    begin = 0
    for end, value in zip(column.run_ends.to_pylist(), column.values.to_pylist(), strict=True):
        if value is not None:
            producers.store(Request.decode(value), Stored(base_offset + begin, end - begin))
        begin = end


def _read_back(path: Path) -> bytes:
    """Read the last segment from the disk.

    What a killed process wrote but did not sync is only in the page cache: before it counts as
    durable it must be. And where a sync has failed, the page cache shows bytes as clean that never
    got to the disk, and the next sync succeeds. So: sync, let the kernel forget, read.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise Corrupt(
            "LogSyncFailed",
            f"{path}: what the last process wrote did not get to the disk ({error}); the next "
            "attempt goes by what the disk holds",
        ) from error
    finally:
        os.close(fd)
    # Its name, too: whoever made the segment may have been killed before that was durable.
    fsync_directory(path.parent)
    return path.read_bytes()


def _scan_last(path: Path, data: bytes, into: Recovered, *, repair: bool) -> Segment:
    header = fmt.decode_header(data, path.name)
    into.schema = header.schema
    index = idx.SparseIndex()
    index.end_offset, index.size = header.base_offset, header.size
    scan = Scan(data, header)
    for frame, batch in scan:
        time_us = idx.first_time_us(batch)
        index.note(scan.offset, batch.num_rows, scan.at, frame.end_at, time_us)
        replay_producers(into.producers, scan.offset, batch)
    damage = why_lost(durable_end(path), scan.offset)
    if scan.problem and damage is None:
        damage = why_damaged(data, scan.at, scan.offset, header.schema)
    if damage is not None:
        raise Corrupt(
            "FrameCorrupt",
            f"{path} byte {scan.at}: {scan.problem or 'the end'}, {damage}: damage from offset "
            f"{scan.offset} on, not a torn tail; nothing was changed",
        )
    if scan.problem:
        into.cut_bytes = len(data.rstrip(b"\0")) - scan.at
        if repair:
            _cut(path, data, scan.at)
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
    forget_durable(path)


def _cut(path: Path, data: bytes, at: int) -> None:
    """Keep the torn bytes as evidence, then cut them."""
    broken = _free_broken_name(path)
    try:
        with broken.open("wb") as file:
            file.write(data[at:].rstrip(b"\0"))
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # the next attempt makes the same copy: half of one each time helps nobody
        with suppress(OSError):
            broken.unlink(missing_ok=True)
        raise
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
        with suppress(OSError):  # a full disk: then the next start reads the segment again
            path.with_suffix(idx.SUFFIX).write_bytes(index.to_bytes())
    return Segment(int(path.stem), index, int(path.stat().st_mtime * 1e6))


def recover(
    directory: Path,
    topic_uuid: UUID,
    partition: int,
    *,
    repair: bool = True,
    producers_max: int = PRODUCERS_MAX,
) -> Recovered:
    """Read what a partition directory holds; cut a torn tail; refuse damage."""
    into = Recovered(producers=Producers(producers_max))
    bases = list_segments(directory)
    read_last = _read_back if repair else Path.read_bytes
    data = read_last(directory / segment_name(bases[-1])) if bases else b""
    if bases and is_unborn(data, segment_name(bases[-1]), bases[-1]):
        path = directory / segment_name(bases[-1])
        if damage := why_lost(durable_end(path), bases.pop()):
            raise Corrupt(
                "SegmentHeaderCorrupt", f"{path}: no header, {damage}; nothing was changed"
            )
        if repair:
            _remove_unborn(path, data)
        data = read_last(directory / segment_name(bases[-1])) if bases else b""
    for i, base in enumerate(bases):
        path = directory / segment_name(base)
        if i == len(bases) - 1:
            _refuse_foreign(path, fmt.decode_header(data, path.name), topic_uuid, partition)
            into.producers = _producers_before(directory, bases, producers_max)
            segment = _scan_last(path, data, into, repair=repair)
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


def _remove_unborn(path: Path, data: bytes) -> None:
    if data:
        path.rename(_free_broken_name(path))
    else:
        path.unlink()
    fsync_directory(path.parent)


def _refuse_foreign(
    path: Path, header: fmt.SegmentHeader, topic_uuid: UUID, partition: int
) -> None:
    if (header.topic_uuid, header.partition) != (topic_uuid, partition):
        raise Corrupt(
            "ForeignLog",
            f"{path} belongs to topic {header.topic_uuid} partition {header.partition}, "
            f"not to {topic_uuid} partition {partition}",
        )


def _producers_before(directory: Path, bases: list[int], producers_max: int) -> Producers:
    """Return the producers as they were when the last segment began."""
    saved = load_producers(directory, bases[-1])
    if saved is not None:
        saved.keep(producers_max)
        return saved
    producers = Producers(producers_max)
    for base in bases[:-1]:
        path = directory / segment_name(base)
        data = path.read_bytes()
        scan = Scan(data, fmt.decode_header(data, path.name))
        for _, batch in scan:
            replay_producers(producers, scan.offset, batch)
    return producers
