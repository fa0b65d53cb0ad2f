"""Memory given back: what a subscription has read ahead is dropped when nobody pulls for a while.

It also ends streams from the table, which pin a snapshot. One task for all, and none while there
is nothing to drop.
"""

import asyncio
from typing import Final

from tidewater_core.clock import Clock
from tidewater_worker.dispatch.part import Part

IDLE_S: Final = 30.0
LOOK_S: Final = 10.0


class Idle:
    """Closes the windows of partitions that are not pulled from any more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parts: set[Part] = set()
        self._task: asyncio.Task[None] | None = None

    def used(self, part: Part) -> None:
        """Note that somebody pulls from a partition."""
        part.used_at = self._clock.monotonic()
        self._parts.add(part)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._parts:
                await asyncio.sleep(LOOK_S)
                await self.sweep(self._clock.monotonic() - IDLE_S)
        finally:
            self._task = None

    async def sweep(self, before: float) -> None:
        """Close the windows that were not used since `before`."""
        for part in [part for part in self._parts if part.used_at < before]:
            self._parts.discard(part)
            async with part.lock:
                await part.window.close()

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
