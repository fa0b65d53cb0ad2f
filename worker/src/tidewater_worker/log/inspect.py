"""Looking at a log directory without a worker: what `tidewater log inspect|verify` shows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tidewater_core.errors import Corrupt
from tidewater_worker.log import frame as fmt
from tidewater_worker.log import index as idx
from tidewater_worker.log.reader import list_segments, segment_name
from tidewater_worker.log.recover import BROKEN_SUFFIX, why_damaged


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
    data = path.read_bytes()
    try:
        header = fmt.decode_header(data, path.name)
    except Corrupt as error:
        base = int(path.stem)
        torn = is_last and error.reason == "SegmentHeaderTorn"
        return SegmentReport(path, base, base, 0, 0, len(data), 0, 0, error.message, torn)
    buffer = pa.py_buffer(data)
    offset, at, frames, first, last = header.base_offset, header.size, 0, 0, 0
    problem, torn = "", False
    while isinstance(decoded := fmt.decode_frame(data, at), fmt.Frame):
        if decoded.base_offset != offset:
            problem = f"byte {at}: offset {decoded.base_offset} where {offset} is expected"
            break
        body = buffer.slice(decoded.body_at, decoded.end_at - decoded.body_at)
        batch = pa.ipc.read_record_batch(body, header.schema)
        last = idx.first_time_us(batch)
        first = first or last
        offset, at, frames = offset + batch.num_rows, decoded.end_at, frames + 1
    if isinstance(decoded, fmt.Torn):
        problem = f"byte {at}: {decoded.why}"
        damage = why_damaged(data, at, offset, header.schema)
        torn = is_last and damage is None
        if damage is not None:
            problem += f", {damage}"
    return SegmentReport(
        path, header.base_offset, offset, frames, at, len(data), first, last, problem, torn
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
