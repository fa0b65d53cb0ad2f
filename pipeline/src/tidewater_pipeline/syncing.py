"""Files on a local disk are brought to rest: Spark does not sync what it writes.

A rewrite of a gigabyte would leave all of it to be waited for at the end. So a thread syncs files
while they are written, and little is left. It is a help only: what is committed is synced by name.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tidewater_core.errors import Corrupt, TidewaterError

DISK_REFUSED: Final = "DiskRefused"
"""The reason after which nothing may be removed that the refused files have replaced."""
PAUSE_S: Final = 0.2
"""Between two looks at the folders; a few hundred MB can be written meanwhile."""


def local_path(location: str) -> Path:
    """Return where a location (`file:///a/b`, `file:/a/b`, `/a/b`) is on this machine."""
    return Path("/" + location.removeprefix("file:").lstrip("/"))


def sync_files(locations: Collection[str]) -> None:
    """Sync files, and the directories that name them."""
    local = [local_path(each) for each in locations]
    for path in [*local, *{each.parent for each in local}]:
        try:
            _with_handle(path, os.fsync)
        except FileNotFoundError:
            continue  # another commit has replaced it already
        except OSError as error:
            raise _refused(error, path) from error


@contextmanager
def synced_early(folders: Iterable[Path]) -> Iterator[None]:
    """Sync what appears in these folders as it is written; raise if a disk refused that.

    It is raised since the kernel tells of a failed write once: whoever syncs next hears nothing.
    """
    early = _Early(frozenset(folders))
    if not early.folders:
        yield
        return
    early.start()
    try:
        yield
    except TidewaterError:  # it may have committed a part
        early.stop()
        early.check()
        raise
    finally:
        early.stop()
    early.check()


class _Early(threading.Thread):
    """Looks at folders again and again, and syncs the files that were not there at first."""

    def __init__(self, folders: frozenset[Path]) -> None:
        super().__init__(name="synced-early", daemon=True)
        self.folders = folders
        self._error: OSError | None = None
        self._stopping = threading.Event()
        self._before = {entry.path for entry in self._entries()}
        """There may be thousands, which never change: they are not looked at."""
        self._sizes: dict[str, int] = {}
        """Of each new file when it was last synced."""

    def run(self) -> None:
        """Look until told to stop, or until a disk refuses."""
        while not self._stopping.wait(PAUSE_S):
            try:
                for entry in self._entries():
                    if entry.path not in self._before:
                        self._sync(entry)
            except OSError as error:
                self._error = error
                return

    def stop(self) -> None:
        """Return when nothing is under way any more."""
        self._stopping.set()
        self.join()

    def check(self) -> None:
        """Raise what a disk has refused."""
        if self._error is not None:
            raise _refused(self._error, "the new files of a rewrite") from self._error

    def _entries(self) -> Iterator["os.DirEntry[str]"]:
        for folder in self.folders:
            # The first file in it may make it; and the table is rewritten by others, too.
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                yield from entries

    def _sync(self, entry: "os.DirEntry[str]") -> None:
        with suppress(FileNotFoundError):
            size = entry.stat().st_size
            if size > self._sizes.get(entry.path, 0) and not self._stopping.is_set():
                _with_handle(Path(entry.path), os.fdatasync)
                self._sizes[entry.path] = size


def _refused(error: OSError, what: object) -> Corrupt:
    return Corrupt(
        DISK_REFUSED,
        f"{what} could not be synced ({error}): what was written may be lost, so nothing that it "
        "has replaced is removed by this run; look at the disk, then audit the table before "
        "anything expires",
    )


def _with_handle(path: Path, act: Callable[[int], None]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        act(handle)
    finally:
        os.close(handle)
