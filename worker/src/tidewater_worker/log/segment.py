"""Writing one segment file: preallocation, positioned writes, fdatasync, sealing.

For small groups the file is grown by writing zeros ahead of the frames, in steps that double up to
4 MiB: an fdatasync of bytes inside the file has no metadata to journal, and does not wait for other
files' dirty pages. Large groups grow the file themselves; for them zeros would only be more bytes.

Runs in the sync threads; a segment has one writer at a time.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

import pyarrow as pa

from tidewater_worker.log import frame as fmt
from tidewater_worker.log import index as idx
from tidewater_worker.log.reader import segment_name

GROW_BYTES_MIN: Final = 64 * 1024
GROW_BYTES_MAX: Final = 4 * 1024 * 1024
LARGE_BYTES: Final = 64 * 1024
"""A group this large does not wait for the journal longer than for its own bytes."""
IOV_MAX: Final = 512
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_ZEROS: Final = memoryview(bytes(GROW_BYTES_MAX))


def fsync_directory(directory: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class SegmentWriter:
    """An open segment that frames are appended to."""

    def __init__(self, path: Path, fd: int, position: int, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self.position = position
        """Where the next frame goes: all bytes before it are valid frames."""
        self.index = idx.SparseIndex()
        self._fd = fd
        self._allocated = position
        self._grow_bytes = GROW_BYTES_MIN
        self._open = threading.Lock()
        """Held while the descriptor is used by a sync or closed: they may run side by side."""

    @classmethod
    def create(
        cls, directory: Path, topic_uuid: UUID, partition: int, base: int, schema: pa.Schema
    ) -> "SegmentWriter":
        """Make a new segment; it and its name are durable on return."""
        path = directory / segment_name(base)
        header = fmt.encode_header(topic_uuid, partition, base, schema)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            os.write(fd, header)
            os.fsync(fd)
            fsync_directory(directory)
        except OSError:
            # A segment without a whole header must not stand in the way of the next start.
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return cls(path, fd, len(header), base)

    @classmethod
    def reopen(cls, path: Path, base: int, index: idx.SparseIndex) -> "SegmentWriter":
        """Open a recovered segment to append after its last valid frame."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        writer = cls(path, fd, index.size, base)
        writer.index = index
        writer._allocated = max(index.size, os.fstat(fd).st_size)
        return writer

    def append(self, buffers: Sequence[fmt.Bytes], nbytes: int) -> None:
        """Write frames at the end. On a full disk the segment is as it was before."""
        end = self.position + nbytes
        ahead = 0
        if end > self._allocated and nbytes < LARGE_BYTES:
            ahead = self._grow_bytes
            self._grow_bytes = min(self._grow_bytes * 2, GROW_BYTES_MAX)
        try:
            try:
                self._write([*buffers, _ZEROS[:ahead]] if ahead else buffers)
            except OSError as error:
                if error.errno not in NO_SPACE or not ahead:
                    raise
                ahead = 0
                self._write(buffers)
        except OSError as error:
            if error.errno in NO_SPACE:
                os.ftruncate(self._fd, self.position)
                self._allocated = self.position
            raise
        self.position = end
        self._allocated = max(self._allocated, end + ahead)

    def _write(self, buffers: Sequence[fmt.Bytes]) -> None:
        at = self.position
        if len(buffers) > IOV_MAX:
            buffers = [b"".join(buffers)]
        left = sum(len(b) for b in buffers)
        written = os.pwritev(self._fd, buffers, at)
        if written < left:
            rest = memoryview(b"".join(buffers))[written:]
            at += written
            while rest:
                written = os.pwrite(self._fd, rest, at)
                at += written
                rest = rest[written:]

    def sync(self) -> None:
        """Make every byte before `position` durable."""
        with self._open:
            if self._fd >= 0:
                os.fdatasync(self._fd)

    def seal(self) -> None:
        """Cut what was preallocated, make it all durable, write the index, close."""
        with self._open:
            os.ftruncate(self._fd, self.position)
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):  # it is rebuilt when missing
            self.path.with_suffix(idx.SUFFIX).write_bytes(self.index.to_bytes())

    def close(self) -> None:
        """Close without sealing: appending goes on after the next start."""
        with self._open:
            if self._fd >= 0:
                os.ftruncate(self._fd, self.position)
                os.fsync(self._fd)
                os.close(self._fd)
                self._fd = -1
