"""Where writing and fdatasync happen: in a few threads, or in the event loop if that is quicker.

A handful of threads serve every partition: a partition has at most one job at a time, and an idle
one costs nothing. Handing a job to a thread and back costs two wake-ups, on a fast disk as much as
the fdatasync itself. So a small job is done in the loop, if nothing else is under way and the disk
has been quick; one slow fdatasync sends the jobs after it to the threads until all is quick again.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Final

THREADS: Final = 4
QUICK_S: Final = 0.0004
"""A job that took less than this may be done in the loop the next time."""
SLOW_SHARE: Final = 0.1
"""Weight of the newest job in the moving average that decides."""

Job = Callable[[], None]
Done = Callable[[Exception | None], None]
log = logging.getLogger(__name__)


class SyncPool:
    """Runs jobs and tells the event loop when they are done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int = THREADS) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._under_way = 0
        self._average_s = QUICK_S
        self._threads = [
            threading.Thread(target=self._run, name=f"sync-{i}", daemon=True)
            for i in range(threads)
        ]
        self._aside: SimpleQueue[Job | None] = SimpleQueue()
        self._threads.append(
            threading.Thread(target=self._run_aside, name="sync-aside", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done, *, is_small: bool = False) -> None:
        """Run `job`, then `done` in the loop with the job's error, if any."""
        if is_small and self._under_way == 0 and self._average_s < QUICK_S:
            began = monotonic()
            error = _attempt(job)
            self._note(monotonic() - began)
            done(error)
            return
        self._under_way += 1
        self._jobs.put((job, done))

    def aside(self, job: Job) -> None:
        """Run what nobody waits for, in a thread of its own: it delays no other job."""
        self._aside.put(job)

    def close(self) -> None:
        """Let the threads finish what is queued and end."""
        for _ in self._threads:
            self._jobs.put(None)
        self._aside.put(None)
        for thread in self._threads:
            thread.join()

    def _note(self, seconds: float) -> None:
        # One slow job counts at once, quick ones win trust back slowly.
        if seconds > 4 * QUICK_S:
            self._average_s = seconds
        else:
            self._average_s += (seconds - self._average_s) * SLOW_SHARE

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            began = monotonic()
            error = _attempt(job)
            self._loop.call_soon_threadsafe(self._report, done, error, monotonic() - began)

    def _run_aside(self) -> None:
        while (job := self._aside.get()) is not None:
            _attempt(job)

    def _report(self, done: Done, error: Exception | None, seconds: float) -> None:
        self._under_way -= 1
        self._note(seconds)
        done(error)


def _attempt(job: Job) -> Exception | None:
    try:
        job()
    except OSError as error:
        return error
    except Exception as error:  # a fault of ours: a thread that ends by it would serve nobody more
        log.exception("a job of the log failed")
        return error
    return None
