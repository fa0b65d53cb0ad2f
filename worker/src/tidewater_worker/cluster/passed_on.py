"""Logs of partitions that went to another volume: they go when nobody can need them any more.

A drained log stays for the log's retention, as all does that the table has: if a catalog forgets
a commit, the rows are still here. After that its segments go, provided that all of this holds:

    the note beside the log says that it is drained, and the log ends where the note says
    the registry has a later epoch, which has begun, on another volume: if the partition comes
    back it goes on from the table, with what that owner hands over
    the table, asked now, has all of it

What the next owner may ask for stays (`handover`): the note, and the memory of producers.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tidewater_coordination.port import Coordination, Ownership, WorkerInfo
from tidewater_coordination.rules import is_of
from tidewater_core.errors import Corrupt, TidewaterError
from tidewater_worker.log.deleter import remove_segment
from tidewater_worker.log.reader import list_segments
from tidewater_worker.log.recover import recover
from tidewater_worker.log.segment import fsync_directory
from tidewater_worker.partition import DirectoryLock, Partition
from tidewater_worker.ports import PartitionState
from tidewater_worker.topic import Topic
from tidewater_worker.volume import DRAINED_FILE, Drained, read_drained

if TYPE_CHECKING:
    from tidewater_worker.node import Node

SWEEP_S: Final = 60.0
log = logging.getLogger(__name__)


class _Candidate(NamedTuple):
    """A partition that is another volume's by now."""

    topic: Topic
    partition: Partition
    epoch: int
    """Of its owner there."""


class PassedOn:
    """Deletes the old logs of partitions that others go on with."""

    def __init__(self, node: "Node", coordination: Coordination) -> None:
        self._node, self._coordination = node, coordination
        self._told: dict[Path, str] = {}
        """Why a log stays."""

    async def watch(self) -> None:
        """Look now and then, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception:  # whatever it was: without this the volume fills up in the end
                log.exception("drained logs were not looked at; the next round tries again")

    async def sweep(self) -> None:
        """Delete the segments that may go."""
        registry = await self._coordination.registry()
        me, found = self._node.owning.me, []
        for topic in self._node.topics.values():
            owners = registry.owners.get(str(topic.name), {})
            for number, partition in topic.partitions.items():
                owner = owners.get(number)
                if owner is not None and has_begun_elsewhere(owner, me) and _is_shut(partition):
                    found.append(_Candidate(topic, partition, owner.epoch))
        now_us = self._node.clock.now_us()
        due = await asyncio.to_thread(_due, found, now_us)
        for name, mine in itertools.groupby(due, lambda each: each[0].partition.topic):
            try:
                bounds = await self._node.link.bounds(name)
            except TidewaterError as error:  # its table is asked again in the next round
                log.info("drained logs of %s stay for now: %s", name, error)
                continue
            for candidate, drained in mine:
                await self._try(candidate, drained, bounds)

    async def _try(
        self, found: _Candidate, drained: Drained, bounds: Mapping[int, PartitionState]
    ) -> None:
        """Delete one log, or say once why it stays."""
        partition = found.partition
        frontier = bounds.get(partition.number, PartitionState()).next
        try:
            await self._remove(found.topic, partition, drained, frontier)
        except (TidewaterError, OSError) as error:  # another log's trouble is not this one's
            said = repr(error)
            if self._told.get(partition.directory) != said:
                where = f"{partition.topic} partition {partition.number}"
                log.warning("the drained log of %s stays: %s", where, error)
            self._told[partition.directory] = said
        else:
            self._told.pop(partition.directory, None)

    async def _remove(
        self, topic: Topic, partition: Partition, drained: Drained, frontier: int
    ) -> None:
        if frontier < drained.end:
            raise Corrupt(
                "FrontierMovedBack", f"it ends at {drained.end}, and the table at {frontier}"
            )
        if not _is_shut(partition) or self._node.topics.get(partition.topic) is not topic:
            return  # it is coming back, or gone
        partition.is_busy = True  # nobody opens it meanwhile
        try:
            await asyncio.to_thread(_remove_drained, topic, partition, drained)
        finally:
            partition.is_busy = False
        log.info(
            "%s partition %s: the log that was drained at %s is deleted, another volume goes on",
            topic.name, partition.number, drained.end,
        )  # fmt: skip


def has_begun_elsewhere(owner: Ownership, me: WorkerInfo) -> bool:
    """Tell whether a partition's owner is another volume and has taken over all there was."""
    return bool(owner.volume and me.volume) and not is_of(owner, me) and owner.after is None


def _is_shut(partition: Partition) -> bool:
    return partition.appender is None and partition.lock is None and not partition.is_busy


def _due(found: Iterable[_Candidate], now_us: int) -> list[tuple[_Candidate, Drained]]:
    """Return those whose log was drained before that owner, and whose retention is over."""
    due = []
    for candidate in found:
        try:
            drained = _is_due(candidate, now_us)
        except OSError as error:
            log.info("%s cannot be looked at: %s", candidate.partition.directory, error)
            continue
        if drained is not None:
            due.append((candidate, drained))
    return due


def _is_due(candidate: _Candidate, now_us: int) -> Drained | None:
    topic, directory = candidate.topic, candidate.partition.directory
    drained = read_drained(directory)
    if (
        drained is None
        or drained.topic_uuid != str(topic.uuid)
        or drained.epoch >= candidate.epoch
        or not _removable(directory, drained)
    ):
        return None
    drained_us = int((directory / DRAINED_FILE).stat().st_mtime * 1e6)
    is_over = now_us - drained_us > topic.spec.log.retention.time.ms * 1000
    return drained if is_over else None


def _removable(directory: Path, drained: Drained) -> list[int]:
    """Return the segments with messages: beside an empty one at the end stand the producers."""
    return [base for base in list_segments(directory) if base < drained.end]


def _remove_drained(topic: Topic, partition: Partition, drained: Drained) -> None:
    directory = partition.directory
    lock = DirectoryLock(directory)
    try:
        if read_drained(directory) != drained:
            return  # it was here again since
        end = recover(directory, topic.uuid, partition.number, repair=False).next_offset
        if end != drained.end:
            raise Corrupt("NotDrained", f"it was drained at {drained.end}, but ends at {end}")
        for base in _removable(directory, drained):  # oldest first: what is left is whole
            remove_segment(directory, base)
        fsync_directory(directory)
    finally:
        lock.release()
