"""The log cut at every byte: what is read is a prefix of what was written, and it goes on.

A write that was under way when the power went leaves a file that is too short, or one whose
preallocated zeros still stand in some of the sectors that the write was to fill. What was noted as
fsynced is never cut.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewater_core.errors import Corrupt
from tidewater_testing import logs, wal
from tidewater_worker.log.durable import forget_durable, note_durable

SECTOR_BYTES = 512
MORE = [[b"more:000000000:"], [b"more:000000001:", b"more:000000002:"]]

pytestmark = pytest.mark.timeout(240)


def _batches(count: int, rows: int, size: int) -> list[list[bytes]]:
    return [
        [f"a:{batch * rows + row:09d}:".encode().ljust(size, b"x") for row in range(rows)]
        for batch in range(count)
    ]


class Original:
    """A log of two sealed segments and one that was being written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        batches = _batches(9, 4, 20)
        logs.append(directory, batches[:5], segment_bytes=3_000, producer="p")
        logs.append(directory, batches[5:], producer="q")
        segments = wal.read_log(directory)
        assert len(segments) >= 2, "the log must have sealed segments"
        self.rows = logs.rows_by_checker(directory)
        self.last = segments[-1]
        self.data = self.last.path.read_bytes()

    def rows_up_to(self, size: int) -> int:
        """Count the rows whose frames lie whole in the first `size` bytes of the last segment."""
        whole = [frame for frame in self.last.frames if frame.end <= size]
        in_last = sum(frame.rows for frame in whole)
        return self.last.header.base_offset + in_last

    def copy(self, target: Path) -> Path:
        """Copy the log and return where its last segment is."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.directory, target)
        last = target / self.last.path.name
        forget_durable(last)  # it was not closed
        return last


@pytest.fixture
def memory() -> Iterator[Path]:
    """Give a directory whose syncs cost nothing."""
    with logs.memory_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Write the log once."""
    return Original(tmp_path_factory.mktemp("log") / "3")


def _assert_prefix_and_goes_on(original: Original, copy: Path, expected: int, what: str) -> None:
    """G1: everything that was whole is there; nothing else is; new offsets follow it."""
    offsets = logs.append(copy, MORE)
    assert offsets == [expected, expected + 1], f"G1 Durable: {what}"
    rows = logs.rows_by_reader(copy, expected + 3)
    assert rows[:expected] == original.rows[:expected], f"G1 Durable: {what}"
    assert logs.payloads_of(rows[expected:]) == [each for batch in MORE for each in batch], what
    assert rows == logs.rows_by_checker(copy), what


def test_every_byte_prefix_recovers_to_a_prefix(original: Original, memory: Path) -> None:
    """Recovery alone, at every byte of the last segment."""
    last = original.copy(memory / "cut")
    for size in range(len(original.data) + 1):
        last.write_bytes(original.data[:size])
        expected = original.rows_up_to(size)
        note_durable(last, expected + 1)
        with pytest.raises(Corrupt, match=f"below offset {expected + 1} were fsynced"):
            logs.reopen(last.parent)
        assert last.read_bytes() == original.data[:size], f"G7: cut at byte {size}"
        note_durable(last, expected)
        recovered = logs.reopen(last.parent)
        assert recovered.next_offset == expected, f"G1 Durable: cut at byte {size}"
        kept = list(last.parent.glob("*.broken*"))
        whole = {original.last.header.size, *(frame.end for frame in original.last.frames)}
        torn = size > 0 and size not in whole
        assert bool(kept) == torn, f"G7 Nothing is silently skipped: cut at byte {size}"
        for each in kept:
            each.unlink()


def test_after_a_cut_the_log_goes_on(original: Original, memory: Path) -> None:
    """At and around every boundary, and between: repair, write more, read all again."""
    edges = {original.last.header.size, *(frame.end for frame in original.last.frames)}
    edges |= {frame.at + 16 for frame in original.last.frames}
    near = {edge + step for edge in edges for step in (-9, -1, 0, 1, 8)}
    sizes = sorted(near | set(range(0, len(original.data), 61)))
    for size in sizes:
        if not 0 <= size <= len(original.data):
            continue
        last = original.copy(memory / "cut")
        last.write_bytes(original.data[:size])
        expected = original.rows_up_to(size)
        _assert_prefix_and_goes_on(original, last.parent, expected, f"cut at byte {size}")


def test_a_cut_in_preallocated_zeros_goes_on(original: Original, tmp_path: Path) -> None:
    """The file keeps its length and the rest of it is zeros, from any sector on."""
    first = original.last.header.size // SECTOR_BYTES + 1
    for sector in range(first, len(original.data) // SECTOR_BYTES + 1):
        size = sector * SECTOR_BYTES
        last = original.copy(tmp_path / "cut")
        last.write_bytes(original.data[:size].ljust(len(original.data) + 8192, b"\0"))
        what = f"zeros from byte {size} on"
        _assert_prefix_and_goes_on(original, last.parent, original.rows_up_to(size), what)


def test_a_directory_without_its_last_segment_goes_on(original: Original, tmp_path: Path) -> None:
    """The crash came before the new segment was made, or before its header was written."""
    for content in (None, b"", original.data[:20]):
        last = original.copy(tmp_path / "cut")
        last.unlink()
        if content is not None:
            last.write_bytes(content)
        expected = original.last.header.base_offset
        _assert_prefix_and_goes_on(original, last.parent, expected, "no last segment")


def test_missing_companions_are_rebuilt(original: Original, tmp_path: Path) -> None:
    """Index and producer files are a convenience: without them, or cut, the log is the same."""
    names = (path.name for path in original.directory.iterdir())
    companions = sorted(name for name in names if name.endswith((".idx", ".producers")))
    assert companions, "sealed segments have companions"
    for name in companions:
        for keep in (None, 0, 7):
            last = original.copy(tmp_path / "cut")
            companion = last.parent / name
            data = companion.read_bytes()
            companion.unlink()
            if keep is not None:
                companion.write_bytes(data[:keep])
            recovered = logs.reopen(last.parent)
            assert recovered.next_offset == len(original.rows), f"{name} cut to {keep}"
            again = logs.append(last.parent, _batches(1, 4, 20), producer="p")
            assert again == [0], f"G8 Idempotent producers: {name} cut to {keep}"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a log whose last frame covers many sectors."""
    directory = tmp_path_factory.mktemp("large") / "3"
    logs.append(directory, [[b"a:000000000:" + b"x" * 300], [b"a:000000001:" + b"y" * 6_000]])
    return directory


@given(lost=st.sets(st.integers(0, 15), min_size=1))
@settings(max_examples=60, deadline=None)
def test_any_lost_sectors_of_the_last_write_are_a_torn_tail(
    large: Path, tmp_path_factory: pytest.TempPathFactory, lost: set[int]
) -> None:
    """A disk may write the sectors of one write in any order; the frame was not acknowledged."""
    copy = tmp_path_factory.mktemp("lost") / "3"
    shutil.copytree(large, copy)
    (segment,) = wal.read_log(copy)
    frame = segment.frames[-1]
    note_durable(segment.path, frame.base_offset)
    data = bytearray(segment.path.read_bytes())
    first = -(-frame.at // SECTOR_BYTES)
    sectors = (frame.end - 1) // SECTOR_BYTES - first + 1
    begins = [frame.at, *((first + i) * SECTOR_BYTES for i in range(sectors))]
    for number in lost:
        at = begins[number % len(begins)]
        end = min((at // SECTOR_BYTES + 1) * SECTOR_BYTES, frame.end)
        data[at:end] = bytes(end - at)
    segment.path.write_bytes(bytes(data))
    assert logs.append(copy, [[b"b:000000000:"]]) == [1], "G1 Durable: the frame before stays"
    assert logs.payloads_of(logs.rows_by_checker(copy))[1:] == [b"b:000000000:"]
