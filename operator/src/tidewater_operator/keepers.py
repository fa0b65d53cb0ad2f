"""Which namespaces are looked after, and when each gets its next pass.

Watches, the registry and the clock only *mark* a namespace; one task per namespace does its passes
one after the other. A mark that comes during a pass leads to another one.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from tidewater_core.clock import Clock
from tidewater_core.errors import TidewaterError
from tidewater_operator.cluster.lease import Leadership
from tidewater_operator.reconcile import Memory, Outcome, Reconciler
from tidewater_operator.registry import Registries
from tidewater_operator.settings import Intervals

GATHER_S: Final = 0.2
"""Marks that come together lead to one pass."""
SPACING_S: Final = 0.5
PASS_S_MAX: Final = 120.0
PASSES_MAX: Final = 8
"""Passes at the same time, over all namespaces."""
BACKOFF_S_MAX: Final = 10.0
SILENCE_S: Final = 2.0
"""A worker that gave no answer is asked again after this."""
WATCH_S: Final = 30.0
log = logging.getLogger(__name__)


class Counters:
    """What passes did, for /metrics."""

    def __init__(self) -> None:
        self.passes = 0
        self.failures = 0
        self.seconds = 0.0


class Keeper:
    """Looks after one namespace."""

    def __init__(self, name: str, keepers: "Keepers") -> None:
        self.name = name
        self.began_at: float | None = None
        """Of the pass that is under way."""
        self._keepers = keepers
        self._wake = asyncio.Event()
        self._full = True
        self._term = ""
        """Of the last pass: another operator may have led since."""
        self._memory = Memory()

    def mark(self, *, full: bool) -> None:
        """Ask for a pass; a full one looks at all objects."""
        self._full = self._full or full
        self._wake.set()

    def hear(self, topic: Mapping[str, Any], *, gone: bool) -> None:
        """Remember what a Topic says, until it can be registered."""
        self._memory.last_words.hear(topic, gone=gone)

    async def run(self) -> None:
        """Do passes until the namespace needs none."""
        while True:
            watch = asyncio.create_task(self._watch_registry())
            try:
                await self._loop()
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch
            await self._keepers.registries.release(self.name)
            if not self._wake.is_set():  # nothing came meanwhile
                return

    async def _loop(self) -> None:
        group, backoff_s = self._keepers, 0.0
        full_at = figures_at = group.clock.monotonic()
        intervals = group.intervals
        while True:
            now = group.clock.monotonic()
            wait_s = backoff_s or min(full_at, figures_at) - now
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, 0.0)):
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_S)
            await group.leadership.gained.wait()
            if (term := group.leadership.term) != self._term:
                self._term, self._full = term, True
            now = group.clock.monotonic()
            self._wake.clear()
            full, figures = self._full or now >= full_at, now >= figures_at
            self._full = False
            try:
                async with group.slots, asyncio.timeout(PASS_S_MAX):
                    outcome = await self._pass(full=full, figures=figures)
            except (TidewaterError, TimeoutError) as error:
                backoff_s = min(max(backoff_s * 2, 1.0), BACKOFF_S_MAX)
                self._full = self._full or full
                log.warning("%s: %s; again in %.0f s", self.name, error or "too slow", backoff_s)
                continue
            except Exception:
                backoff_s = BACKOFF_S_MAX
                self._full = True
                log.exception("%s: a pass failed in a way that nobody thought of", self.name)
                continue
            backoff_s = 0.0
            now = group.clock.monotonic()
            if full:
                full_at = now + intervals.resync.seconds
            if figures:
                figures_at = now + intervals.status.seconds
            if outcome.is_busy:
                full_at = min(full_at, now + intervals.status.seconds)
            if outcome.is_silent:
                figures_at = min(figures_at, now + SILENCE_S)
            if outcome.needs_full:
                self.mark(full=True)
            if outcome.is_empty and not self._wake.is_set():
                return
            await asyncio.sleep(SPACING_S)

    async def _pass(self, *, full: bool, figures: bool) -> Outcome:
        group = self._keepers
        self.began_at = group.clock.monotonic()
        group.counters.passes += 1
        try:
            return await group.reconciler.run(self.name, self._memory, full=full, figures=figures)
        except BaseException:
            group.counters.failures += 1
            raise
        finally:
            group.counters.seconds += group.clock.monotonic() - self.began_at
            self.began_at = None

    async def _watch_registry(self) -> None:
        """Mark the namespace when a worker or a partition came or went."""
        group, version = self._keepers, 0
        while True:
            await group.leadership.gained.wait()
            try:
                found = await group.registries.changed(self.name, version, WATCH_S)
            except TidewaterError:
                await asyncio.sleep(2.0)
                continue
            if found != version:
                version = found
                self.mark(full=False)
            await asyncio.sleep(GATHER_S)


class Keepers:
    """All namespaces that are looked after."""

    def __init__(
        self,
        reconciler: Reconciler,
        registries: Registries,
        leadership: Leadership,
        clock: Clock,
        intervals: Intervals,
        is_watched: Callable[[str], bool],
    ) -> None:
        self.reconciler, self.registries, self.leadership = reconciler, registries, leadership
        self.clock, self.intervals = clock, intervals
        self.slots = asyncio.Semaphore(PASSES_MAX)
        self.counters = Counters()
        self._is_watched = is_watched
        self._tasks: dict[str, tuple[Keeper, asyncio.Task[None]]] = {}

    def mark(self, namespace: str, *, full: bool = True, known_only: bool = False) -> None:
        """Ask for a pass over a namespace; begin to look after it unless `known_only`."""
        found = self._tasks.get(namespace)
        if found is not None and not found[1].done():
            found[0].mark(full=full)
            return
        if known_only or not self._is_watched(namespace):
            return
        keeper = Keeper(namespace, self)
        task = asyncio.create_task(keeper.run(), name=f"keep {namespace}")
        self._tasks[namespace] = (keeper, task)
        task.add_done_callback(lambda _: self._ended(namespace, task))

    def hear(self, topic: Mapping[str, Any], *, gone: bool) -> None:
        """Remember what a Topic says of a namespace that is looked after."""
        found = self._tasks.get(topic["metadata"]["namespace"])
        if found is not None:
            found[0].hear(topic, gone=gone)

    def gone(self, namespace: str) -> None:
        """Look at a namespace that is gone a last time; who does not lead only lets go of it.

        Who waits to lead may wait for months, and namespaces come and go. What is registered of one
        is found by whoever leads then.
        """
        if self.leadership.gained.is_set():
            self.mark(namespace, known_only=True)
        elif (found := self._tasks.pop(namespace, None)) is not None:
            found[1].cancel()

    def _ended(self, namespace: str, task: asyncio.Task[None]) -> None:
        found = self._tasks.get(namespace)
        if found is not None and found[1] is task:
            del self._tasks[namespace]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the keeper of %s ended: %r", namespace, error)

    @property
    def names(self) -> list[str]:
        """The namespaces that are looked after."""
        return sorted(self._tasks)

    def slowest_s(self) -> float:
        """Return how long the longest pass that is under way has taken."""
        now = self.clock.monotonic()
        begun = [keeper.began_at for keeper, _ in self._tasks.values()]
        return max((now - at for at in begun if at is not None), default=0.0)

    async def close(self) -> None:
        """Stop all passes, wherever they are."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
