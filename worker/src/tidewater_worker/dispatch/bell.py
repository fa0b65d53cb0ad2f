"""Waking up consumers when a topic has news: one wait per partition, however many listen.

While nobody listens nothing waits: an idle subscription costs nothing.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tidewater_worker.log.appender import Appender
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic

WAIT_S: Final = 30.0
"""How long a wait goes on at most after its last listener left."""


class Bell:
    """Rings the listeners of a topic when its log or table goes on."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self._watched: dict[Appender, asyncio.Task[None]] = {}

    @contextmanager
    def listen(self, topic: Topic, woken: asyncio.Event) -> Iterator[None]:
        """Set `woken` whenever a partition of the topic goes on, from now on."""
        name = str(topic.name)
        listeners = self._listeners.setdefault(name, set())
        listeners.add(woken)
        try:
            yield
        finally:
            listeners.discard(woken)
            if not listeners and self._listeners.get(name) is listeners:
                del self._listeners[name]

    def watch(self, topic: Topic) -> None:
        """See that every partition that is here now is waited for; before looking at them."""
        for partition in topic.partitions.values():
            appender = partition.appender
            if appender is not None and appender not in self._watched:
                watch = self._watch(str(topic.name), partition, appender, appender.end)
                self._watched[appender] = asyncio.create_task(watch)

    def ring(self, topic: str) -> None:
        """Wake the listeners of a topic."""
        for woken in self._listeners.get(topic, ()):
            woken.set()

    async def _watch(self, topic: str, partition: Partition, appender: Appender, seen: int) -> None:
        try:
            while topic in self._listeners and partition.appender is appender:
                if await appender.wait_past(seen, WAIT_S):
                    seen = appender.end
                    self.ring(topic)
        finally:
            self._watched.pop(appender, None)

    async def close(self) -> None:
        """Stop waiting."""
        tasks = list(self._watched.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
