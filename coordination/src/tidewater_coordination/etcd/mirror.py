"""The registry in memory, kept true by one watch.

Reading it costs etcd nothing, and it is still there while etcd is not. Values are decoded when they
change, not when they are asked for.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

import msgspec

from tidewater_coordination import rules
from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.keys import Keys
from tidewater_coordination.port import (
    Ownership,
    RegisteredSubscription,
    RegisteredTopic,
    Registry,
    WorkerInfo,
)
from tidewater_core.errors import TidewaterError

RETRY_S: Final = 0.5
log = logging.getLogger(__name__)


class Mirror:
    """All keys below `meta`, decoded."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self.version = 0
        """The revision of the newest change that is in it."""
        self._client, self._keys = client, keys
        self._prefix = keys.meta.encode()
        self._end = wire.prefix_end(self._prefix)
        self._kinds: dict[str, Any] = {
            keys.topics: RegisteredTopic,
            keys.subscriptions: RegisteredSubscription,
            keys.assignments: dict[int, str],
            keys.workers: WorkerInfo,
            keys.all_owners: Ownership,
        }
        self._parts: dict[str, dict[str, Any]] = {kind: {} for kind in self._kinds}
        self._sessions: dict[str, str] = {}
        """Session to worker."""
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read everything, then follow the changes."""
        revision = await self._load()
        self._task = asyncio.create_task(self._follow(revision))

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _load(self) -> int:
        answer = await self._client.range(self._prefix, self._end)
        self._parts = {kind: {} for kind in self._kinds}
        self._sessions = {}
        for kv in answer.kvs:
            self._apply(wire.Event(kv, deleted=False))
        self._advance(answer.revision)
        return answer.revision

    def _advance(self, revision: int) -> None:
        self.version = max(self.version, revision)
        self._moved.set()
        self._moved = asyncio.Event()

    async def _follow(self, revision: int) -> None:
        while True:
            try:
                async for told in self._client.watch(self._prefix, self._end, revision + 1):
                    for event in told.events:
                        self._apply(event)
                    if told.events:
                        revision = told.events[-1].kv.mod_revision
                        self._advance(revision)
            except TidewaterError as error:
                log.warning("the watch on the registry ended: %s", error)
            # A server that was away may have compacted what we missed: read everything again.
            await asyncio.sleep(RETRY_S)
            with suppress(TidewaterError):
                revision = await self._load()

    def _apply(self, event: wire.Event) -> None:
        key = event.kv.key.decode()
        prefix = next((prefix for prefix in self._kinds if key.startswith(prefix)), None)
        if prefix is None:
            return
        name = key.removeprefix(prefix)
        part = self._parts[prefix]
        if prefix == self._keys.workers:
            self._sessions = {s: w for s, w in self._sessions.items() if w != name}
        if event.deleted:
            part.pop(name, None)
            return
        try:
            part[name] = msgspec.json.decode(event.kv.value, type=self._kinds[prefix])
        except msgspec.MsgspecError as error:
            log.error("etcd has something unreadable at %s: %s", key, error)
            part.pop(name, None)
            return
        if prefix == self._keys.workers:
            self._sessions[session_name(event.kv.lease)] = name

    async def reaches(self, revision: int, timeout_s: float) -> None:
        """Wait until the change of a revision is in it; past the time go on without."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.version < revision:
                    await self._moved.wait()

    async def changed(self, since: int, timeout_s: float) -> int:
        """Wait until the version is not `since`, at most `timeout_s`; return it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.version == since:
                    await self._moved.wait()
        return self.version

    def live(self) -> dict[str, WorkerInfo]:
        """Return the live workers by session."""
        workers = self._parts[self._keys.workers]
        return {session: workers[name] for session, name in self._sessions.items()}

    def registry(self) -> Registry:
        """Return everything but cursors."""
        live = self.live()
        owners: dict[str, dict[int, Ownership]] = {}
        for name, record in self._parts[self._keys.all_owners].items():
            topic, _, partition = name.rpartition("/")
            owners.setdefault(topic, {})[int(partition)] = rules.with_life(record, live)
        return Registry(
            self.version,
            dict(self._parts[self._keys.topics]),
            dict(self._parts[self._keys.subscriptions]),
            dict(self._parts[self._keys.assignments]),
            dict(self._parts[self._keys.workers]),
            owners,
        )


def session_name(lease: int) -> str:
    """Return the name of the session that a lease is."""
    return f"{lease:x}"
