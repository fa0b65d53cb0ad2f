"""What is known of the health of tables, for reports and metrics.

It is what the table process last said; it is asked anew, in the background and a few at a time,
after a table has moved on and somebody has looked.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final, Protocol

from tidewater_core.errors import TidewaterError
from tidewater_worker.topic import Topic

ASK_S: Final = 15.0
"""A table's health is asked for at most this often."""
AGAIN_S: Final = 300.0
"""That of a table with small files is asked for this often, even if this worker commits nothing:
hours close, and jobs rewrite."""
AT_ONCE: Final = 2
QUEUE_MAX: Final = 10_000
_WATCHED: Final = ("small_files", "debt_files", "delete_files", "manifests_unread")


class Asked(Protocol):
    """The table process."""

    async def stats(self, topic: str) -> dict[str, Any]:
        """Tell about a topic's table."""


class TableHealth:
    """Remembers what was said of each topic's table."""

    def __init__(self, link: Asked, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._link, self._spawn = link, spawn
        self._known: dict[str, tuple[int | None, float, dict[str, Any]]] = {}
        """topic → snapshot, when it was asked for, what was said."""
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._asked: set[str] = set()

    def of(self, topic: Topic, now: float) -> dict[str, Any]:
        """Return what is known of a topic's table, and see to it that it does not grow old."""
        name = str(topic.name)
        snapshot = topic.state.snapshot_id if topic.state else None
        known, asked_at, said = self._known.get(name, (None, -ASK_S, {}))
        pause_s = ASK_S if known != snapshot else AGAIN_S
        changes = known != snapshot or may_change(said)
        if snapshot is not None and changes and now - asked_at >= pause_s:
            self._ask(name, snapshot, now)
        return said

    def keep(self, topics: Collection[str]) -> None:
        """Forget what is not among these."""
        self._known = {name: known for name, known in self._known.items() if name in topics}

    def _ask(self, name: str, snapshot: int, now: float) -> None:
        if name in self._asked or len(self._asked) >= QUEUE_MAX:
            return
        self._asked.add(name)

        async def ask() -> None:
            try:
                async with self._asking:
                    said = await self._link.stats(name)
                self._known[name] = (snapshot, now, said)
            except TidewaterError:
                _, _, old = self._known.get(name, (None, 0.0, {}))
                self._known[name] = (None, now, old)
            finally:
                self._asked.discard(name)

        self._spawn(ask())


def may_change(health: Mapping[str, Any]) -> bool:
    """Say if a table's health may become another without a commit of ours: by time, or by a job."""
    return any(health.get(name) for name in _WATCHED)
