"""Topics on their way out: dropping the table, closing what the registry no longer has.

    deleting ─▶ every owner drains ─▶ (Delete) one worker drops the table ─▶ dropped ─▶ unregistered

The registry remembers a topic until that is done, so that nobody has to wait for it. A log that
could not be drained stays where it is and is named in the worker's report (G7).
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidewater_coordination.port import Coordination, Registry, TopicPhase
from tidewater_coordination.rules import undrained, unreadable_topics
from tidewater_core.crd.topic import DeletionPolicy
from tidewater_core.errors import Conflict, NotFound, TidewaterError
from tidewater_core.names import topic_path
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic
from tidewater_worker.volume import Drained, Leftover, sweep, sweep_topic, write_drained

if TYPE_CHECKING:
    from tidewater_worker.node import Node

BUSY_POLL_S: Final = 0.05
BUSY_S_MAX: Final = 90.0
"""For an opening or draining that is under way when its topic goes."""
log = logging.getLogger(__name__)


def deleting(topic: str) -> NotFound:
    """Say why a topic that is being deleted takes no message."""
    return NotFound("TopicDeleting", f"topic {topic} is being deleted")


class Leaving:
    """Sees topics off."""

    def __init__(self, node: "Node", coordination: Coordination) -> None:
        self.leftovers: list[Leftover] = []
        """Logs of topics that are gone which may hold messages that are nowhere else."""
        self.sweeping: set[str] = set()
        """Topics whose directory is being deleted: nobody begins a log in it meanwhile."""
        self._node, self._coordination = node, coordination
        self._dropping: set[str] = set()
        self._is_swept = False

    # ---- topics that are being deleted

    def drop_tables(self, registry: Registry) -> bool:
        """Begin to drop the tables of drained topics that ask for it; tell if there are any."""
        due = [topic for topic in self._node.topics.values() if self._is_due(topic, registry)]
        for topic in due:
            name = str(topic.name)
            if name not in self._dropping:
                self._dropping.add(name)
                self._node.spawn(self._drop(topic))
        return bool(due)

    def _is_due(self, topic: Topic, registry: Registry) -> bool:
        return (
            topic.phase is TopicPhase.DELETING
            and topic.spec.deletion_policy is DeletionPolicy.DELETE
            and not undrained(registry.owners.get(str(topic.name), {}))
            and not any(p.is_busy or p.appender for p in topic.partitions.values())
        )

    async def _drop(self, topic: Topic) -> None:
        """Drop a table; any worker may, one at a time does."""
        name = str(topic.name)
        lease = f"drop/{name}"
        try:
            if not await self._coordination.take_lease(lease):
                return
            try:
                await self._drop_once(name)
                uuid = str(topic.uuid)
                await self._coordination.set_topic_phase(name, uuid, TopicPhase.DROPPED)
            finally:
                await self._coordination.drop_lease(lease)
        except TidewaterError as error:
            log.warning("the table of %s is not dropped yet: %s", name, error)
        finally:
            self._dropping.discard(name)

    async def _drop_once(self, name: str) -> None:
        try:
            found = await self._node.link.drop_table(name)
        except Conflict as error:
            # Somebody else's, whatever its name: it stays, and the topic goes all the same.
            log.warning("the table of %s stays: %s", name, error)
        else:
            log.warning("the table of %s %s", name, "was dropped" if found else "was not there")

    # ---- topics that are gone

    async def sweep_once(self, registry: Registry) -> None:
        """Delete what is left of topics that went while this worker was away.

        Not by the word of an empty registry: that may be a new one beside old logs.
        """
        if self._is_swept or not registry.topics:
            return
        self._is_swept = True
        root = self._node.settings.log_root
        known = {*registry.topics, *unreadable_topics(registry)}
        try:
            self.leftovers += await asyncio.to_thread(sweep, root, known)
        except OSError as error:
            log.warning("logs of topics that are gone were not deleted: %s", error)
        for leftover in self.leftovers:
            log.error("a log of a topic that is gone is not drained and stays: %s", leftover)

    def forget(self, topic: Topic) -> None:
        """Let go of a topic that the registry no longer has."""
        name = str(topic.name)
        log.warning("topic %s (%s) is gone from the registry", name, topic.uuid)
        self._node.remove_topic(topic)
        gone = NotFound("UnknownTopic", f"there is no topic {name}")
        for partition in topic.partitions.values():
            partition.refusal = gone
        self._node.spawn(self._forget(topic, gone))

    async def _forget(self, topic: Topic, gone: TidewaterError) -> None:
        name = str(topic.name)
        root = topic_path(self._node.settings.log_root, topic.name)
        await asyncio.gather(
            *(self._close(p, gone, str(topic.uuid)) for p in topic.partitions.values())
        )
        if name in self._node.topics:
            return  # there is another one of that name by now, which clears up as it opens
        self.sweeping.add(name)
        try:
            left = await asyncio.to_thread(_sweep_if_there, name, root)
        except OSError as error:
            log.warning("the logs of %s were not deleted: %s", name, error)
            return
        finally:
            self.sweeping.discard(name)
        for leftover in left:
            log.error("a log of a topic that is gone is not drained and stays: %s", leftover)
        self.leftovers = [one for one in self.leftovers if one.topic != name] + left

    async def _close(self, partition: Partition, gone: TidewaterError, uuid: str) -> None:
        waited_s = 0.0
        while partition.is_busy and waited_s < BUSY_S_MAX:
            await asyncio.sleep(BUSY_POLL_S)
            waited_s += BUSY_POLL_S
        appender, table = partition.appender, partition.table
        partition.refusal = gone
        if appender is None:
            return
        await appender.settle()
        end = appender.next_offset
        await partition.close(gone, keep_lock=True)
        try:
            if table.next >= end:  # all of it is in the table: as good as drained
                note = Drained(end, partition.epoch, appender.last_time_us, uuid)
                await asyncio.to_thread(write_drained, partition.directory, note)
        finally:
            partition.unlock()


def _sweep_if_there(name: str, directory: Path) -> list[Leftover]:
    return sweep_topic(name, directory) if directory.is_dir() else []
