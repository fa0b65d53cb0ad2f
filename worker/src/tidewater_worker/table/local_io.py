"""A FileIO for `file://` warehouses that survives power loss.

Neither pyarrow nor pyiceberg fsyncs what it writes. On a local disk a catalog could then remember a
commit whose files the disk never got: a table that cannot be opened, and log segments deleted on
the strength of rows that are gone. So each file and the directories that name it are fsynced
before the commit that mentions them. Object stores need none of this.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

LOCAL_SCHEME: Final = "file"
SYNCED_DIRECTORIES_MAX: Final = 10_000
_synced_directories: set[str] = set()
"""Directories whose own entry in their parent is known to be on the disk."""


def sync_file(path: str) -> None:
    """Make a closed file and its directory entries durable."""
    _fsync(path)
    directory = os.path.dirname(path)
    _fsync(directory)
    if len(_synced_directories) > SYNCED_DIRECTORIES_MAX:
        _synced_directories.clear()
    synced: list[str] = []
    while directory not in _synced_directories and directory != os.path.dirname(directory):
        synced.append(directory)
        directory = os.path.dirname(directory)
        _fsync(directory)
    _synced_directories.update(synced)  # not before: one that failed is synced the next time


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file durably: all of it, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(data)
    _fsync(str(temporary))
    temporary.replace(path)
    _fsync(str(path.parent))


class SyncedStream:
    """An output stream that is durable once closed."""

    def __init__(self, stream: pa.NativeFile, path: str) -> None:
        self._stream = stream
        self._path = path

    def write(self, data: bytes) -> int:
        """Write bytes."""
        return int(self._stream.write(data))

    def tell(self) -> int:
        """Return the position."""
        return int(self._stream.tell())

    def close(self) -> None:
        """Close and fsync."""
        if not self._stream.closed:
            self._stream.close()
            sync_file(self._path)

    def __enter__(self) -> Self:
        """Open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


class DurableFile(PyArrowFile):
    """A local file that is fsynced when it is closed."""

    def create(self, overwrite: bool = False) -> Any:
        """Open for writing."""
        return SyncedStream(self.create_native(overwrite), self._path)

    def create_native(self, overwrite: bool = False) -> pa.NativeFile:
        """Open for a writer that needs a native stream; it must call `sync` after closing."""
        return super().create(overwrite)

    def sync(self) -> None:
        """Make the closed file durable."""
        sync_file(self._path)


class DurableFileIO(PyArrowFileIO):
    """PyArrowFileIO whose local files are durable once closed."""

    def new_output(self, location: str) -> PyArrowFile:
        """Return the file to write at a location."""
        scheme, netloc, path = self.parse_location(location, self.properties)
        if scheme != LOCAL_SCHEME:
            return super().new_output(location)
        return DurableFile(location=location, path=path, fs=self.fs_by_scheme(scheme, netloc))
