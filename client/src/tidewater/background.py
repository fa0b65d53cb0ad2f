"""An event loop in a thread of its own, for blocking programs that want work done meanwhile."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads. The thread ends with `close`, or with the program."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.loop = asyncio.new_event_loop()
        # A daemon: a program that forgets to close must still be able to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # Once more round: connections that were aborted last are closed then.
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine there and wait for what it returns; interrupted, it is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread; call it once everything there is done."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def cancelled(*tasks: "asyncio.Task[None]") -> None:
    """End tasks, also when whoever wants that is ended itself meanwhile.

    What they raised was looked at by whoever waited for them.
    """
    for task in tasks:
        task.cancel()
    interrupted = False
    left = set(tasks)
    while left:
        try:
            _, left = await asyncio.wait(left)
        except asyncio.CancelledError:
            interrupted = True
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if interrupted:
        raise asyncio.CancelledError
