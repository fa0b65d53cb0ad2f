"""Files that Spark writes are synced while it writes, and what a disk refuses is told."""

import errno
import os
import threading
from pathlib import Path

import pytest

from tidewater_pipeline import syncing
from tidewater_pipeline.syncing import local_path, sync_files, synced_early


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> "Synced":
    """Note what is synced instead of waiting for a disk, and look often."""
    monkeypatch.setattr(syncing, "PAUSE_S", 0.005)
    return Synced(monkeypatch)


class Synced:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.inodes: list[int] = []
        self.refused = False
        self._seen = threading.Condition()
        patch.setattr(os, "fdatasync", self._note)
        patch.setattr(os, "fsync", self._note)

    def _note(self, handle: int) -> None:
        with self._seen:
            self.inodes.append(os.fstat(handle).st_ino)
            self._seen.notify_all()
        if self.refused:
            raise OSError(errno.EIO, "the disk said no")

    def wait(self, path: Path, times: int = 1) -> None:
        inode = path.stat().st_ino
        with self._seen:
            assert self._seen.wait_for(lambda: self.inodes.count(inode) >= times, 20), path


@pytest.mark.parametrize(
    "location", ["file:///data/a.parquet", "file:/data/a.parquet", "/data/a.parquet"]
)
def test_locations(location: str) -> None:
    assert local_path(location) == Path("/data/a.parquet")


def test_what_appears_is_synced_as_it_grows(tmp_path: Path, synced: Synced) -> None:
    old, folder = tmp_path / "hour=1/old.parquet", tmp_path / "hour=2"
    old.parent.mkdir()
    old.write_bytes(b"there before")
    with synced_early([old.parent, folder]):
        beside = old.parent / "new.parquet"
        beside.write_bytes(b"new")
        synced.wait(beside)
        folder.mkdir()  # by the first file in it
        growing = folder / "growing.parquet"
        growing.write_bytes(b"half")
        synced.wait(growing)
        growing.write_bytes(b"half and the rest")
        synced.wait(growing, times=2)
    assert old.stat().st_ino not in synced.inodes
    assert not [each for each in threading.enumerate() if each.name == "synced-early"]


def test_what_the_disk_refuses_is_told_once_and_must_not_get_lost(
    tmp_path: Path, synced: Synced
) -> None:
    def write() -> None:
        with synced_early([tmp_path]):
            (tmp_path / "new.parquet").write_bytes(b"new")
            synced.wait(tmp_path / "new.parquet")

    synced.refused = True
    with pytest.raises(OSError, match="the disk said no"):
        write()


def test_an_error_of_the_work_comes_first(tmp_path: Path, synced: Synced) -> None:
    def write() -> None:
        with synced_early([tmp_path]):
            (tmp_path / "new.parquet").write_bytes(b"new")
            synced.wait(tmp_path / "new.parquet")
            raise ValueError("Spark said no")

    synced.refused = True
    with pytest.raises(ValueError, match="Spark said no"):
        write()


def test_no_folder_no_thread(synced: Synced) -> None:
    with synced_early(set()):
        assert not [each for each in threading.enumerate() if each.name == "synced-early"]
    assert synced.inodes == []


def test_files_and_their_folders_by_name(tmp_path: Path, synced: Synced) -> None:
    there = tmp_path / "a.parquet"
    there.write_bytes(b"a")
    sync_files([f"file:{there}", f"file:{tmp_path}/replaced.json"])
    assert synced.inodes == [there.stat().st_ino, tmp_path.stat().st_ino]
