"""Every offset once: what was read and what was passed over must make up a window. Pure.

A reader that passes rows over has to know which offsets they are, else rows that are missing would
look like rows that nobody wants (G3, G7).
"""

from collections.abc import Sequence

import numpy as np

from tidewater_core.errors import Corrupt

Span = tuple[int, int]
"""Offsets [start, end)."""
Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]


def missing(partition: int, offset: int) -> Corrupt:
    """Return what to raise for a row that is not there."""
    return Corrupt("RowsMissing", f"offset {offset} of partition {partition} is not in the table")


def doubled(partition: int, offset: int) -> Corrupt:
    """Return what to raise for a row that is there twice."""
    return Corrupt("RowsDoubled", f"offset {offset} of partition {partition} is in the table twice")


def check_cover(
    partition: int, start: int, end: int, spans: Sequence[Span], read: Sequence[Offsets]
) -> None:
    """Make sure that spans and offsets that were read are [start, end), each offset once.

    What lies outside of the window is another window's matter.
    """
    starts, ends = _runs(partition, read)
    clipped = [(max(low, start), min(high, end)) for low, high in spans]
    clipped = [(low, high) for low, high in clipped if low < high]
    starts = np.concatenate([starts, np.array([low for low, _ in clipped], np.int64)])
    ends = np.concatenate([ends, np.array([high for _, high in clipped], np.int64)])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    if not len(starts) or starts[0] > start:
        raise missing(partition, start)
    for at in np.flatnonzero(starts[1:] != ends[:-1]):
        if starts[at + 1] < ends[at]:
            raise doubled(partition, int(starts[at + 1]))
        raise missing(partition, int(ends[at]))
    if ends[-1] < end:
        raise missing(partition, int(ends[-1]))
    assert (starts[0], ends[-1]) == (start, end), "only offsets of the window were given"


def _runs(partition: int, read: Sequence[Offsets]) -> tuple[Offsets, Offsets]:
    """Return where runs of offsets begin and end."""
    offsets = np.concatenate(read) if read else np.empty(0, np.int64)
    if not len(offsets):
        return offsets, offsets
    steps = np.diff(offsets)
    if not bool(np.all(steps > 0)):
        offsets = np.sort(offsets)
        steps = np.diff(offsets)
        twice = np.flatnonzero(steps == 0)
        if len(twice):
            raise doubled(partition, int(offsets[twice[0]]))
    breaks = np.flatnonzero(steps != 1)
    return (
        np.concatenate([offsets[:1], offsets[breaks + 1]]),
        np.concatenate([offsets[breaks], offsets[-1:]]) + 1,
    )


def covered_to(start: int, spans: Sequence[Span]) -> int:
    """Return how far spans, sorted, reach from `start` on without a hole."""
    for low, high in spans:
        if low > start:
            break
        start = max(start, high)
    return start
