"""The threads that write and fdatasync, away from the event loop.

A handful serve every partition: a partition has at most one job at a time, and an idle one costs
nothing. A job runs no Python worth mentioning between its system calls.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

THREADS: Final = 4

Job = Callable[[], None]
Done = Callable[[OSError | None], None]


class SyncPool:
    """Runs jobs in threads and tells the event loop when they are done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int = THREADS) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"sync-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Run `job` in a thread, then `done` in the loop with its operating-system error, if any."""
        self._jobs.put((job, done))

    def close(self) -> None:
        """Let the threads finish what is queued and end."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            error = None
            try:
                job()
            except OSError as failed:
                error = failed
            self._loop.call_soon_threadsafe(done, error)
