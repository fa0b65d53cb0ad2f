"""The worker's edge: which topics it serves, and everything that happens to them over time.

registry ──▶ sync_topics ──▶ open partitions ──▶ serve
every second: registry changes, free disk · every few: segments that may go · often: durable ends
"""

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from tidewater_core.clock import Clock
from tidewater_core.crd.change import topic_change_problems
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Fenced, NotFound, Overloaded, Retryable, TidewaterError
from tidewater_core.names import TopicName, log_path
from tidewater_core.settings import WorkerSettings
from tidewater_worker.coordination.port import (
    Coordination,
    RegisteredTopic,
    Registry,
    WorkerInfo,
)
from tidewater_worker.link.client import TableLink
from tidewater_worker.log.appender import Appender, LogOptions
from tidewater_worker.log.deleter import Retention, plan_deletions, remove_segment
from tidewater_worker.log.recover import Recovered, recover
from tidewater_worker.log.syncpool import SyncPool
from tidewater_worker.partition import DirectoryLock, Partition
from tidewater_worker.ports import TopicAssignment, TopicState
from tidewater_worker.topic import Topic

TICK_S: Final = 1.0
DURABLE_NOTICE_S: Final = 0.05
DELETER_TICKS: Final = 5
DISK_RETRY_MS: Final = 1_000
log = logging.getLogger(__name__)


class Node:
    """Everything that the edge process serves."""

    def __init__(self, settings: WorkerSettings, coordination: Coordination, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.topics: dict[str, Topic] = {}
        self.inflight_bytes = 0
        """Bytes of produce requests that are being received or wait for the log."""
        self.is_draining = False
        self.disk_is_low = False
        self.link = TableLink(settings.run_dir / "table.sock", self._assignments, self._on_state)
        self._coordination = coordination
        self._registry = Registry()
        self._registry_version = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._dirty: dict[str, dict[int, int]] = {}
        self._dirty_timer: asyncio.TimerHandle | None = None
        self._frontier_waiters: dict[str, set[asyncio.Event]] = {}

    # ---- life cycle

    async def start(self) -> None:
        """Open every registered topic and begin to watch over them."""
        self._loop = asyncio.get_running_loop()
        self._pool = SyncPool(self._loop)
        self.settings.log_root.mkdir(parents=True, exist_ok=True)
        self._check_disk()
        await self._coordination.start(WorkerInfo(self.settings.worker_id))
        await self._sync_topics()
        self.link.start()
        self.spawn(self._watch())

    async def stop(self) -> None:
        """Refuse new messages, finish the ones taken, and say the last durable ends."""
        self.is_draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        partitions = [p for topic in self.topics.values() for p in topic.partitions.values()]
        await asyncio.gather(*(partition.close() for partition in partitions))
        self.tell_durable()
        await asyncio.sleep(0)
        await self.link.close()
        self._pool.close()
        await self._coordination.close()

    def spawn(self, work: Any) -> None:
        """Run a coroutine in the background until the node stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(TICK_S)
            tick += 1
            try:
                self._check_disk()
                await self._sync_topics()
                if tick % DELETER_TICKS == 0:
                    await self._delete_segments()
            except (OSError, TidewaterError):
                log.exception("a round of the watch failed; the next one tries again")

    # ---- topics

    def topic(self, namespace: str, name: str) -> Topic:
        """Return a topic, or raise that there is none."""
        found = self.topics.get(f"{namespace}/{name}")
        if found is None:
            raise NotFound("UnknownTopic", f"there is no topic {namespace}/{name}")
        return found

    async def _sync_topics(self) -> None:
        registry = await self._coordination.registry()
        if registry.version == self._registry_version:
            return
        self._registry = registry
        for registered in registry.topics.values():
            try:
                await self._sync_topic(registered)
            except TidewaterError as error:
                # One bad topic never stands in the way of another.
                log.warning("topic %s: %s", registered.topic, error)
        self._registry_version = registry.version
        self.link.assign()

    async def _sync_topic(self, registered: RegisteredTopic) -> None:
        spec = TopicSpec.from_json(registered.spec)
        topic = self.topics.get(registered.topic)
        if topic is None:
            topic = Topic(
                TopicName.parse(registered.topic), UUID(registered.uuid), spec, registered.spec, {}
            )
            self.topics[registered.topic] = topic
        elif topic.spec_json == registered.spec:
            return
        elif problems := topic_change_problems(topic.spec, spec):
            log.error("topic %s keeps its spec: %s", registered.topic, "; ".join(problems))
            return
        else:
            topic.spec, topic.spec_json = spec, registered.spec
            for partition in topic.partitions.values():
                if partition.appender is not None:
                    partition.appender.change(self._options(spec))
        for number in range(len(topic.partitions), spec.partitions):
            await self._open(topic, number)

    def _options(self, spec: TopicSpec) -> LogOptions:
        limits = self.settings.limits
        return LogOptions.of(
            spec, limits.partition_inflight_bytes_max.bytes, limits.group_bytes_max.bytes
        )

    async def _open(self, topic: Topic, number: int) -> None:
        directory = log_path(self.settings.log_root, topic.name, number)
        partition = Partition(str(topic.name), number, directory)
        topic.partitions[number] = partition
        try:
            partition.lock = DirectoryLock(directory)
            recovered = await asyncio.to_thread(recover, directory, topic.uuid, number)
            self._refuse_stale(str(topic.name), number, recovered)
            partition.epoch = (await self._coordination.acquire(str(topic.name), number)).epoch
        except TidewaterError as error:
            log.warning("%s partition %s stays closed: %s", topic.name, number, error)
            partition.refusal = error
            return
        if recovered.cut_bytes:
            log.warning(
                "%s partition %s: cut a torn tail of %s bytes (kept as .broken)",
                topic.name, number, recovered.cut_bytes,
            )  # fmt: skip
        partition.appender = Appender(
            directory, topic.uuid, number, self._options(topic.spec), recovered, self._pool,
            self._loop, self.clock, lambda end: self._on_durable(str(topic.name), number, end),
        )  # fmt: skip
        self.spawn(partition.open_when_known())

    def _refuse_stale(self, topic: str, number: int, recovered: Recovered) -> None:
        """Refuse to go on with messages of a partition that another worker has taken since (G5).

        That worker may have given their offsets to other messages. Nobody can tell which of them
        count, so a person must.
        """
        owner = self._registry.owners.get(topic, {}).get(number)
        if recovered.segments and owner is not None and owner.worker_id != self.settings.worker_id:
            raise Fenced(
                "LogStale",
                f"worker {owner.worker_id!r} has taken this partition since; the messages in "
                f"this log from offset {recovered.segments[0].base_offset} to "
                f"{recovered.next_offset} were kept",
            )

    # ---- between the two processes

    def _assignments(self) -> list[TopicAssignment]:
        return [topic.assignment() for topic in self.topics.values()]

    def _on_durable(self, topic: str, partition: int, end: int) -> None:
        self._dirty.setdefault(topic, {})[partition] = end
        if self._dirty_timer is None:
            self._dirty_timer = self._loop.call_later(DURABLE_NOTICE_S, self.tell_durable)

    def tell_durable(self) -> None:
        """Tell the table process now what became durable since the last time."""
        self._dirty_timer = None
        dirty, self._dirty = self._dirty, {}
        if dirty:
            self.link.durable(dirty)

    def _on_state(self, state: TopicState) -> None:
        topic = self.topics.get(state.topic)
        if topic is not None:
            topic.note(state)
        for waiter in self._frontier_waiters.get(state.topic, ()):
            waiter.set()

    async def wait_committed(self, topic: Topic, upto: dict[int, int], timeout_s: float) -> None:
        """Wait until the table has all offsets below `upto`, partition by partition."""
        name = str(topic.name)
        waiter = asyncio.Event()
        self._frontier_waiters.setdefault(name, set()).add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                while any(topic.partitions[p].table.next < end for p, end in upto.items()):
                    waiter.clear()
                    await waiter.wait()
        except TimeoutError:
            raise Retryable(
                "NotInTableYet",
                f"the messages are in the log, but not in the table after {timeout_s:.0f} s", 1_000,
            ) from None  # fmt: skip
        finally:
            self._frontier_waiters[name].discard(waiter)

    # ---- limits

    def admit(self) -> None:
        """Raise if no message can be taken at all now."""
        if self.is_draining:
            raise Retryable("ShuttingDown", "this worker is shutting down", 500)
        if self.disk_is_low:
            raise Retryable(
                "LogDiskFull",
                f"less than {self.settings.limits.disk_reserve_bytes} is free on the log's disk",
                DISK_RETRY_MS,
            )
        if self.inflight_bytes > self.settings.limits.inflight_bytes_max:
            raise Overloaded("WorkerBusy", "too many bytes wait for the log", 100)

    def _check_disk(self) -> None:
        free = os.statvfs(self.settings.log_root)
        was_low = self.disk_is_low
        self.disk_is_low = free.f_bavail * free.f_frsize < self.settings.limits.disk_reserve_bytes
        if self.disk_is_low != was_low:
            log.warning("the log's disk is %s", "low" if self.disk_is_low else "no longer low")
        for topic in self.topics.values():
            for partition in topic.partitions.values():
                partition.note_backlog(self.settings.limits.log_bytes_max)

    async def _delete_segments(self) -> None:
        for topic in self.topics.values():
            keep = topic.spec.log.retention
            retention = Retention(keep.time.ms * 1000, keep.size.bytes)
            for partition in topic.partitions.values():
                appender = partition.appender
                if appender is None or not partition.is_open:
                    continue
                doomed = plan_deletions(
                    appender.segments, partition.table.next, retention, self.clock.now_us()
                )
                for segment in doomed:
                    # Out of the list first: a reader that looks now goes to the table.
                    appender.segments.remove(segment)
                    with suppress(OSError):
                        await asyncio.to_thread(
                            remove_segment, partition.directory, segment.base_offset
                        )
