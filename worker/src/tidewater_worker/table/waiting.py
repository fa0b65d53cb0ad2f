"""Those who wait for a flush: told when their rows are in the table, or cannot get there.

However many wait, and however long, it takes one thread: what others ask of the table process goes
on meanwhile.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tidewater_core.clock import Clock
from tidewater_core.errors import Overloaded, TidewaterError
from tidewater_worker.ports import FlushResult
from tidewater_worker.table.flushing import flush_result, flush_timeout
from tidewater_worker.table.topic import TopicRun

WAITING_MAX: Final = 10_000
Answer = Callable[[FlushResult | TidewaterError], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    run: TopicRun
    upto: dict[int, int]
    deadline: float
    answer: Answer

    def look(self, now: float) -> FlushResult | TidewaterError | None:
        """Return what to say; None: go on waiting."""
        state = self.run.state
        try:
            found = flush_result(state, self.upto)
        except TidewaterError as error:
            return error
        if found is None and self.deadline <= now:
            return flush_timeout(state, self.upto)
        return found


class Flushes:
    """All flushes of a table process. A task of a scheduler, poked when a state has changed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []

    def wait(self, run: TopicRun, upto: dict[int, int], deadline: float, answer: Answer) -> None:
        """Have `answer` called once; the scheduler must be poked."""
        with self._lock:
            if len(self._waiters) >= WAITING_MAX:
                raise Overloaded("TooManyFlushes", f"{WAITING_MAX} flushes wait already", 1_000)
            self._waiters.append(_Waiter(run, upto, deadline, answer))

    def step(self) -> float | None:
        """Tell those for whom there is something to tell."""
        with self._lock:
            waiters = list(self._waiters)
        now = self._clock.monotonic()
        said = [(waiter, found) for waiter in waiters if (found := waiter.look(now)) is not None]
        told = {waiter for waiter, _ in said}
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters if waiter not in told]
            first = min((waiter.deadline for waiter in self._waiters), default=None)
        for waiter, found in said:
            waiter.answer(found)
        return first
