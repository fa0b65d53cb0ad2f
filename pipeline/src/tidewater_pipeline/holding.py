"""Holding a table's history while a job is at work on one of its snapshots.

The writer lets go of snapshots by their number, within a minute at a commit a second. A rewrite
needs each one that came since it began. One upkeep job is at work on a table at a time, by its
lease, so the property has one writer; a later job's hold takes the place of one that died.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tidewater_core.errors import TidewaterError
from tidewater_core.hold import HOLD_MS_MAX, Hold
from tidewater_core.names import HOLD
from tidewater_pipeline.session import TopicTable
from tidewater_pipeline.state import TableState

HOLD_MS_MIN: Final = 10 * 60_000
BYTES_PER_MS: Final = 4 * 1024
"""What the slowest rewrite should do; measured is ten times that on one core."""
SKEW_MS: Final = 30 * 60_000
"""Clocks of jobs may be ahead of the workers' by this."""


def hold_ms(nbytes: int) -> int:
    """Return how long work on so many bytes may take. Pure."""
    return min(HOLD_MS_MIN + nbytes // BYTES_PER_MS, HOLD_MS_MAX - SKEW_MS)


@contextmanager
def held(table: TopicTable, nbytes: int, since: TableState | None = None) -> Iterator[TableState]:
    """Keep every snapshot from the newest one on; yield the state at which that began.

    `since`: a state that is known already, and not old. A run that is stopped leaves the hold to
    run out by itself: its JVM has no time for it.
    """
    state = table.load() if since is None else since
    until_ms = table.session.clock.now_us() // 1000 + hold_ms(nbytes)
    table.set_properties({HOLD: Hold(state.sequence, until_ms).to_property()})
    try:
        yield state
    except Exception:
        release(table)
        raise
    release(table)


def release(table: TopicTable) -> None:
    """Let the writer expire again; also what a job that died has left, by who has its lease now."""
    with suppress(TidewaterError):  # it runs out by itself
        table.set_properties({}, removed=(HOLD,))
