"""Letting go of segments that the table has.

A segment goes when all of it is below the committed frontier *and* local retention has passed, by
time or by size. Retention past the commit is deliberate: if a catalog forgets a commit that it
acknowledged, the rows are still here. The segment being written always stays.

Long before it goes from the disk it goes from the kernel's memory: nobody is likely to read it
there, yet every group of a busy log would be written to memory that the kernel has to find first,
at several times the cost of memory that was just given back. The newest bytes stay for consumers
that are a little behind.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidewater_worker.log import index as idx
from tidewater_worker.log.durable import forget_durable
from tidewater_worker.log.reader import segment_name
from tidewater_worker.log.recover import PRODUCERS_SUFFIX, Segment

CACHED_BYTES: Final = 256 * 1024**2
"""How much of what the table has stays in the kernel's memory, for each partition."""


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
    forget_durable(path)


def plan_cooling(segments: Sequence[Segment], frontier: int, keep: int) -> list[Segment]:
    """Return the segments that need not be in memory, oldest first. Pure.

    Those are the committed ones but for the newest bytes.
    """
    found: list[Segment] = []
    for segment in reversed(segments[:-1]):
        if segment.end_offset > frontier:
            continue
        if keep > 0:
            keep -= segment.index.size
        elif segment.is_cached:
            found.append(segment)
        else:
            break  # so are all before it
    return found[::-1]


def cool_segment(directory: Path, base_offset: int) -> None:
    """Let the kernel forget a sealed segment's bytes; they are on the disk."""
    fd = os.open(directory / segment_name(base_offset), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
