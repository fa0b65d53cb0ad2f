"""The power goes at any moment: whatever the disk has kept, no acknowledged message is gone.

The log is written by the real appender. Every fsync and fdatasync is noted, and with each the
state of the directory before and after: what is certainly on the disk, and what is only in
memory. A power cut then keeps the first and any part of the second: any sectors, in any order, of
what was written, any of the sizes that a file had, names of new files or not.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidewater_core.errors import Corrupt
from tidewater_testing import logs
from tidewater_testing.evidence import Row
from tidewater_worker.log import durable as durable_note
from tidewater_worker.log.durable import forget_durable
from tidewater_worker.log.inspect import inspect_segment
from tidewater_worker.log.producers import Request
from tidewater_worker.log.scan import valid_frames

SECTOR_BYTES = 512
CUTS_PER_MOMENT = 4
SEED = 7
PRODUCER = "p"

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Moment:
    """The directory at one moment."""

    durable: dict[str, bytes]
    """Content of each file as of its last sync."""
    durable_names: frozenset[str]
    """Names as of the last sync of the directory."""
    current: dict[str, bytes]
    """What a program would read."""
    acked: int
    """Requests acknowledged so far."""


class Recorder:
    """Notes the state of a directory around every sync."""

    def __init__(self, directory: Path, acked: list[logs.Acked]) -> None:
        self.moments: list[Moment] = []
        self._directory = directory
        self._acked = acked
        self._durable = {path.name: path.read_bytes() for path in directory.iterdir()}
        self._names = frozenset(self._durable)

    def around(self, real: Callable[[int], None]) -> Callable[[int], None]:
        """Wrap a sync call."""

        def sync(fd: int) -> None:
            self._note()
            real(fd)
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path == self._directory:
                self._names = frozenset(each.name for each in path.iterdir())
            elif path.parent == self._directory:
                self._durable[path.name] = path.read_bytes()
            self._note()

        return sync

    def _note(self) -> None:
        current = {path.name: path.read_bytes() for path in self._directory.iterdir()}
        # A renamed file keeps what was synced under its old name.
        for name, content in current.items():
            old = self._durable.get(f"{Path(name).stem}.tmp")
            if name not in self._durable and old == content:
                self._durable[name] = content
        self.moments.append(Moment(dict(self._durable), self._names, current, len(self._acked)))


def _disk_after(moment: Moment, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield the files that the disk holds when the power comes back."""
    for name in sorted(moment.durable_names | moment.current.keys()):
        if name.endswith(durable_note.SUFFIX):
            yield name, moment.current[name]  # the newest that can be: it must never say too much
            continue
        is_certain = name in moment.durable_names and name in moment.current
        if not is_certain and draw.random() < 0.5:
            continue
        durable = moment.durable.get(name, b"")
        yield name, _mixed(durable, moment.current.get(name, durable), draw)


def _mixed(durable: bytes, current: bytes, draw: random.Random) -> bytes:
    """Take each sector from before or after; both were there at some time."""
    if durable == current:
        return durable
    sizes = [len(durable), len(current)]
    sizes.append(draw.randint(min(sizes), max(sizes)) // SECTOR_BYTES * SECTOR_BYTES)
    size = draw.choice(sizes) if max(sizes) > min(sizes) else sizes[0]
    size = max(size, min(len(durable), len(current)))
    keep = draw.choice([0.0, 0.2, 0.5, 0.8, 1.0])
    mixed = bytearray(durable[:size].ljust(size, b"\0"))
    for at in range(0, size, SECTOR_BYTES):
        if draw.random() < keep:
            sector = current[at : min(at + SECTOR_BYTES, size)]
            mixed[at : at + len(sector)] = sector
    return bytes(mixed)


def _batches(count: int, bytes_max: int, draw: random.Random, first: int) -> list[list[bytes]]:
    batches: list[list[bytes]] = []
    for _ in range(count):
        rows = draw.randint(1, 6)
        payloads = [f"a:{first + i:09d}:".encode() for i in range(rows)]
        batches.append([each.ljust(draw.randint(20, bytes_max), b"x") for each in payloads])
        first += rows
    return batches


class Story:
    """A log that was there, and what then happened to it, sync by sync."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        together: int,
        bytes_max: int,
        *,
        mixed: bool = False,
    ) -> None:
        draw = random.Random(SEED)
        before = _batches(6, bytes_max, draw, 0)
        self.rows_before = sum(len(batch) for batch in before)
        logs.append(directory, before, segment_bytes=12_000)
        self.batches = _batches(24, bytes_max, draw, self.rows_before)
        self.acked: list[logs.Acked] = []
        recorder = Recorder(directory, self.acked)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", recorder.around(os.fsync))
            patch.setattr(os, "fdatasync", recorder.around(os.fdatasync))
            patch.setattr(durable_note, "NOTE_S", 0.0)
            logs.append(
                directory,
                self.batches,
                segment_bytes=12_000,
                producer=PRODUCER,
                together=together,
                mixed=mixed,
                acked=self.acked,
            )
        self.moments = recorder.moments
        self.rows: list[Row] = logs.rows_by_checker(directory)
        """All that was written in the end; the log at any moment is a prefix of it."""

    def end_at(self, moment: Moment) -> int:
        """Return the offset below which everything was acknowledged at that moment."""
        acked = self.acked[: moment.acked]
        ends = [each.offset + len(self.batches[each.number]) for each in acked]
        return max([self.rows_before, *ends])

    def check(self, directory: Path, moment: Moment, what: str) -> None:
        """Recover what the disk kept: nothing acknowledged is missing, nothing is made up."""
        recovered = logs.reopen(directory)
        end = self.end_at(moment)
        assert recovered.next_offset >= end, f"G1 Durable: {what}: acknowledged up to {end}"
        rows = logs.rows_by_reader(directory, recovered.next_offset)
        assert rows == self.rows[: recovered.next_offset], f"G1 Durable: {what}"
        for each in self.acked[: moment.acked]:
            count = len(self.batches[each.number])
            stored = recovered.producers.find(Request(PRODUCER, each.number), count)
            assert stored is not None, f"G8 Idempotent producers: {what}: {each} is forgotten"
            assert stored.offset == each.offset, f"G8 Idempotent producers: {what}"
        (offset,) = logs.append(directory, [[b"z:000000000:"]])
        assert offset == recovered.next_offset, f"G1 Durable: {what}: goes on elsewhere"


def _write(directory: Path, moment: Moment, draw: random.Random) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in _disk_after(moment, draw):
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("bytes_max", [60, 3_000])
@pytest.mark.parametrize("together", [1, 5])
def test_no_power_cut_takes_an_acknowledged_message(
    monkeypatch: pytest.MonkeyPatch, together: int, bytes_max: int
) -> None:
    """At every sync, before and after it, with several outcomes each."""
    with logs.memory_directory() as memory:
        story = Story(memory / "log", monkeypatch, together, bytes_max)
        assert len(story.moments) > 20
        draw = random.Random(SEED)
        for number, moment in enumerate(story.moments):
            for cut in range(CUTS_PER_MOMENT):
                _write(memory / "cut", moment, draw)
                story.check(memory / "cut", moment, f"moment {number}, cut {cut}")


def test_a_group_of_several_frames_goes_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later frame of the last group can be whole while an earlier one is torn."""
    behind = 0
    with logs.memory_directory() as memory:
        story = Story(memory / "log", monkeypatch, 5, 3_000, mixed=True)
        draw = random.Random(SEED)
        for number, moment in enumerate(story.moments):
            for cut in range(4 * CUTS_PER_MOMENT):
                _write(memory / "cut", moment, draw)
                behind += _has_a_frame_behind_a_torn_one(memory / "cut")
                story.check(memory / "cut", moment, f"moment {number}, cut {cut}")
    assert behind > 5, "the case was met"


def _has_a_frame_behind_a_torn_one(directory: Path) -> bool:
    last = max(directory.glob("*.wal"), default=None)
    problem = inspect_segment(last, is_last=True) if last is not None else None
    if problem is None or not problem.problem or not problem.is_torn:
        return False
    assert last is not None
    found = valid_frames(last.read_bytes(), problem.bytes_used, problem.end_offset)
    return next(found, None) is not None


def test_damage_to_an_acknowledged_frame_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    """A sector that was fsynced and is gone: groups that were written later give it away."""
    batches = [[f"a:{i:09d}:".encode().ljust(2_000, b"x")] for i in range(4)]
    logs.append(tmp_path, batches)
    (path,) = tmp_path.glob("*.wal")
    forget_durable(path)
    data = bytearray(path.read_bytes())
    whole = bytes(data)
    at = data.index(b"a:000000001:") // SECTOR_BYTES * SECTOR_BYTES + SECTOR_BYTES
    data[at : at + SECTOR_BYTES] = bytes(SECTOR_BYTES)
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="a valid frame that was written later follows"):
        logs.reopen(tmp_path)
    assert path.read_bytes() == data != whole, "G7 Nothing is silently skipped"
