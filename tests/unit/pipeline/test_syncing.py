"""Files that Spark writes are synced while it writes, and what a disk refuses is told."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.errors import Corrupt, Retryable
from tidewater_core.names import TopicName
from tidewater_pipeline import syncing
from tidewater_pipeline.cli import main
from tidewater_pipeline.cli.run import EXIT_PERSON
from tidewater_pipeline.report import Outcome, Progress, Report
from tidewater_pipeline.syncing import DISK_REFUSED, local_path, sync_files, synced_early


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
    with pytest.raises(Corrupt, match=r"DiskRefused.*the disk said no"):
        write()
    with pytest.raises(Corrupt, match=r"DiskRefused.*the disk said no"):
        sync_files([str(tmp_path / "new.parquet")])


def test_what_the_disk_refused_comes_before_a_failure_of_spark(
    tmp_path: Path, synced: Synced
) -> None:
    """It may have committed a part; any other end (SIGTERM) passes as it is."""

    def write(error: BaseException) -> None:
        with synced_early([tmp_path]):
            new = tmp_path / f"{type(error).__name__}.parquet"
            new.write_bytes(b"new")
            synced.wait(new)
            raise error

    synced.refused = True
    with pytest.raises(Corrupt, match="DiskRefused"):
        write(Retryable("SparkFailed", "Spark said no"))
    with pytest.raises(KeyboardInterrupt):
        write(KeyboardInterrupt())


def test_nothing_is_expired_behind_what_the_disk_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of it once: the next sync hears nothing, and the originals would go."""
    began: list[str] = []

    def one(_run: Any, topic: TopicName, job: str) -> Report:
        began.append(f"{topic}: {job}")
        if began == ["a/b: compact"]:
            raise Corrupt(DISK_REFUSED, "the disk said no")
        return Report(job, str(topic))

    monkeypatch.setattr(main, "_one", one)
    run: Any = SimpleNamespace(session=SimpleNamespace(progress=Progress(quiet=True)))
    reports = main.run_jobs(run, ["compact", "expire"], [TopicName("a", "b"), TopicName("a", "c")])
    assert began == ["a/b: compact", "a/c: compact", "a/c: expire"]
    assert [each.outcome for each in reports] == [Outcome.FAILED, Outcome.DONE, Outcome.DONE]
    assert DISK_REFUSED in reports[0].message
    assert main.exit_code(reports) == EXIT_PERSON


def test_no_folder_no_thread(synced: Synced) -> None:
    with synced_early(set()):
        assert not [each for each in threading.enumerate() if each.name == "synced-early"]
    assert synced.inodes == []


def test_files_and_their_folders_by_name(tmp_path: Path, synced: Synced) -> None:
    there = tmp_path / "a.parquet"
    there.write_bytes(b"a")
    sync_files([f"file:{there}", f"file:{tmp_path}/replaced.json"])
    assert synced.inodes == [there.stat().st_ino, tmp_path.stat().st_ino]
