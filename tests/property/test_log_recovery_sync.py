"""What recovery found may never have been fsynced: it must be, before anyone hears of it.

After a `kill -9` the page cache still holds a write that was not acknowledged. Recovery reads it,
readers see it, and a producer that sends it again is told that it is stored. If the power went
then, an acknowledged message would be gone.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewater_core.errors import Corrupt
from tidewater_testing import logs
from tidewater_worker.log.durable import forget_durable
from tidewater_worker.log.segment import make_directory


class SyncedFiles:
    """Notes which files were fsynced, by the real calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for call in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, call, self._noting(getattr(os, call)))

    def _noting(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            self.names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            real(fd)

        return call


def test_recovery_makes_durable_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: the last segment is synced by the time that recovery returns."""
    directory = tmp_path / "3"
    logs.append(directory, [[b"a:000000000:"], [b"a:000000001:"]], producer="p")
    (segment,) = directory.glob("*.wal")
    synced = SyncedFiles(monkeypatch)
    recovered = logs.reopen(directory)
    assert recovered.next_offset == 2
    assert segment.name in synced.names, "G1 Durable: recovery trusts bytes that were not fsynced"


def test_a_new_segment_is_in_its_directory_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose name was not fsynced is gone after a power loss, with all that it held."""
    directory = tmp_path / "3"
    synced = SyncedFiles(monkeypatch)
    logs.append(directory, [[b"a:000000000:"]])
    (segment,) = directory.glob("*.wal")
    header_at = synced.names.index(segment.name)
    assert directory.name in synced.names, "G1 Durable: the directory was not fsynced"
    frame_at = len(synced.names) - 1 - synced.names[::-1].index(segment.name)
    assert header_at < synced.names.index(directory.name) < frame_at, "G1 Durable"


class LyingCache:
    """A kernel after a lost write: it shows bytes that the disk never got, until it forgets them.

    `fdatasync` reports the loss once, or has done so before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, segment: Path, on_disk: bytes) -> None:
        self.is_told = False
        self._segment, self._on_disk = segment, on_disk
        self._sync, self._forget = os.fdatasync, os.posix_fadvise
        monkeypatch.setattr(os, "fdatasync", self._fdatasync)
        monkeypatch.setattr(os, "posix_fadvise", self._fadvise)

    def _fdatasync(self, fd: int) -> None:
        if not self.is_told:
            self.is_told = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(fd)

    def _fadvise(self, fd: int, at: int, length: int, advice: int) -> None:
        assert (at, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        assert os.readlink(f"/proc/self/fd/{fd}") == str(self._segment)
        self._segment.write_bytes(self._on_disk)


@pytest.mark.parametrize("is_told", [False, True])
def test_recovery_goes_by_the_disk_and_not_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """G1: after a lost write a second sync succeeds, and the first bytes read would be a lie."""
    directory = tmp_path / "3"
    logs.append(directory, [[b"a:000000000:"]])
    (segment,) = directory.glob("*.wal")
    on_disk = segment.read_bytes()
    logs.append(directory, [[b"a:000000001:"]])
    forget_durable(segment)  # it was not closed
    cache = LyingCache(monkeypatch, segment, on_disk)
    cache.is_told = is_told
    if not is_told:
        with pytest.raises(Corrupt, match="LogSyncFailed"):
            logs.reopen(directory)
    recovered = logs.reopen(directory)
    assert recovered.next_offset == 1, "G1 Durable: recovery trusts what the disk does not have"


def test_a_segments_name_is_durable_before_recovery_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: who made it may have been killed after its header, before its name was fsynced."""
    directory = tmp_path / "3"
    logs.append(directory, [[b"a:000000000:"]])
    synced = SyncedFiles(monkeypatch)
    logs.reopen(directory)
    assert directory.name in synced.names, "G1 Durable: the directory was not fsynced"


def test_the_names_of_new_directories_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: a power cut must not take a directory with all its segments; a crash neither."""
    root = tmp_path / "log"
    root.mkdir()
    synced = SyncedFiles(monkeypatch)
    for _ in range(2):  # the second time everything is there, but perhaps only in memory
        synced.names.clear()
        make_directory(root / "shop" / "orders" / "3", root)
        assert synced.names == ["orders", "shop", "log"], "each level that names another"
    logs.append(root / "shop" / "orders" / "3", [[b"a:000000000:"]])
    synced.names.clear()
    make_directory(root / "shop" / "orders" / "3", root)
    assert synced.names == [], "a log that was written to has its names"
