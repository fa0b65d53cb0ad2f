"""The worker's edge: which topics it serves, and everything that happens to them over time.

registry ──▶ `cluster.owning`: open, drain, let go ──▶ serve
every second: free disk · every few: segments that may go · often: durable ends
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar
from uuid import UUID

from pydantic import ValidationError

from tidewater_coordination.port import Coordination, RegisteredTopic
from tidewater_core.clock import Clock, IdSource, SystemIds
from tidewater_core.crd.change import topic_change_problems
from tidewater_core.crd.explain import problems
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, NotFound, Overloaded, Retryable, TidewaterError
from tidewater_core.names import TopicName, log_path
from tidewater_core.settings import WorkerSettings
from tidewater_worker.cluster.committing import Committing
from tidewater_worker.cluster.forwarding import Forwarding
from tidewater_worker.cluster.owning import Owning
from tidewater_worker.link.client import TableLink
from tidewater_worker.log.appender import Appender, LogOptions
from tidewater_worker.log.deleter import (
    CACHED_BYTES,
    Retention,
    cool_segment,
    plan_cooling,
    plan_deletions,
    remove_segment,
)
from tidewater_worker.log.reader import segment_name
from tidewater_worker.log.recover import Recovered
from tidewater_worker.log.syncpool import SyncPool
from tidewater_worker.log.tail import TailRoom
from tidewater_worker.partition import Partition
from tidewater_worker.ports import TopicAssignment, TopicState
from tidewater_worker.table_health import TableHealth
from tidewater_worker.topic import Topic

TICK_S: Final = 1.0
DURABLE_NOTICE_S: Final = 0.05
DELETER_TICKS: Final = 5
DISK_RETRY_MS: Final = 1_000
BUSY_RETRY_MS: Final = 100
SMALL_BODY_BYTES: Final = 64 * 1024
"""So much of any body is taken; it is refused, if at all, when it is whole."""
T = TypeVar("T")
log = logging.getLogger(__name__)


def uuid_of(registered: RegisteredTopic) -> UUID:
    """Return a topic's uuid, or raise that it is none."""
    try:
        return UUID(registered.uuid)
    except ValueError as error:
        raise Invalid("InvalidUuid", f"topic {registered.topic} has no uuid: {error}") from error


def spec_of(registered: RegisteredTopic) -> TopicSpec:
    """Return a topic's spec, or raise that it cannot be read."""
    try:
        return TopicSpec.from_json(registered.spec)
    except ValidationError as error:
        said = "; ".join(problems(error, TopicSpec))
        raise Invalid("InvalidSpec", f"this worker cannot read the spec: {said}") from error


class Node:
    """Everything that the edge process serves."""

    def __init__(
        self,
        settings: WorkerSettings,
        coordination: Coordination,
        clock: Clock,
        ids: IdSource | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.ids = ids or SystemIds()
        self.topics: dict[str, Topic] = {}
        self.inflight_bytes = 0
        """Bytes of requests that are being received or wait for the log."""
        limits = settings.limits
        self._large_bytes_max = max(
            limits.request_bytes_max.bytes, limits.inflight_bytes_max.bytes * 7 // 8
        )
        """Bytes in flight past which no large body goes on. The rest is left to small ones, which
        must not wait for those who are slow; and a largest one finds room if it is alone."""
        self._tail_room = TailRoom(limits.tails_bytes_max.bytes)
        self.is_draining = False
        self.review_counts: dict[str, int] = {}
        """What the API server said about tokens and permissions; empty: it is not asked."""
        self.is_started = False
        """What was this worker's when it started was open once, or waits for a person."""
        self.started_at = clock.monotonic()
        self.disk_is_low = False
        self.disk_free_bytes = 0
        self.link = TableLink(settings.run_dir / "table.sock", self._assignments, self._on_state)
        self.table_health = TableHealth(self.link, self.spawn)
        self.owning = Owning(self, coordination, self.ids)
        self.forwarding = Forwarding(settings.worker_id, self.spawn)
        self.committing = Committing(self, coordination)
        self.topics_changed = False
        """Whether the table process has to hear of another topic or spec."""
        self._coordination = coordination
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dirty: dict[str, dict[int, int]] = {}
        self._dirty_timer: asyncio.TimerHandle | None = None
        self._frontier_waiters: dict[str, set[asyncio.Event]] = {}
        self.subscriptions: Callable[[], list[dict[str, Any]]] = list
        """What the subscriptions of this worker's partitions tell; `dispatch` says how."""
        self.refused_subscriptions: Mapping[str, TidewaterError] = {}
        """Those whose registered spec is not served, and why; `dispatch` knows."""
        self.state_listeners: list[Callable[[str], None]] = []
        """Called with a topic's name when the table process has said something about it."""

    # ---- life cycle

    async def start(self, url: str = "", flight_url: str = "") -> None:
        """Join the other workers, open what is ours and begin to watch over it."""
        self._loop = asyncio.get_running_loop()
        self._pool = SyncPool(self._loop)
        self.settings.log_root.mkdir(parents=True, exist_ok=True)
        self._check_disk()
        self.link.start()
        await self.owning.start(url, flight_url)
        self.spawn(self.owning.watch())
        self.spawn(self.committing.watch())
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
        await self.forwarding.close()
        self._pool.close()
        await self._coordination.close()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in the background until the node stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(TICK_S)
            tick += 1
            try:
                self._check_disk()
                await self._cool_segments()
                if tick % DELETER_TICKS == 0:
                    await self._delete_segments()
            except Exception:  # whatever it was: without a watch no disk is ever full again
                log.exception("a round of the watch failed; the next one tries again")

    # ---- topics

    def topic(self, namespace: str, name: str) -> Topic:
        """Return a topic, or raise that there is none."""
        found = self.topics.get(f"{namespace}/{name}")
        if found is None:
            raise NotFound("UnknownTopic", f"there is no topic {namespace}/{name}")
        return found

    def sync_topic(self, registered: RegisteredTopic) -> Topic:
        """Bring a topic to what the registry says; its partitions are `owning`'s.

        One that is served goes on with the spec that it has where it cannot have the new one.
        """
        topic = self.topics.get(registered.topic)
        if topic is not None:
            topic.phase = registered.phase
            if topic.spec_json == registered.spec:
                topic.refused = None
                return topic
        if topic is None:
            spec = spec_of(registered)
            topic = Topic(
                TopicName.parse(registered.topic), uuid_of(registered), spec, registered.spec, {},
                registered.phase,
            )  # fmt: skip
            self.topics[registered.topic] = topic
        else:
            try:
                spec = spec_of(registered)
                if found := topic_change_problems(topic.spec, spec):
                    raise Invalid("InvalidChange", "; ".join(found))
            except Invalid as error:
                if topic.refused is None:
                    log.error("topic %s keeps its spec: %s", registered.topic, error)
                topic.refused = error
                return topic
            topic.spec, topic.spec_json, topic.refused = spec, registered.spec, None
            for partition in topic.partitions.values():
                if partition.appender is not None:
                    partition.appender.change(self._options(spec))
        self.topics_changed = True
        for number in range(len(topic.partitions), spec.partitions):
            directory = log_path(self.settings.log_root, topic.name, number)
            topic.partitions[number] = Partition(registered.topic, number, directory)
        return topic

    def remove_topic(self, topic: Topic) -> None:
        """Serve a topic no longer; its partitions are `leaving`'s to close."""
        name = str(topic.name)
        self.topics.pop(name, None)
        self._dirty.pop(name, None)
        self.forwarding.forget(name)
        for waiter in self._frontier_waiters.pop(name, ()):
            waiter.set()
        self.topics_changed = True

    def _options(self, spec: TopicSpec) -> LogOptions:
        limits = self.settings.limits
        return LogOptions.of(
            spec, limits.partition_inflight_bytes_max.bytes, limits.group_bytes_max.bytes
        )

    def make_appender(self, topic: Topic, partition: Partition, recovered: Recovered) -> Appender:
        """Make the writer of a partition's recovered log."""
        recovered.producers.keep(self.settings.limits.producers_max)
        name, number = partition.topic, partition.number
        return Appender(
            partition.directory, topic.uuid, number, self._options(topic.spec), recovered,
            self._pool, self._loop, self.clock, lambda end: self._on_durable(name, number, end),
            self._tail_room,
        )  # fmt: skip

    # ---- between the two processes

    def _assignments(self) -> list[TopicAssignment]:
        told = self.committing.told
        return [topic.assignment(told(topic)) for topic in self.topics.values()]

    def _on_durable(self, topic: str, partition: int, end: int) -> None:
        self._dirty.setdefault(topic, {})[partition] = end
        if self._dirty_timer is None:
            self._dirty_timer = self._loop.call_later(DURABLE_NOTICE_S, self.tell_durable)

    def tell_durable(self) -> None:
        """Tell the table process now what became durable since the last time."""
        self._dirty_timer = None
        dirty, self._dirty = self._dirty, {}
        if not dirty:
            return
        now = self.clock.monotonic()
        told: dict[str, dict[int, int]] = {}
        for name, ends in dirty.items():
            partitions = self.topics[name].partitions if name in self.topics else {}
            for number, end in ends.items():
                partition = partitions.get(number)
                if partition is None or partition.appender is None:
                    continue
                partition.pulse.durable(partition.appender, end, now)
                if partition.frontier_known.is_set():  # else it hears of what was recovered alone
                    told.setdefault(name, {})[number] = end
        if told:
            self.link.durable(told)

    def _on_state(self, state: TopicState) -> None:
        topic = self.topics.get(state.topic)
        if topic is not None:
            topic.note(state, self.clock.monotonic())
        for waiter in self._frontier_waiters.get(state.topic, ()):
            waiter.set()
        for listener in self.state_listeners:
            listener(state.topic)

    async def wait_committed(self, topic: Topic, upto: dict[int, int], timeout_s: float) -> bool:
        """Wait until the table has all offsets below `upto`; tell whether it came to that."""
        name = str(topic.name)
        waiter = asyncio.Event()
        self._frontier_waiters.setdefault(name, set()).add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                while any(topic.partitions[p].table.next < end for p, end in upto.items()):
                    waiter.clear()
                    await waiter.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._frontier_waiters.get(name, set()).discard(waiter)

    @property
    def session_counters(self) -> Mapping[str, int]:
        """What happened to the session so far."""
        return self._coordination.session_counters

    @property
    def session_left_s(self) -> float:
        """How long the session is certainly live; below 0 it may be lost."""
        return self._coordination.session_deadline - self.clock.monotonic()

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
        if self.is_full:
            raise self.busy()

    @property
    def has_room(self) -> bool:
        """Tell whether a body of more than `SMALL_BODY_BYTES`, counted so far, may go on to come.

        Whoever is past the limit lets go of its bytes, so those that came before it get through.
        """
        return self.inflight_bytes <= self._large_bytes_max

    @property
    def is_full(self) -> bool:
        """Tell whether nothing more can be taken, however small."""
        return self.inflight_bytes > self.settings.limits.inflight_bytes_max

    def busy(self) -> Overloaded:
        """Return what is said to whoever finds no room."""
        return Overloaded("WorkerBusy", "too many bytes wait for the log", BUSY_RETRY_MS)

    def _check_disk(self) -> None:
        found = os.statvfs(self.settings.log_root)
        was_low = self.disk_is_low
        self.disk_free_bytes = found.f_bavail * found.f_frsize
        self.disk_is_low = self.disk_free_bytes < self.settings.limits.disk_reserve_bytes
        if self.disk_is_low != was_low:
            log.warning("the log's disk is %s", "low" if self.disk_is_low else "no longer low")
        for topic in self.topics.values():
            for partition in topic.partitions.values():
                partition.note_backlog(self.settings.limits.log_bytes_max)

    async def _cool_segments(self) -> None:
        for topic in list(self.topics.values()):
            for partition in list(topic.partitions.values()):
                appender = partition.appender
                if appender is None or not partition.is_open:
                    continue
                for segment in plan_cooling(appender.segments, partition.table.next, CACHED_BYTES):
                    segment.is_cached = False
                    with suppress(OSError):  # it is gone by now, or stays in memory for longer
                        await asyncio.to_thread(
                            cool_segment, partition.directory, segment.base_offset
                        )

    async def _delete_segments(self) -> None:
        for topic in list(self.topics.values()):
            keep = topic.spec.log.retention
            retention = Retention(keep.time.ms * 1000, keep.size.bytes)
            for partition in list(topic.partitions.values()):
                appender = partition.appender
                if appender is None or not partition.is_open:
                    continue
                doomed = plan_deletions(
                    appender.segments, partition.table.next, retention, self.clock.now_us()
                )
                for segment in doomed:
                    # Out of the list first: a reader that looks now goes to the table.
                    appender.segments.remove(segment)
                    try:
                        await asyncio.to_thread(
                            remove_segment, partition.directory, segment.base_offset
                        )
                    except OSError as error:
                        # The later ones stay, too: a log with a hole is refused at the next start.
                        log.warning("%s: a segment stays: %s", partition.directory, error)
                        if (partition.directory / segment_name(segment.base_offset)).exists():
                            appender.segments.insert(0, segment)
                        break
