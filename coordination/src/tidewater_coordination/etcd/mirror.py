"""The registry in memory, kept true by one watch.

Reading it costs etcd nothing, and it is still there while etcd is not. Values are decoded when they
change, not when they are asked for.
"""

import asyncio
import logging
from contextlib import aclosing, suppress
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
        """The revision of the newest change that is in it. It falls when etcd was restored."""
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
        self._unreadable: set[str] = set()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Read everything, then follow the changes."""
        self._closed = False
        revision = await self._load()
        self._task = asyncio.create_task(self._follow(revision))

    async def ask(self) -> Registry:
        """Return the registry as etcd's majority has it now, whatever the watch has told."""
        now = Mirror(self._client, self._keys)
        await now._load()
        return now.registry()

    async def close(self) -> None:
        """Stop following. Whoever waits for a change goes on: there will be none."""
        self._closed = True
        self._moved.set()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _load(self) -> int:
        answer = await self._client.range(self._prefix, self._end)
        before = self._parts, self._sessions, self._unreadable
        self._parts = {kind: {} for kind in self._kinds}
        self._sessions, self._unreadable = {}, set()
        try:
            for kv in answer.kvs:
                self._apply(wire.Event(kv, deleted=False))
        except BaseException:
            self._parts, self._sessions, self._unreadable = before  # half of it would be a lie
            raise
        self._move(answer.revision)
        return answer.revision

    def _move(self, revision: int) -> None:
        """Let those who wait see another version.

        Also a lower one: etcd that was restored, or begun anew, counts from where that left off,
        and whoever waited for a higher number would hear of nothing until it is passed.
        """
        self.version = revision
        self._moved.set()
        self._moved = asyncio.Event()

    async def _follow(self, revision: int) -> None:
        is_read = True
        while True:
            try:
                if not is_read:
                    revision, is_read = await self._load(), True
                await self._take(revision)
            except TidewaterError as error:
                log.warning("the watch on the registry ended: %s", error)
            except Exception:
                # Whatever it is, a registry that nobody keeps true any more is worse.
                log.exception("the watch on the registry ended")
            # A server that was away may have compacted what we missed, or be a restored one, whose
            # watch would wait for a revision far ahead: read everything again before watching.
            is_read = False
            await asyncio.sleep(RETRY_S)

    async def _take(self, revision: int) -> None:
        """Take in what happens after a revision, until the watch ends."""
        async with aclosing(self._client.watch(self._prefix, self._end, revision + 1)) as watch:
            async for told in watch:
                for event in told.events:
                    self._apply(event)
                if told.events:
                    self._move(told.events[-1].kv.mod_revision)

    def _apply(self, event: wire.Event) -> None:
        key = event.kv.key.decode()
        prefix = next((prefix for prefix in self._kinds if key.startswith(prefix)), None)
        if prefix is None:
            return
        name = key.removeprefix(prefix)
        part = self._parts[prefix]
        if prefix == self._keys.workers:
            self._sessions = {s: w for s, w in self._sessions.items() if w != name}
        part.pop(name, None)
        self._unreadable.discard(key.removeprefix(self._keys.meta))
        if event.deleted:
            return
        try:
            part[name] = msgspec.json.decode(event.kv.value, type=self._kinds[prefix])
        except msgspec.MsgspecError as error:
            log.error("etcd has something unreadable at %s: %s", key, error)
            self._unreadable.add(key.removeprefix(self._keys.meta))
            return
        if prefix == self._keys.workers:
            self._sessions[session_name(event.kv.lease)] = name

    async def reaches(self, revision: int, timeout_s: float) -> None:
        """Wait until the change of a revision is in it; past the time go on without."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.version < revision and not self._closed:
                    await self._moved.wait()

    async def changed(self, since: int, timeout_s: float) -> int:
        """Wait until the version is not `since`, at most `timeout_s`; return it.

        When it is closed meanwhile the version is returned as it is: nothing will change it.
        """
        if self._closed:  # a moment, or whoever asks again and again would let nobody else run
            await asyncio.sleep(min(RETRY_S, timeout_s))
            return self.version
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.version == since and not self._closed:
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
            owner = rules.standing(rules.with_life(record, live))
            owners.setdefault(topic, {})[int(partition)] = owner
        return Registry(
            self.version,
            dict(self._parts[self._keys.topics]),
            dict(self._parts[self._keys.subscriptions]),
            dict(self._parts[self._keys.assignments]),
            dict(self._parts[self._keys.workers]),
            owners,
            tuple(sorted(self._unreadable)),
        )


def session_name(lease: int) -> str:
    """Return the name of the session that a lease is."""
    return f"{lease:x}"
