"""A disk that is soon full: a tmpfs of a few megabytes for a worker's log."""

import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self


class SmallDisk:
    """A tmpfs of `size_bytes` at `directory`.

    As root it is mounted for all to see. Otherwise the worker is started inside a user and mount
    namespace of its own (`command_prefix`), and the test looks in through `/proc/<pid>/root`.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._size_bytes = size_bytes
        self._is_root = os.geteuid() == 0

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """What a process that shall see the disk must be started with."""
        if self._is_root:
            return ()
        mount = f'mount -t tmpfs -o size={self._size_bytes} tmpfs "$1" && shift && exec "$@"'
        unshare = ("unshare", "--user", "--map-root-user", "--mount")
        return (*unshare, "sh", "-c", mount, "sh", str(self.directory))

    def seen_by(self, pid: int) -> Path:
        """Return the path by which the test sees the disk of process `pid`."""
        return self.directory if self._is_root else Path(f"/proc/{pid}/root{self.directory}")

    def __enter__(self) -> Self:
        if self._is_root:
            options = f"size={self._size_bytes}"
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.directory)]
            subprocess.run(command, check=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_root:
            # Lazy: a process that is still dying may hold a file open.
            subprocess.run(["umount", "-l", str(self.directory)], check=True)
