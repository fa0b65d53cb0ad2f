"""A few threads that run many topics: each when it is due, none while it is idle."""

import heapq
import itertools
import logging
import threading
from typing import Final, Protocol
from weakref import WeakSet

from tidewater_core.clock import Clock

log = logging.getLogger(__name__)

FAILURE_PAUSE_S: Final = 5.0
"""Pause of a task whose step raised what it should have handled."""


class Task(Protocol):
    """Something that has work to do now and then."""

    def step(self) -> float | None:
        """Work; return the monotonic time at which to be called again, None to wait for a poke."""


class Scheduler:
    """Runs tasks on a fixed number of threads; one task never runs on two at once."""

    def __init__(self, threads: int, clock: Clock, name: str) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._due: dict[Task, float] = {}
        self._heap: list[tuple[float, int, Task]] = []
        self._order = itertools.count()
        self._running: set[Task] = set()
        self._poked: set[Task] = set()
        self._forgotten: WeakSet[Task] = WeakSet()
        """They run no more, whoever pokes them: an answer may come that was asked for before."""
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def poke(self, task: Task, at: float | None = None) -> None:
        """Run a task now, or at a time if it is not due earlier."""
        with self._condition:
            if task in self._forgotten:
                return
            if task in self._running and at is None:
                self._poked.add(task)
                return
            self._schedule(task, self._clock.monotonic() if at is None else at)

    def _schedule(self, task: Task, at: float) -> None:
        if at < self._due.get(task, float("inf")):
            self._due[task] = at
            heapq.heappush(self._heap, (at, next(self._order), task))
            self._condition.notify()

    def forget(self, task: Task) -> None:
        """Never run a task again (a running step still ends)."""
        with self._condition:
            self._due.pop(task, None)
            self._poked.discard(task)
            self._forgotten.add(task)

    def stop(self, timeout_s: float) -> bool:
        """Stop all threads after their current step; say if they have ended in time."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        deadline = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _take(self) -> Task | None:
        """Wait for the next task that is due; None when stopped."""
        with self._condition:
            while not self._stopped:
                timeout: float | None = None
                while self._heap:
                    at, _, task = self._heap[0]
                    if self._due.get(task) != at or task in self._running:
                        heapq.heappop(self._heap)
                        if self._due.get(task) == at:
                            # It runs now; what it returns decides when it runs next.
                            del self._due[task]
                            self._poked.add(task)
                        continue
                    timeout = at - self._clock.monotonic()
                    if timeout > 0:
                        break
                    heapq.heappop(self._heap)
                    del self._due[task]
                    self._running.add(task)
                    return task
                self._condition.wait(timeout if timeout is not None and self._heap else None)
            return None

    def _work(self) -> None:
        while (task := self._take()) is not None:
            try:
                again = task.step()
            except Exception:
                log.exception("a step failed that should have handled its errors task=%s", task)
                again = self._clock.monotonic() + FAILURE_PAUSE_S
            with self._condition:
                self._running.discard(task)
                if task in self._forgotten:
                    continue
                if task in self._poked:
                    self._poked.discard(task)
                    again = self._clock.monotonic()
                if again is not None:
                    self._schedule(task, again)
