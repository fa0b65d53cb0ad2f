"""Taking a partition: from the lock on its log to an appender that waits for the frontier.

    lock ─▶ recover ─▶ acquire ─┬─ its messages are on this volume ─▶ go on with the log
                                └─ another volume had it ─▶ discard · fetch · `begin` ─▶ empty log

After `acquire` nobody else may have the partition, but until `begin` the record keeps what the
last owner left: drained where, or given up by whom. So an attempt may fail or die between any two
steps, and the next one, here or elsewhere, still knows whose memory to ask for (G8) and that
a gap has to be recorded (G1, G7). What it did to this disk by then is done again or was allowed:
only a log whose rows are all in the table is discarded.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from tidewater_coordination.port import Coordination, Gap, Ownership, WorkerInfo
from tidewater_coordination.rules import is_of, predecessor
from tidewater_core.errors import (
    Corrupt,
    Fenced,
    NotFound,
    Overloaded,
    Retryable,
    TidewaterError,
)
from tidewater_core.names import log_path
from tidewater_worker.cluster.epochs import TableEpochs
from tidewater_worker.cluster.handover import Handover, begins_at, discard, receive, resume
from tidewater_worker.cluster.leaving import deleting
from tidewater_worker.cluster.plan import next_after_gap
from tidewater_worker.log.producers import Producers
from tidewater_worker.log.recover import Recovered, recover
from tidewater_worker.log.segment import make_directory
from tidewater_worker.partition import DirectoryLock, Partition
from tidewater_worker.ports import PartitionState
from tidewater_worker.topic import Topic
from tidewater_worker.volume import (
    clear_drained,
    clear_earlier_life,
    note_epoch,
    read_drained,
    read_epoch,
)

if TYPE_CHECKING:
    from tidewater_worker.node import Node

log = logging.getLogger(__name__)


class Taking:
    """Opens partitions for a node."""

    def __init__(self, node: "Node", coordination: Coordination) -> None:
        self.me = WorkerInfo(node.settings.worker_id)
        """With its volume from the moment that the worker joins."""
        self._node, self._coordination = node, coordination
        self._epochs = TableEpochs(node.link)
        self._under_way = 0

    def _refuse_too_many(self) -> None:
        most = self._node.settings.limits.partitions_max
        topics = self._node.topics.values()
        opened = sum(p.appender is not None for t in topics for p in t.partitions.values())
        if opened + self._under_way >= most:
            raise Overloaded("TooManyPartitions", f"{most} partitions are open on this worker")

    async def take(
        self, topic: Topic, partition: Partition, session: str, workers: Mapping[str, WorkerInfo]
    ) -> None:
        """Take a partition for a session; `workers` are there to be asked about it."""
        self._refuse_too_many()
        self._under_way += 1
        try:
            await self._take(topic, partition, session, workers)
        finally:
            self._under_way -= 1

    async def _take(
        self, topic: Topic, partition: Partition, session: str, workers: Mapping[str, WorkerInfo]
    ) -> None:
        node, number = self._node, partition.number
        directory = log_path(node.settings.log_root, topic.name, number)
        await asyncio.to_thread(make_directory, directory, node.settings.log_root)
        partition.lock = DirectoryLock(directory)
        is_first = partition.owner is None
        await asyncio.to_thread(clear_earlier_life, directory, topic.uuid, is_first=is_first)
        most = node.settings.limits.producers_max
        recovered = await asyncio.to_thread(
            recover, directory, topic.uuid, number, producers_max=most
        )
        last_owner = predecessor(partition.owner)
        # Who has had it since, or gave it up, answers for what was acknowledged here before.
        if last_owner is not None and is_of(last_owner, self.me) and last_owner.given_up is None:
            _refuse_less(partition, recovered)
        await self._refuse_stale(partition, last_owner, recovered)
        # A registry that was restored counts from before: what this volume had is past it.
        above = max(partition.epoch, await asyncio.to_thread(read_epoch, directory))
        if is_first:
            above = max(above, await self._epochs.of(partition.topic, number))
        grant = await self._coordination.acquire(partition.topic, number, above)
        previous = grant.previous
        is_ours = previous is not None and is_of(previous, self.me)
        if topic.is_deleting and not is_ours:
            # Too late for another owner: nothing may make a table that was dropped meanwhile.
            await self._coordination.release(partition.topic, number, grant.epoch, 0)
            raise deleting(partition.topic)
        try:
            await self._refuse_stale(partition, previous, recovered)
            if previous is None or is_ours:
                recovered = await asyncio.to_thread(resume, directory, recovered)
                if not recovered.segments and (end := begins_at(directory)):
                    await self._refuse_earlier(partition, end)
            else:
                last = workers.get(previous.worker_id)
                recovered = await self._come_after(
                    partition, previous, last, recovered, grant.epoch
                )
        except (TidewaterError, OSError):
            # As it was: another one may be luckier.
            drained_at = previous.drained_at if previous is not None and is_ours else None
            await self._coordination.release(partition.topic, number, grant.epoch, drained_at)
            raise
        await asyncio.to_thread(clear_drained, directory)
        await asyncio.to_thread(note_epoch, directory, grant.epoch)
        self._open(topic, partition, recovered, grant.epoch, session)

    def _open(
        self, topic: Topic, partition: Partition, recovered: Recovered, epoch: int, session: str
    ) -> None:
        node = self._node
        if recovered.cut_bytes:
            log.warning(
                "%s partition %s: cut a torn tail of %s bytes (kept as .broken)",
                topic.name, partition.number, recovered.cut_bytes,
            )  # fmt: skip
        appender = node.make_appender(topic, partition, recovered)
        appender.may_append = _MayAppend(node.clock.monotonic, self._coordination, partition)
        partition.begin(appender, epoch, session)
        age_s = (node.clock.now_us() - recovered.last_time_us) / 1e6
        partition.pulse.begin(appender, node.clock.monotonic(), age_s)
        node.spawn(partition.open_when_known())

    async def _refuse_stale(
        self, partition: Partition, owner: Ownership | None, recovered: Recovered
    ) -> None:
        """Refuse to go on with messages of a partition that another volume has had since (G5).

        That owner may have given their offsets to other messages. Nobody can tell which of them
        count, so a person must; unless all of them were in the table before it began.
        """
        if not recovered.segments or owner is None or is_of(owner, self.me):
            return
        drained = read_drained(partition.directory)
        if drained is None or drained.end != recovered.next_offset:
            raise Fenced(
                "LogStale",
                f"worker {owner.worker_id!r} has taken this partition since; the messages in "
                f"this log from offset {recovered.segments[0].base_offset} to "
                f"{recovered.next_offset} were kept",
            )
        await self._refuse_earlier(partition, drained.end)

    async def _refuse_earlier(self, partition: Partition, end: int) -> None:
        """Refuse a table that has less than when the partition was drained (G1, G7).

        A catalog that forgot a commit: an empty log would give the offsets from there on again.
        Whoever drained it still has the rows, as long as nobody has begun after it.
        """
        # A partition without a message may have been drained before it had a table.
        frontier = await self._frontier(partition) if end else 0
        if frontier < end:
            raise Corrupt(
                "FrontierMovedBack",
                f"the log was drained at {end}, but the table stands at {frontier}; nothing was "
                "changed, and the log on the volume that was drained still has the messages",
            )

    async def _frontier(self, partition: Partition) -> int:
        bounds = await self._node.link.bounds(partition.topic)
        return bounds.get(partition.number, PartitionState()).next

    # ---- after another volume's owner

    async def _come_after(
        self,
        partition: Partition,
        previous: Ownership,
        last: WorkerInfo | None,
        recovered: Recovered,
        epoch: int,
    ) -> Recovered:
        """Go on after another volume's owner: from the table, with what that one left."""
        gap, handover, drained_at = None, None, previous.drained_at
        if drained_at is None:
            gap = await self._gap_after(partition, previous)
        else:
            await self._refuse_earlier(partition, drained_at)
            handover = await self._handover(partition, previous, last)
        # Before `begin`: a drained log of earlier must not be taken for the owner's after it.
        await asyncio.to_thread(discard, partition.directory, recovered)
        recovered = Recovered()
        if drained_at is not None:
            recovered = await asyncio.to_thread(receive, partition.directory, drained_at, handover)
        await self._coordination.begin(partition.topic, partition.number, epoch, gap)
        if gap is not None:
            me = self.me
            partition.owner = Ownership(partition.number, me.worker_id, epoch, me.volume, gap=gap)
            log.error(
                "%s partition %s: offsets %s to %s were lost with the volume of worker %s (%s)",
                partition.topic, partition.number, gap.start, gap.end - 1, gap.worker_id,
                gap.reason,
            )  # fmt: skip
        return recovered

    async def _handover(
        self, partition: Partition, previous: Ownership, last: WorkerInfo | None
    ) -> Handover | None:
        """Ask the last owner what the table does not know; None if nobody knows it any more.

        While that worker is there and only does not answer, nobody goes on without: messages that
        are sent again would be stored twice (G8).
        """
        why = "is away"
        if last is not None and is_of(previous, last):
            target = f"/v1/{partition.topic}/partitions/{partition.number}/handover"
            try:
                answer = await self._node.forwarding.call(last.url, "GET", target, as_worker=True)
                handover = msgspec.convert(answer, Handover)
                Producers.from_bytes(handover.producers)  # another version may write another form
                return handover
            except NotFound as error:
                if error.reason != "NotDrained":
                    raise
                why = "no longer knows"
            except (msgspec.MsgspecError, ValueError) as error:
                raise Retryable(
                    "HandoverUnreadable", f"worker {last.worker_id!r} answered: {error}", 2_000
                ) from error
        log.warning(
            "%s partition %s: worker %s, which drained it, %s: re-sent requests from before are "
            "not known here",
            partition.topic, partition.number, previous.worker_id, why,
        )  # fmt: skip
        return None

    async def _gap_after(self, partition: Partition, lost: Ownership) -> Gap:
        """Say what was lost with a volume, and where the partition goes on.

        Nobody knows how many messages there were. None of their offsets may be given again, since
        readers may have seen them: the partition goes on further than any log could have reached.
        """
        frontier = await self._frontier(partition)
        # The lost owner may have come behind a gap, too, that the table has not heard of.
        reached = max(frontier, lost.gap.end if lost.gap is not None else 0)
        reason = lost.given_up or ""
        return Gap(frontier, next_after_gap(reached), lost.volume, reason, lost.worker_id)


def _refuse_less(partition: Partition, recovered: Recovered) -> None:
    """Refuse to go on after a failed sync with less than was acknowledged (G1, G7)."""
    if recovered.next_offset < partition.acked_end:
        raise Corrupt(
            "AcknowledgedLost",
            f"messages below offset {partition.acked_end} were acknowledged, but after a failed "
            f"write or sync the disk has those below {recovered.next_offset} alone",
        )


class _MayAppend:
    """Tells whether a partition is certainly ours: cheap, since every request asks."""

    __slots__ = ("_coordination", "_now", "_partition")

    def __init__(
        self, now: Callable[[], float], coordination: Coordination, partition: Partition
    ) -> None:
        self._now, self._coordination, self._partition = now, coordination, partition

    def __call__(self) -> bool:
        coordination = self._coordination
        return (
            self._now() < coordination.session_deadline
            and self._partition.session == coordination.session
        )
