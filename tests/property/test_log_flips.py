"""One bit of a log turned over: it is found, nothing wrong is read, nothing is thrown away.

The log's last frame is the one case where damage cannot always be told from a write that was cut
short, unless it was noted as fsynced: without the note its bytes must be kept as `.broken`.
Everything before it, and below the note, must be refused.
"""

import hashlib
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidewater_core.errors import Corrupt
from tidewater_testing import logs, wal
from tidewater_testing.evidence import Row
from tidewater_worker.log.durable import forget_durable
from tidewater_worker.log.reader import LogReader

pytestmark = pytest.mark.timeout(240)


class Original:
    """A log of some sealed segments and one with several frames that was being written."""

    def __init__(self, directory: Path, *, is_noted: bool) -> None:
        self.directory, self.is_noted = directory, is_noted
        batches = [
            [f"a:{batch * 3 + row:09d}:".encode().ljust(40, b"x") for row in range(3)]
            for batch in range(9)
        ]
        logs.append(directory, batches[:6], segment_bytes=3_000, producer="p")
        logs.append(directory, batches[6:], producer="p2")
        self.segments = wal.read_log(directory)
        if not is_noted:
            forget_durable(self.last.path)
        assert len(self.segments) >= 3
        self.rows = logs.rows_by_checker(directory)
        self.files = {path.name: path.read_bytes() for path in directory.iterdir()}

    @property
    def last(self) -> wal.Segment:
        """The segment that was being written."""
        return self.segments[-1]


@pytest.fixture(scope="module", params=[True, False], ids=["noted", "without-a-note"])
def original(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Original:
    """Write the log once."""
    return Original(tmp_path_factory.mktemp("log") / "3", is_noted=request.param)


def _digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.suffix == ".wal" or ".broken" in path.name
    }


def _read(directory: Path, end: int) -> list[Row] | None:
    """Read all rows below `end`, or return None where the reader refuses."""
    try:
        return logs.rows_by_reader(directory, end)
    except Corrupt:
        return None


def _check_flip(original: Original, directory: Path, name: str, at: int, bit: int) -> None:
    path = directory / name
    data = bytearray(original.files[name])
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))
    before = _digests(directory)
    what = f"{name} byte {at} bit {bit}"
    segment = path.suffix == ".wal"
    last_frame = original.last.frames[-1]
    in_last_frame = name == original.last.path.name and at >= last_frame.at
    in_last_frame &= not original.is_noted
    try:
        recovered = logs.reopen(directory)
    except Corrupt:
        assert segment, f"{what}: refused, though the file can be rebuilt"
        assert _digests(directory) == before, f"G7 Nothing is silently skipped: {what}: changed"
        return
    if recovered.next_offset != len(original.rows):
        assert in_last_frame, f"G1 Durable: {what}: the log ends at {recovered.next_offset}"
        assert recovered.next_offset == last_frame.base_offset, what
        assert recovered.cut_bytes > 0, what
        assert list(directory.glob("*.broken")), f"G7 Nothing is silently skipped: {what}"
    rows = _read(directory, recovered.next_offset)
    if rows is None:
        assert segment, f"{what}: the reader refuses a log whose segments are sound"
        return
    assert rows == original.rows[: recovered.next_offset], f"G1 Durable: {what}: other rows"
    assert not segment or in_last_frame, f"G7 Nothing is silently skipped: {what}: not found"


def test_a_flip_at_every_byte_is_found(original: Original) -> None:
    """Every byte of every file, with a bit that changes from byte to byte."""
    with logs.memory_directory() as memory:
        _flip_every_byte(original, memory / "3")


def _flip_every_byte(original: Original, directory: Path) -> None:
    for name, data in sorted(original.files.items()):
        for at in range(len(data)):
            bit = (at * 5 + 3) % 8
            if at == 0 or list(directory.glob("*.broken*")):
                shutil.rmtree(directory, ignore_errors=True)
                shutil.copytree(original.directory, directory)
            _check_flip(original, directory, name, at, bit)
            for other, content in original.files.items():
                path = directory / other
                if not path.exists() or path.read_bytes() != content:
                    path.write_bytes(content)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_drawn_flip_is_found(
    original: Original, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any bit of any file."""
    name = data.draw(st.sampled_from(sorted(original.files)))
    at = data.draw(st.integers(0, max(0, len(original.files[name]) - 1)))
    bit = data.draw(st.integers(0, 7))
    directory = tmp_path_factory.mktemp("flip") / "3"
    shutil.copytree(original.directory, directory)
    _check_flip(original, directory, name, at, bit)


@given(start=st.integers(0, 26), at=st.integers(0, 2_000), bit=st.integers(0, 7))
@example(start=5, at=700, bit=0)
@settings(max_examples=150, deadline=None)
def test_a_seek_into_a_damaged_segment_never_reads_wrong_rows(
    original: Original,
    tmp_path_factory: pytest.TempPathFactory,
    start: int,
    at: int,
    bit: int,
) -> None:
    """A reader that begins in the middle walks frame heads without their checksums."""
    directory = tmp_path_factory.mktemp("seek") / "3"
    shutil.copytree(original.directory, directory)
    sealed = original.segments[0].path.name
    data = bytearray(original.files[sealed])
    data[at % len(data)] ^= 1 << bit
    (directory / sealed).write_bytes(bytes(data))
    reader = LogReader(directory)
    try:
        batches = reader.read(start, len(original.rows), logs.READ_BYTES_MAX)
    except Corrupt:
        return
    finally:
        reader.close()
    got = [
        (batch.base_offset + i, value)
        for batch in batches
        for i, value in enumerate(batch.batch.column("value").to_pylist())
    ]
    wanted = [(row.offset, row.payload) for row in original.rows]
    assert got == wanted[got[0][0] :][: len(got)], "G1 Durable: other rows"
    assert got[0][0] <= start <= got[-1][0], "G3 One stream: the rows asked for are not there"
