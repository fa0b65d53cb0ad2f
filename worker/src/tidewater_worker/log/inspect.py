"""Looking at a log directory without a worker: what `tidewater log inspect|verify` shows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidewater_core.errors import Corrupt
from tidewater_worker.log import frame as fmt
from tidewater_worker.log import index as idx
from tidewater_worker.log.durable import durable_end, why_lost
from tidewater_worker.log.reader import list_segments, segment_name
from tidewater_worker.log.recover import BROKEN_SUFFIX
from tidewater_worker.log.scan import Scan, is_unborn, why_damaged


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """What one segment holds."""

    path: Path
    base_offset: int
    end_offset: int
    frames: int
    bytes_used: int
    bytes_file: int
    first_time_us: int
    last_time_us: int
    problem: str
    """Empty if the segment is whole."""
    is_torn: bool
    """The problem is a torn tail, which the next start cuts."""


def partitions_below(root: Path) -> list[Path]:
    """Return the partition directories at or below `root`."""
    return sorted({path.parent for path in root.rglob("*.wal")})


def broken_files(directory: Path) -> list[Path]:
    """Return the torn tails that earlier starts cut."""
    return sorted(directory.glob(f"*{BROKEN_SUFFIX}*"))


def inspect_segment(path: Path, *, is_last: bool) -> SegmentReport:
    """Read one segment whole and check every frame."""
    noted = durable_end(path)  # before the bytes: a log that is written goes on meanwhile
    data = path.read_bytes()
    base = int(path.stem)
    try:
        header = fmt.decode_header(data, path.name)
    except Corrupt as error:
        lost = why_lost(noted, base)
        torn = is_last and lost is None and is_unborn(data, path.name, base)
        problem = error.message + (f", {lost}" if lost else "")
        return SegmentReport(path, base, base, 0, 0, len(data), 0, 0, problem, torn)
    frames, first, last = 0, 0, 0
    scan = Scan(data, header)
    for _, batch in scan:
        last = idx.first_time_us(batch)
        first, frames = first or last, frames + 1
    problem, torn = "", False
    damage = why_lost(noted, scan.offset)
    if scan.problem and damage is None:
        damage = why_damaged(data, scan.at, scan.offset, header.schema)
    if scan.problem or damage:
        torn = is_last and damage is None
        problem = f"byte {scan.at}: {scan.problem or 'the end'}" + (f", {damage}" if damage else "")
    return SegmentReport(
        path, base, scan.offset, frames, scan.at, len(data), first, last, problem, torn
    )


def inspect_partition(directory: Path) -> Iterator[SegmentReport]:
    """Read a partition's segments in order; a gap between two is the later one's problem."""
    bases = list_segments(directory)
    expected: int | None = None
    for base in bases:
        report = inspect_segment(directory / segment_name(base), is_last=base == bases[-1])
        if expected is not None and base != expected and not report.problem:
            report = SegmentReport(
                report.path, base, report.end_offset, report.frames, report.bytes_used,
                report.bytes_file, report.first_time_us, report.last_time_us,
                f"begins at offset {base}, but the one before ends at {expected}", False,
            )  # fmt: skip
        expected = report.end_offset
        yield report
