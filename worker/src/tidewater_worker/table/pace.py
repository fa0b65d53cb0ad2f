"""When to flush and when to try again. Pure."""

import math
from dataclasses import dataclass
from typing import Final

REFUSED_BASE_S: Final = 0.01
"""First pause after a conflict: another commit was first, and ours takes some ten milliseconds."""
ERROR_BASE_S: Final = 0.1
"""First pause after an error."""
PAUSE_S_MAX: Final = 10.0
EARLY_PART: Final = 0.25
"""A flush by rows or bytes comes no sooner after a commit than this part of the interval."""


def pause_s(failures: int, *, refused: bool, jitter: float) -> float:
    """Return how long to wait after so many failures in a row: doubling, bounded, spread out."""
    base = REFUSED_BASE_S if refused else ERROR_BASE_S
    full = min(PAUSE_S_MAX, base * 2.0 ** min(failures - 1, 20))
    return full * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits to be flushed."""

    rows: int
    nbytes: int
    """An estimate: the log tells offsets, not bytes."""
    since: float
    """When the oldest of it became durable (monotonic seconds)."""


def aligned_due(since: float, interval_s: float, tick_at: float, lead_s: float) -> float:
    """Return when to cut a batch so that it comes `lead_s` before a tick of the interval.

    Of the moments that do, the last one by which the oldest row has waited an interval at most.
    """
    latest = since + interval_s
    if not math.isfinite(tick_at) or interval_s <= 0:
        return latest
    point = tick_at - lead_s
    return point + math.floor((latest - point) / interval_s) * interval_s


def flush_due(
    waiting: Waiting,
    *,
    interval_s: float,
    rows_max: int,
    bytes_max: int,
    committed_at: float,
    backlog: bool,
) -> float:
    """Return the time at which to flush: when the oldest row has its age, or earlier for size.

    A `backlog` (the last batch did not take all that waited) goes on at once: its batches are
    as large as memory allows, so more haste makes no smaller files.
    """
    if backlog:
        return committed_at
    due = waiting.since + interval_s
    if waiting.rows >= rows_max or waiting.nbytes >= bytes_max:
        due = min(due, committed_at + interval_s * EARLY_PART)
    return due
