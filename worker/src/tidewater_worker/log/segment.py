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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

import pyarrow as pa

from tidewater_worker.log import frame as fmt
from tidewater_worker.log import index as idx
from tidewater_worker.log.durable import forget_durable, note_durable
from tidewater_worker.log.reader import segment_name

GROW_BYTES_MIN: Final = 64 * 1024
GROW_BYTES_MAX: Final = 4 * 1024 * 1024
LARGE_BYTES: Final = 64 * 1024
"""A group this large does not wait for the journal longer than for its own bytes."""
IOV_MAX: Final = 1024
"""Buffers that Linux takes in one call."""
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_ZEROS: Final = memoryview(bytes(GROW_BYTES_MAX))


def fsync_directory(directory: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path, root: Path) -> None:
    """Make a directory below `root`, and the names of all levels in between durable.

    A segment whose directory has no durable name is gone after a power cut. One that is there
    already was made after its directory was.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.wal")):
        return
    while directory != root:
        directory = directory.parent
        fsync_directory(directory)


def _write_all(fd: int, data: fmt.Bytes, at: int) -> None:
    """Write all of it at a byte of the file: one call may take less than it is given."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, at)
        if written <= 0:
            raise OSError(errno.ENOSPC, "nothing more was written")
        at += written
        rest = rest[written:]


class SegmentWriter:
    """An open segment that frames are appended to."""

    def __init__(
        self, path: Path, fd: int, position: int, base_offset: int, schema: pa.Schema
    ) -> None:
        self.path = path
        self.base_offset = base_offset
        self.schema = schema
        """As its header says: frames of another one could not be read."""
        self.position = position
        """Where the next frame goes: all bytes before it are valid frames."""
        self.index = idx.SparseIndex()
        self._fd = fd
        self._allocated = position
        self._grow_bytes = GROW_BYTES_MIN
        self._failed: OSError | None = None
        self._open = threading.Lock()
        """Held while the descriptor is used by a sync or closed: they may run side by side."""
        self._noting = threading.Lock()
        """Held while it is noted how far it is durable, or closed; no sync waits for it."""

    @property
    def is_closed(self) -> bool:
        """Tell whether it is sealed or closed; all that was written is durable then."""
        return self._fd < 0

    @property
    def is_broken(self) -> bool:
        """Tell whether nobody knows any more what the disk holds."""
        return self._failed is not None

    @classmethod
    def create(
        cls, directory: Path, topic_uuid: UUID, partition: int, base: int, schema: pa.Schema
    ) -> "SegmentWriter":
        """Make a new segment; it and its name are durable on return."""
        path = directory / segment_name(base)
        header = fmt.encode_header(topic_uuid, partition, base, schema)
        forget_durable(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            _write_all(fd, header, 0)
            os.fsync(fd)
            fsync_directory(directory)
        except OSError:
            # A segment without a whole header must not stand in the way of the next start.
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return cls(path, fd, len(header), base, schema)

    @classmethod
    def reopen(
        cls, path: Path, base: int, index: idx.SparseIndex, schema: pa.Schema
    ) -> "SegmentWriter":
        """Open a recovered segment to append after its last valid frame."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        writer = cls(path, fd, index.size, base, schema)
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
                self._take_back()
            raise
        self.position = end
        self._allocated = max(self._allocated, end + ahead)

    def _take_back(self) -> None:
        """Cut a part of a group that did not fit: behind the last frame there are only zeros.

        Durably: whole frames of it may have reached the disk, and after a power cut they would
        be messages that nobody was told of.
        """
        try:
            os.ftruncate(self._fd, self.position)
            os.fsync(self._fd)
        except OSError as error:
            self._failed = error
            raise
        self._allocated = self.position

    def _write(self, buffers: Sequence[fmt.Bytes]) -> None:
        at = self.position
        for first in range(0, len(buffers), IOV_MAX):
            some = buffers[first : first + IOV_MAX]
            nbytes = sum(map(len, some))
            written = os.pwritev(self._fd, some, at)
            if written < nbytes:
                _write_all(self._fd, b"".join(some)[written:], at + written)
            at += nbytes

    def sync(self) -> None:
        """Make every byte before `position` durable."""
        with self._open:
            self._durably(os.fdatasync)

    def _durably(self, call: Callable[[int], None]) -> None:
        """Sync, and never again after it failed.

        The kernel reports a lost write once, and shows its bytes as if they were on the disk: a
        second sync that succeeds says nothing.
        """
        if self._failed is not None:
            raise OSError(self._failed.errno, f"failed before: {self._failed.strerror}")
        if self._fd < 0:
            return
        try:
            call(self._fd)
        except OSError as error:
            self._failed = error
            raise

    def note_durable(self, end: int) -> None:
        """Note that all below `end` was fsynced, as long as this is open."""
        with self._noting:
            # A log that has rotated since is sealed up to its new segment.
            if self._fd >= 0 and end > self.base_offset:
                note_durable(self.path, end)

    def seal(self) -> None:
        """Cut what was preallocated, make it all durable, write the index, close."""
        self._close()
        with contextlib.suppress(OSError):  # it is rebuilt when missing
            self.path.with_suffix(idx.SUFFIX).write_bytes(self.index.to_bytes())

    def close(self) -> None:
        """Cut what was preallocated, make it all durable, close; appending may go on later."""
        if self._close() and self.index.end_offset > self.base_offset:
            note_durable(self.path, self.index.end_offset)

    def _close(self) -> bool:
        with self._noting, self._open:
            if self._fd < 0:
                return False
            os.ftruncate(self._fd, self.position)
            self._durably(os.fsync)
            self._let_go()
            return True

    def abandon(self) -> None:
        """Close and leave the file as it is: what it holds is for recovery to say."""
        with self._noting, self._open:
            if self._fd >= 0:
                self._failed = self._failed or OSError(errno.EIO, "given up")
                self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
