"""Letting go of segments that the table has.

A segment goes when all of it is below the committed frontier *and* local retention has passed, by
time or by size. Retention past the commit is deliberate: if a catalog forgets a commit that it
acknowledged, the rows are still here. The segment being written always stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidewater_worker.log import index as idx
from tidewater_worker.log.reader import segment_name
from tidewater_worker.log.recover import PRODUCERS_SUFFIX, Segment


@dataclass(frozen=True, slots=True)
class Retention:
    """How long committed segments stay."""

    time_us: int
    bytes: int


def plan_deletions(
    segments: Sequence[Segment], frontier: int, retention: Retention, now_us: int
) -> list[Segment]:
    """Return the segments to delete, oldest first. Pure."""
    size = sum(segment.index.size for segment in segments)
    doomed: list[Segment] = []
    for segment in segments[:-1]:
        too_old = now_us - segment.sealed_at_us > retention.time_us
        too_large = size > retention.bytes
        if segment.end_offset > frontier or not (too_old or too_large):
            break
        doomed.append(segment)
        size -= segment.index.size
    return doomed


def remove_segment(directory: Path, base_offset: int) -> None:
    """Delete a segment and what stands beside it; the segment first, so that no part is left."""
    path = directory / segment_name(base_offset)
    path.unlink(missing_ok=True)
    path.with_suffix(idx.SUFFIX).unlink(missing_ok=True)
    path.with_suffix(PRODUCERS_SUFFIX).unlink(missing_ok=True)
