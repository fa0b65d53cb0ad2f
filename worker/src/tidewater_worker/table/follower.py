"""Following a table's snapshots: one look at the catalog for however many readers wait.

A reader of what is committed waits for the next snapshot here and then reads the offsets that it
brought by `history`: manifests and files that were there before are known and not read again. While
nobody waits, nobody looks.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tidewater_core.clock import Clock
from tidewater_core.errors import TidewaterError
from tidewater_worker.ports import Followed, PartitionState, Phase
from tidewater_worker.table.history import HistoryReader
from tidewater_worker.table.view import TableView

Answer = Callable[[Followed | TidewaterError], None]


def partition_states(view: TableView) -> dict[int, PartitionState]:
    """Return how far each partition is in a state of the table."""
    return {
        number: PartitionState(
            found.next,
            view.starts.get(number, 0),
            found.epoch,
            Phase.RUNNING,
            gaps=view.gaps.get(number, ()),
        )
        for number, found in view.frontiers.items()
    }


@dataclass(frozen=True, slots=True)
class _Waiter:
    known: int | None
    deadline: float
    answer: Answer


class Follower:
    """Tells readers of one topic of new snapshots. A task of the scheduler."""

    def __init__(self, reader: HistoryReader, clock: Clock, poll_s: float) -> None:
        self.uuid = reader.where.uuid
        self.reader = reader
        """What it looks with; readers share the view that it has then."""
        self._clock, self._poll_s = clock, poll_s
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._looked_at = float("-inf")
        self._last: Followed | TidewaterError | None = None
        self._over: TidewaterError | None = None

    def wait(self, known: int | None, deadline: float, answer: Answer) -> None:
        """Ask for a snapshot that is not `known`; the scheduler must be poked."""
        with self._lock:
            over = self._over
            if over is None:
                self._waiters.append(_Waiter(known, deadline, answer))
        if over is not None:
            answer(over)

    def end(self, error: TidewaterError) -> None:
        """Tell all who wait, or come yet, that nobody looks any more."""
        with self._lock:
            self._over = error
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.answer(error)

    def step(self) -> float | None:
        """Look once per interval while somebody waits, and tell those for whom it is news."""
        with self._lock:
            if not self._waiters:
                return None
        now = self._clock.monotonic()
        if now >= self._looked_at + self._poll_s:
            self._looked_at = now
            try:
                view = self.reader.view(newest=True)
                self._last = Followed(view.snapshot_id, partition_states(view))
            except TidewaterError as error:
                self._last = error
        found = self._last
        assert found is not None
        with self._lock:
            told = [w for w in self._waiters if w.deadline <= now or _is_news(found, w.known)]
            self._waiters = [w for w in self._waiters if w not in told]
            first = min((w.deadline for w in self._waiters), default=None)
        for waiter in told:
            waiter.answer(found)
        return None if first is None else min(first, self._looked_at + self._poll_s)


def _is_news(found: Followed | TidewaterError, known: int | None) -> bool:
    return isinstance(found, Followed) and found.snapshot_id != known
