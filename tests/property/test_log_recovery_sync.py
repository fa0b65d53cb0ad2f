"""What recovery found may never have been fsynced: it must be, before anyone hears of it.

After a `kill -9` the page cache still holds a write that was not acknowledged. Recovery reads it,
readers see it, and a producer that sends it again is told that it is stored. If the power went
then, an acknowledged message would be gone.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewater_testing import logs


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
