"""One job at a time on a table: a lease in the coordination store, held while the job runs.

The operator never starts two jobs for a topic; a person may start one beside its, or two. Nothing
would be lost by that, as every commit is checked, but two rewrites of the same files cost twice and
one of them fails. The lease ends with the process that holds it, however that ends.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Final

from tidewater_coordination.port import SESSION_TTL_S, Coordination, WorkerInfo
from tidewater_core.clock import SystemIds
from tidewater_core.errors import Overloaded, Retryable, TidewaterError
from tidewater_pipeline.places import StoreSettings
from tidewater_pipeline.report import Progress
from tidewater_pipeline.subscribers import open_store

WAIT_S: Final = 1.5 * SESSION_TTL_S
"""Long enough for the lease of a job that was killed to run out."""
POLL_S: Final = 0.5
START_S_MAX: Final = 60.0
STOP_S_MAX: Final = 5.0


@contextmanager
def turn(
    settings: StoreSettings | None,
    topic: str,
    job: str,
    progress: Progress,
    wait_s: float = WAIT_S,
    lease: str | None = None,
) -> Iterator[None]:
    """Be the only one at work on a topic's table; raise Overloaded if another one stays at it.

    With `lease`, the only one that has this instead of the table.
    """
    if settings is None:
        yield  # nobody to ask: whoever gave no store says by it that there is nobody else
        return
    holding = _Holding(settings, topic, job, progress, wait_s, lease or lease_name(topic))
    holding.start()
    try:
        yield
    finally:
        holding.end()


def lease_name(topic: str) -> str:
    """Name the lease on a topic's table."""
    return f"upkeep/{topic}"


class _Holding:
    """A thread with the session that has the lease: Spark has the main thread for minutes."""

    def __init__(
        self,
        settings: StoreSettings,
        topic: str,
        job: str,
        progress: Progress,
        wait_s: float,
        lease: str,
    ) -> None:
        self._settings, self._topic, self._progress = settings, topic, progress
        self._lease = lease
        self._what = f"the table of {topic}" if lease == lease_name(topic) else lease
        self._wait_s = wait_s
        # The uuid because containers of one host may have its name, and all of them the same pid.
        number = SystemIds().uuid().hex[:8]
        name = f"{job}-{socket.gethostname()}-{os.getpid()}-{number}"
        self._me = WorkerInfo(name, is_job=True)
        self._has_turn: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"turn-{topic}", daemon=True)

    def start(self) -> None:
        """Return when it is our turn, or raise why it is not."""
        self._thread.start()
        try:
            self._has_turn.result(START_S_MAX + self._wait_s)
        except TimeoutError:
            self.end()
            raise Retryable("StoreAway", "the coordination store does not answer") from None
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Give the turn back."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._hold())
        except BaseException as error:
            if self._has_turn.done():
                raise
            self._has_turn.set_exception(error)
        finally:
            self._loop.close()

    async def _hold(self) -> None:
        store = open_store(self._settings)
        try:
            await store.start(self._me)
            await self._take(store)
            self._has_turn.set_result(None)
            while not self._over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), SESSION_TTL_S / 2)
                await self._keep(store)
            with suppress(TidewaterError):  # it ends with the session
                await store.drop_lease(self._lease)
        finally:
            await store.close()

    async def _take(self, store: Coordination) -> None:
        deadline = time.monotonic() + self._wait_s
        told = False
        while not await store.take_lease(self._lease):
            holder = await store.lease_holder(self._lease) or "nobody we know"
            if time.monotonic() >= deadline:
                raise Overloaded(
                    "TableBusy",
                    f"{holder} is at work on {self._what}: try again when it is done",
                    10_000,
                )
            if not told:
                told = True
                self._progress.say(f"{self._topic}: waiting for {holder}, which has {self._what}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), POLL_S)
                raise Retryable("Stopped", "it was told to end while it waited for its turn")

    async def _keep(self, store: Coordination) -> None:
        """Take it again if the session was lost meanwhile: there is a new one by now."""
        with suppress(TidewaterError):
            if self._over.is_set() or await store.take_lease(self._lease):
                return
            holder = await store.lease_holder(self._lease)
            if holder is not None:
                self._progress.say(
                    f"{self._topic}: {holder} has taken {self._what}, as the store had lost sight "
                    "of this job; going on, as commits are checked"
                )
