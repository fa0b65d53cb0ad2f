"""Reading one partition's segments while another process appends to them.

The reader trusts nothing past the `end` it is given: offsets below it are fsynced, so a frame
that does not check out below it is corruption (`Corrupt`), never a torn tail.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import pyarrow as pa

from tidewater_core.errors import Corrupt, Retryable
from tidewater_worker.log import frame as fmt
from tidewater_worker.log import index as idx

SUFFIX: Final = ".wal"
CHUNK_BYTES: Final = 4 * 1024 * 1024
AHEAD_FROM_BYTES: Final = 1024 * 1024
"""Whoever reads this much at once is behind, and will want what comes next."""
HEADER_READ_BYTES: Final = 8 * 1024
"""More than most headers take; the rest of a longer one is read after it."""
SKIP_BYTES: Final = 256 * 1024
"""Read at once while frame heads are walked; more than lies between two entries of an index."""


@dataclass(frozen=True, slots=True)
class LogBatch:
    """The rows of one frame."""

    base_offset: int
    rows: int
    batch: pa.RecordBatch
    """Columns of the log schema that the segment was written with."""
    nbytes: int
    """Bytes of the frame's body."""


def segment_name(base_offset: int) -> str:
    """Name a segment by its first offset."""
    return f"{base_offset:020d}{SUFFIX}"


def list_segments(directory: Path) -> list[int]:
    """Return the base offsets of the segments in a directory, ascending."""
    try:
        found = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(
        int(name[: -len(SUFFIX)])
        for name in found
        if name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdigit()
    )


def read_header(path: Path) -> fmt.SegmentHeader:
    """Read a segment's header."""
    with path.open("rb") as file:
        data = file.read(HEADER_READ_BYTES)
        data += file.read(max(fmt.header_size(data) - len(data), 0))
    return fmt.decode_header(data, path.name)


class _OpenSegment:
    """A segment being read: its descriptor and header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)


class Indexed(Protocol):
    """A segment whose index is in memory."""

    base_offset: int
    index: idx.SparseIndex


class LogReader:
    """A read-only view of a partition directory, for one thread at a time; any may `end` it.

    `segments` are those that the caller knows, an appender's for one: the segment being written
    has no index on the disk.
    """

    def __init__(self, directory: Path, segments: Sequence[Indexed] = ()) -> None:
        self._directory = directory
        self._segments = segments
        self._segment: _OpenSegment | None = None
        self._offset = -1
        self._at = 0
        self._reading = threading.Lock()
        self._is_over = False

    def start_offset(self) -> int | None:
        """Return the first offset still in the log, or None if it has no segment."""
        bases = list_segments(self._directory)
        return bases[0] if bases else None

    def close(self) -> None:
        """Close what is open; reading may go on."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def end(self) -> None:
        """Close for good. A read that is under way in another thread closes when it is done."""
        self._is_over = True
        if self._reading.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._reading.release()

    def read(self, offset: int, end: int, max_bytes: int) -> list[LogBatch]:
        """Read whole frames from the one that holds `offset`, before `end`, to about `max_bytes`.

        The first batch may begin before `offset`; nothing at or past `end` is looked at. At
        least one frame is returned if there is one.
        """
        if offset >= end:
            return []
        try:
            with self._reading:
                return self._read(offset, end, max_bytes)
        finally:
            if self._is_over:  # looked at after the lock was let go, or both would leave it open
                self.end()

    def _read(self, offset: int, end: int, max_bytes: int) -> list[LogBatch]:
        if self._segment is None or self._offset != offset:
            self._seek(offset)
        batches: list[LogBatch] = []
        left = max_bytes
        while self._offset < end and left > 0:
            read = self._read_chunk(end, min(left, CHUNK_BYTES), batches)
            if read == 0 and not self._next_segment():
                raise Corrupt(
                    "LogEndsEarly",
                    f"{self._directory}: offset {self._offset} is durable but not in the log",
                )
            left -= read
        return batches

    def _open(self, base: int) -> None:
        self.close()
        path = self._directory / segment_name(base)
        try:
            self._segment = _OpenSegment(path)
        except FileNotFoundError:
            raise Retryable("SegmentGone", f"{path}: deleted while it was looked for") from None
        self._offset = base
        self._at = self._segment.header.size

    def _seek(self, offset: int) -> None:
        """Go to the frame that holds `offset`."""
        bases = list_segments(self._directory)
        index = bisect_right(bases, offset) - 1
        if index < 0:
            raise Corrupt(
                "OffsetNotInLog",
                f"{self._directory}: offset {offset} is before the log's first "
                f"({bases[0] if bases else 'it is empty'})",
            )
        self._open(bases[index])
        self._jump_near(offset)
        self._skip_to(offset)

    def _jump_near(self, offset: int) -> None:
        """Go to the last indexed frame at or before `offset`, if there is an index."""
        segment, base = self._segment, self._offset
        assert segment is not None
        known = next((s.index for s in list(self._segments) if s.base_offset == base), None)
        index = known or idx.load(segment.path)
        near = None if index is None else index.byte_for(offset)
        if near is None:
            return
        head = os.pread(segment.fd, fmt.FRAME_HEAD_BYTES, near[1])
        if fmt.peek_frame(head, 0)[0] == near[0]:  # an index of other bytes is no help
            self._offset, self._at = near

    def _skip_to(self, offset: int) -> None:
        """Walk frame heads until the next frame begins past `offset`; stand before it."""
        assert self._segment is not None
        data, at = b"", 0
        found = (self._at, self._offset)
        while True:
            if at + fmt.FRAME_HEAD_BYTES > len(data):
                self._at += at
                data, at = os.pread(self._segment.fd, SKIP_BYTES, self._at), 0
            base, size = fmt.peek_frame(data, at)
            if size == 0 or base > offset:
                break
            found = (self._at + at, base)
            at += size
        self._at, self._offset = found

    def _next_segment(self) -> bool:
        """Go on to the segment that begins where this one ended."""
        path = self._directory / segment_name(self._offset)
        if self._segment is not None and self._segment.path == path:
            return False
        if not path.exists():
            return False
        self._open(self._offset)
        return True

    def _read_chunk(self, end: int, want: int, into: list[LogBatch]) -> int:
        """Append the frames of the next chunk to `into`; return their bytes (0: none here)."""
        segment = self._segment
        assert segment is not None
        data = os.pread(segment.fd, max(want, fmt.FRAME_HEAD_BYTES), self._at)
        base, size = fmt.peek_frame(data, 0)
        if size == 0:
            return 0
        if size > len(data):
            if size > fmt.FRAME_BODY_BYTES_MAX + fmt.FRAME_HEAD_BYTES:
                raise self._corrupt("impossible length")
            data = os.pread(segment.fd, size, self._at)
        buffer = pa.py_buffer(data)
        at = 0
        while self._offset < end:
            base, size = fmt.peek_frame(data, at)
            if size == 0 or (at + size > len(data) and at > 0):
                break
            decoded = fmt.decode_frame(data, at)
            if not isinstance(decoded, fmt.Frame):
                raise self._corrupt(getattr(decoded, "why", "no frame"))
            if decoded.base_offset != self._offset:
                raise self._corrupt(f"offset {decoded.base_offset} found")
            body = buffer.slice(decoded.body_at, decoded.end_at - decoded.body_at)
            batch = pa.ipc.read_record_batch(body, segment.header.schema)
            into.append(LogBatch(base, batch.num_rows, batch, body.size))
            self._offset += batch.num_rows
            self._at += decoded.end_at - at
            at = decoded.end_at
        if at >= AHEAD_FROM_BYTES:
            # Far behind, it may come from the disk: let the kernel fetch while we work.
            os.posix_fadvise(segment.fd, self._at, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        return at

    def _corrupt(self, why: str) -> Corrupt:
        assert self._segment is not None
        return Corrupt(
            "FrameCorrupt",
            f"{self._segment.path} byte {self._at}: {why} where offset {self._offset} is expected",
        )
