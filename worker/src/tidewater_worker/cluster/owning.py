"""Taking, draining and letting go of partitions: the registry's wishes become open logs.

Every change of the registry, every loss of the session and every failed attempt lead to the same
round: look at each partition, `plan.decide`, do it. What takes longer (a log to be recovered, a
table or another worker to be asked) goes on beside the next rounds: one partition that waits never
stands in the way of another.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Final, TypeAlias

from tidewater_coordination.port import (
    Coordination,
    Ownership,
    RegisteredTopic,
    Registry,
    WorkerInfo,
)
from tidewater_coordination.rules import is_of, unreadable_topics
from tidewater_core.clock import IdSource
from tidewater_core.crd.topic import DeletionPolicy
from tidewater_core.errors import Corrupt, Fenced, Overloaded, Retryable, TidewaterError
from tidewater_worker.cluster.handover import leave
from tidewater_worker.cluster.leaving import Leaving, deleting
from tidewater_worker.cluster.passed_on import PassedOn
from tidewater_worker.cluster.plan import Action, decide
from tidewater_worker.cluster.taking import Taking
from tidewater_worker.partition import Partition
from tidewater_worker.ports import Phase
from tidewater_worker.topic import Topic
from tidewater_worker.volume import Drained, note_epoch, volume_id

if TYPE_CHECKING:
    from tidewater_worker.node import Node

OPENING_AT_ONCE: Final = 16
ROUND_S: Final = 1.0
"""A round is made at least this often: a lost session has to be noticed by time alone."""
JOIN_S: Final = 0.5
RETRY_S: Final = 2.0
REOPEN_S: Final = 5.0
"""Before a log that stopped is opened again. It can be read meanwhile."""
RETRY_DAMAGE_S: Final = 30.0
"""Before a log that needs a person is looked at again."""
UNHEARD_S: Final = 5.0
"""How long the registry may not have heard of an epoch before it is told again."""
DRAIN_S: Final = 60.0
TOGETHER_S: Final = 1.0
"""How long a round waits for what it began: the table process hears of all of it at once."""
Work: TypeAlias = Coroutine[None, None, bool]
"""Something about a partition; it tells if what we own has changed."""
log = logging.getLogger(__name__)


class Owning:
    """Keeps the partitions of a node as the registry says."""

    def __init__(self, node: "Node", coordination: Coordination, ids: IdSource) -> None:
        self.registry = Registry(version=-1)
        """As of the last round."""
        self.me = WorkerInfo(node.settings.worker_id)
        self._node, self._coordination, self._ids = node, coordination, ids
        self._opening = asyncio.Semaphore(OPENING_AT_ONCE)
        self.leaving = Leaving(node, coordination)
        self.passed_on = PassedOn(node, coordination)
        self.refused: dict[str, TidewaterError] = {}
        """Topics whose registered spec is not served, and why."""
        self.taken = self.drained = 0
        """Partitions opened and let go since the start."""
        self._taking = Taking(node, coordination)
        self._session = ""
        self._retry = False
        self._under_way: set[asyncio.Task[bool]] = set()

    async def start(self, url: str, flight_url: str) -> None:
        """Join the other workers and take what is ours."""
        settings = self._node.settings
        volume = await asyncio.to_thread(volume_id, settings.log_root, self._ids)
        self.me = self._taking.me = WorkerInfo(settings.worker_id, url, flight_url, volume)
        await self._join(settings.session_ttl.seconds)
        await self._round()
        self._node.spawn(self.passed_on.watch())

    async def _join(self, ttl_s: float) -> None:
        """Open the session; wait for a store that is away, and for another of our name to go."""
        said = ""
        while True:
            try:
                await self._coordination.start(self.me, ttl_s)
            except (Retryable, Fenced) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("this worker waits to join: %s", said)
                await asyncio.sleep(JOIN_S)
            else:
                return

    async def watch(self) -> None:
        """Follow the registry for ever."""
        while True:
            try:
                version = await self._coordination.changed(self.registry.version, ROUND_S)
                moved = self._coordination.session != self._session
                if version != self.registry.version or moved or self._retry or self._has_failed():
                    await self._round()
            except (OSError, TidewaterError) as error:
                log.warning("a round over the registry failed: %s", error)
                await self._pause()
            except Exception:
                # Whatever it is, a worker that no longer follows the registry is worse.
                log.exception("a round over the registry failed")
                await self._pause()

    async def _pause(self) -> None:
        """Wait after a round that failed; what it did not come to is the next one's."""
        await asyncio.sleep(ROUND_S)
        self._retry = True

    def _has_failed(self) -> bool:
        topics = self._node.topics.values()
        return any(part.has_failed for topic in topics for part in topic.partitions.values())

    async def _round(self) -> None:
        self._session = self._coordination.session
        self.registry = registry = await self._coordination.registry()
        self._retry = False
        self._forget_gone(registry)
        self.refused.clear()
        await self.leaving.sweep_once(registry)
        topics = [topic for topic in map(self._synced, registry.topics.values()) if topic]
        topics += self._unreadable(registry)
        if self._node.topics_changed:
            self._node.topics_changed = False
            self._node.link.assign()  # who opens a partition asks for its table
        for topic in topics:
            for partition in topic.partitions.values():
                if (work := self._tend(topic, partition)) is not None:
                    self._begin(partition, work)
        self._note_spread()  # now: requests must not wait for what takes longer
        await self._wait_for_work()
        self._note_spread()
        if self.leaving.drop_tables(registry):
            self._retry = True

    def _note_spread(self) -> None:
        for topic in self._node.topics.values():
            topic.is_spread = any(part.is_elsewhere for part in topic.partitions.values())

    def _forget_gone(self, registry: Registry) -> None:
        for name, topic in list(self._node.topics.items()):
            registered = registry.topics.get(name)
            if name in unreadable_topics(registry):
                continue  # it is there, whatever its record says
            # Another uuid: it went and was made again between two rounds.
            if registered is None or registered.uuid != str(topic.uuid):
                self.leaving.forget(topic)

    def _unreadable(self, registry: Registry) -> list[Topic]:
        """Return the topics whose record cannot be read: they go on by what they were last."""
        found = []
        for name in sorted(unreadable_topics(registry)):
            self.refused[name] = Corrupt(
                "RecordUnreadable", f"the registry has something unreadable at topics/{name}"
            )
            if name in self._node.topics:
                found.append(self._node.topics[name])
        return found

    def _synced(self, registered: RegisteredTopic) -> Topic | None:
        try:
            topic = self._node.sync_topic(registered)
        except TidewaterError as error:
            # One bad topic never stands in the way of another.
            log.warning("topic %s: %s", registered.topic, error)
            self.refused[registered.topic] = error
            return None
        if topic.refused is not None:
            self.refused[registered.topic] = topic.refused
        return topic

    def _begin(self, partition: Partition, work: Work) -> None:
        """Do something about a partition, and nothing else until that is done."""

        async def busily() -> bool:
            try:
                return await work
            except Exception:
                log.exception("%s partition %s", partition.topic, partition.number)
                self._retry = True
                return True
            finally:
                partition.is_busy = False

        partition.is_busy = True
        self._under_way.add(self._node.spawn(busily()))

    async def _wait_for_work(self) -> None:
        """Give what was begun a moment, and tell the table process what is open by then."""
        if not self._under_way:
            return
        done, self._under_way = await asyncio.wait(self._under_way, timeout=TOGETHER_S)
        if any(task.result() for task in done):
            self._node.link.assign()
        if self._under_way:
            self._retry = True

    def _tend(self, topic: Topic, partition: Partition) -> Work | None:
        """Return what is to be done about a partition, if anything is."""
        name, number = partition.topic, partition.number
        owner = self.registry.owners.get(name, {}).get(number)
        if partition.is_busy:
            self._retry = True  # what has changed for it must be looked at when it is done
            return None
        holds = partition.appender is not None
        if holds and (owner is None or owner.epoch < partition.epoch):
            return self._unheard(partition)
        partition.owner = owner
        partition.unheard_at = 0.0
        action = decide(
            self.me,
            self.registry.assignments.get(name, {}).get(number),
            owner,
            self.registry.workers,
            holds=holds,
            assigned_only=self._node.settings.assigned_only,
            deleting=topic.is_deleting,
        )
        if partition.drained is not None:
            action = Action.DRAIN  # half done: it must be let go before anybody can have it
        partition.is_elsewhere = action is Action.LEAVE
        if partition.has_failed and partition.drained is None and action is not Action.LEAVE:
            return self._mend(topic, partition)
        match action:
            case Action.KEEP:
                # A higher epoch of our own session: we acquired it, and never had the answer.
                is_known = owner is None or owner.epoch == partition.epoch
                is_ours = partition.session == self._session
                return None if is_known and is_ours else self._renew(partition)
            case Action.OPEN:
                return self._open(topic, partition) if self._may_open(partition) else None
            case Action.DRAIN:
                partition.is_busy = True
                self._node.spawn(self._drain(topic, partition))
            case Action.LEAVE if partition.appender is not None:
                return self._leave(partition, owner)
            case Action.LEAVE:
                partition.refusal = _refusal(topic, partition, owner)
        return None

    # ---- taking

    def _unheard(self, partition: Partition) -> Work | None:
        """Wait for the registry to hear of our epoch; one that was restored never will."""
        if partition.session != self._session:
            return self._renew(partition)
        now = self._node.clock.monotonic()
        partition.unheard_at = partition.unheard_at or now
        self._retry = True
        return self._renew(partition) if now - partition.unheard_at >= UNHEARD_S else None

    async def _renew(self, partition: Partition) -> bool:
        """Take a partition again; its log never left our hands."""
        session, topic, number = self._session, partition.topic, partition.number
        if not session:
            return False
        try:
            async with self._opening:
                grant = await self._coordination.acquire(topic, number, partition.epoch)
                if grant.previous is not None and not is_of(grant.previous, self.me):
                    # A registry from before we began: as long as it does not know, it would give
                    # the partition back to the one before us.
                    gap = None if partition.owner is None else partition.owner.gap
                    await self._coordination.begin(topic, number, grant.epoch, gap)
        except Fenced as error:
            await self._close(partition, error)
            return True
        except TidewaterError:
            self._retry = True
            return False
        log.warning("%s partition %s: taken again, epoch %s", topic, number, grant.epoch)
        partition.epoch, partition.session, partition.unheard_at = grant.epoch, session, 0.0
        await asyncio.to_thread(note_epoch, partition.directory, grant.epoch)
        return True

    def _may_open(self, partition: Partition) -> bool:
        is_going = partition.topic in self.leaving.sweeping  # of an earlier topic of that name
        due = self._node.clock.monotonic() >= partition.retry_at
        if self._session and due and not is_going:
            return True
        self._retry = True
        return False

    async def _open(self, topic: Topic, partition: Partition) -> bool:
        now = self._node.clock.monotonic()
        try:
            async with self._opening:
                await self._taking.take(topic, partition, self._session, self.registry.workers)
                self.taken += 1
        except TidewaterError as error:
            self._stays_closed(partition, error, now)
        except OSError as error:
            unreadable = Retryable("LogUnreadable", f"the log's directory: {error}", 2_000)
            self._stays_closed(partition, unreadable, now)
        except Exception as error:
            # Whatever it is: it has a reason that is seen, and no lock stays behind.
            log.exception("%s partition %s", partition.topic, partition.number)
            unopened = Corrupt("OpeningFailed", f"the log could not be opened: {error!r}")
            self._stays_closed(partition, unopened, now)
        return partition.appender is not None

    def _stays_closed(self, partition: Partition, refusal: TidewaterError, now: float) -> None:
        partition.unlock()
        if str(partition.refusal) != str(refusal):
            where = f"{partition.topic} partition {partition.number}"
            log.warning("%s stays closed: %s", where, refusal)
        partition.refusal = refusal
        damaged = isinstance(refusal, Corrupt) or refusal.reason == "LogStale"
        partition.retry_at = now + (RETRY_DAMAGE_S if damaged else RETRY_S)
        self._retry = True

    def _mend(self, topic: Topic, partition: Partition) -> Work | None:
        """Open a log that stopped again, after a pause: its disk may be itself again by then."""
        now = self._node.clock.monotonic()
        if not partition.reopen_at:
            partition.reopen_at = now + REOPEN_S
        self._retry = True
        return self._reopen(topic, partition) if now >= partition.reopen_at else None

    async def _reopen(self, topic: Topic, partition: Partition) -> bool:
        appender = partition.readable()
        assert appender.failure is not None
        await self._close(partition, appender.failure)
        partition.acked_end = appender.end
        await self._open(topic, partition)
        return True

    # ---- letting go

    async def _leave(self, partition: Partition, owner: Ownership | None) -> bool:
        there = "nobody" if owner is None else f"worker {owner.worker_id!r}, epoch {owner.epoch}"
        error = Fenced("Fenced", f"{partition.topic} partition {partition.number} has {there}")
        await self._close(partition, error)
        return True

    async def _close(self, partition: Partition, refusal: TidewaterError) -> None:
        log.warning("%s partition %s is let go: %s", partition.topic, partition.number, refusal)
        await partition.close(refusal)

    async def _drain(self, topic: Topic, partition: Partition) -> None:
        """Bring everything into the table, then let another volume have the partition."""
        log.info("%s partition %s: draining", topic.name, partition.number)
        try:
            if partition.drained is None:
                partition.drained = await self._flush_out(topic, partition)
            drained = partition.drained
            self._node.link.assign()  # the table process is done with it
            appender = partition.readable()
            note = Drained(drained, partition.epoch, appender.last_time_us, str(topic.uuid))
            await asyncio.to_thread(leave, partition.directory, note, appender.producers)
            await self._coordination.release(
                partition.topic, partition.number, partition.epoch, drained
            )
            await partition.close(_refusal(topic, partition, partition.owner))
            # Not us any more: we would forward to ourselves. The next one may be there by now.
            latest = self.registry.owners.get(partition.topic, {}).get(partition.number)
            is_next = latest is not None and latest.epoch > partition.epoch
            partition.owner = latest if is_next else None
            partition.is_elsewhere = topic.is_spread = True
            # A round that is under way still takes it for ours.
            partition.retry_at = self._node.clock.monotonic() + RETRY_S
            self.drained += 1
            log.info("%s partition %s: drained at %s", topic.name, partition.number, drained)
        except (TidewaterError, OSError) as error:
            log.warning("%s partition %s is not drained: %s", topic.name, partition.number, error)
            await self._not_drained(topic, partition)
        except Exception:
            log.exception("%s partition %s is not drained", topic.name, partition.number)
            await self._not_drained(topic, partition)
        finally:
            partition.is_busy = False

    async def _not_drained(self, topic: Topic, partition: Partition) -> None:
        """Go on for a while; the next round tries again."""
        if partition.drained is None and not topic.is_deleting:
            partition.leaving = None
        await asyncio.sleep(RETRY_S)
        self._retry = True

    async def _flush_out(self, topic: Topic, partition: Partition) -> int:
        if topic.is_deleting:
            partition.leaving = deleting(partition.topic)
            appender = partition.readable()
            if _needs_no_table(topic, partition):
                await appender.settle()
                return appender.next_offset
            if not partition.is_open:
                raise Retryable("PartitionOpening", "the table's frontier is not known yet")
        else:
            if isinstance(partition.refusal, Overloaded):
                partition.refusal = None  # less waits for the table while nothing comes
            appender = partition.ready()
            partition.leaving = Retryable(
                "PartitionMoving",
                f"{partition.topic} partition {partition.number} is going to another worker", 300,
            )  # fmt: skip
        await appender.settle()
        await appender.make_durable()
        if appender.failure is not None:
            raise appender.failure.with_traceback(None)
        end = appender.durable_end
        assert end == appender.next_offset, "nothing is taken while it drains"
        self._node.tell_durable()
        result = await self._node.link.flush(partition.topic, {partition.number: end}, DRAIN_S)
        if result.frontier.get(partition.number) != end:
            raise Retryable("NotDrained", f"the table stands at {result.frontier}, not at {end}")
        return end


def _needs_no_table(topic: Topic, partition: Partition) -> bool:
    """Tell whether a partition of a topic that is deleted can be let go as it is.

    An empty log has nothing to bring. And where the table goes too, one that takes no rows any
    more (it was dropped already, say) must not keep the topic alive.
    """
    if not partition.readable().segments:
        return True
    goes = topic.spec.deletion_policy is DeletionPolicy.DELETE
    return goes and partition.table.state is Phase.STOPPED


def _refusal(topic: Topic, partition: Partition, owner: Ownership | None) -> TidewaterError:
    """Say why a partition that is not ours takes no message here."""
    if topic.is_deleting:
        return deleting(partition.topic)
    where = f"{partition.topic} partition {partition.number}"
    if owner is not None and owner.is_live:
        return Retryable("OwnedElsewhere", f"{where} is on worker {owner.worker_id!r}", 300)
    if owner is None or owner.drained_at is not None:
        return Retryable("PartitionMoving", f"{where} is about to be taken by a worker", 300)
    return Retryable(
        "OwnerAway", f"{where} waits for worker {owner.worker_id!r} and its volume", 2_000
    )
