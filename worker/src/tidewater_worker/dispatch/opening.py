"""Serving a subscription from partitions that this worker has: where it was, or where it begins."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from tidewater_coordination.port import CursorKey
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.errors import Corrupt, Retryable
from tidewater_worker.dispatch.cursor import (
    Begun,
    Cursor,
    Progress,
    decode_failures,
    decode_progress,
    decode_ranges,
)
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.part import Part, policy_of
from tidewater_worker.dispatch.starting import first_offset, start_offsets
from tidewater_worker.dispatch.store import ProgressStore
from tidewater_worker.dispatch.window import Window
from tidewater_worker.filters.wanted import Wanted, make_filter
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic

log = logging.getLogger(__name__)

BROKEN_S: Final = 2.0
"""How long progress that cannot be read is left alone: everybody who pulls would look again."""
Load = Callable[[str, str], Awaitable[dict[int, bytes]]]
"""(subscription, topic) → stored progress by partition."""


def is_reset(spec: SubscriptionSpec, version: int, progress: Progress) -> bool:
    """Tell whether a resetToken is one that progress has yet to act on.

    A token that differs is older, not newer, for an owner that sees an older registry than the one
    that stored the progress: it has yet to hear of what was acted on already.
    """
    if spec.reset_token is None or spec.reset_token == progress.reset_token:
        return False
    return version >= progress.reset_version


def came_later(partition: int, stored: Mapping[int, Progress]) -> bool:
    """Tell whether a partition came after the subscription began: by what it stored elsewhere."""
    if partition in stored:
        return False
    counts = [found.partitions for found in stored.values() if found.partitions is not None]
    return any(count <= partition for count in counts)


class Opener:
    """Opens the partitions of one subscription."""

    def __init__(
        self,
        node: Node,
        store: ProgressStore,
        load: Load,
        name: str,
        uuid: str,
        topic_name: str,
        owner: Callable[[int, int], str | None],
    ) -> None:
        self._node, self._store, self._load = node, store, load
        self._name, self._uuid, self._topic_name = name, uuid, topic_name
        self._owner = owner
        self._broken: dict[int, Corrupt] = {}
        """Partitions whose progress could not be read when somebody last looked."""
        self._look_again_at = 0.0

    def key(self, part: Part) -> CursorKey:
        """Return under which key a part's progress is stored."""
        return CursorKey(self._name, self._topic_name, part.number)

    async def open(
        self,
        spec: SubscriptionSpec,
        version: int,
        topic: Topic,
        partitions: list[Partition],
        parts: dict[int, Part],
    ) -> None:
        """Add parts for partitions, from their stored progress or from `startFrom`.

        `version` is the registry's in which the spec was seen. Progress that cannot be read stops
        its own partition, and is raised when the others are open.
        """
        now, needed = self._node.clock.monotonic(), {p.number for p in partitions}
        if now < self._look_again_at and needed <= self._broken.keys():
            raise self._broken[min(needed)].with_traceback(None)
        stored = await self._load(self._name, self._topic_name)
        mine, broken = self._mine(topic, stored)
        partitions = [p for p in partitions if p.number not in broken]
        wanted = make_filter(spec.filter, topic.spec)
        begin: list[Partition] = []
        moved: dict[int, Part] = {}
        for partition in partitions:
            progress = mine.get(partition.number)
            if progress is None or is_reset(spec, version, progress):
                begin.append(partition)
                continue
            part = self._go_on(spec, topic, partition, progress, wanted)
            is_ours = progress.topic == str(topic.uuid)
            (parts if is_ours else moved)[partition.number] = part
        if moved:
            # Before anything is delivered: where the earlier topic ended is only known now.
            await self._store.save({self.key(part): part.encode for part in moved.values()})
            parts.update(moved)
            log.info("subscription %s goes on in the topic that was made again", self._name)
        if begin:
            late = {p.number for p in begin if came_later(p.number, mine)}
            begun = Begun(spec.reset_token, version, topic.spec.partitions)
            await self._begin(spec, topic, begin, late, begun, wanted, parts)
        self._broken, self._look_again_at = broken, now + BROKEN_S
        if here := needed & broken.keys():
            raise broken[min(here)]

    def _mine(
        self, topic: Topic, stored: Mapping[int, bytes]
    ) -> tuple[dict[int, Progress], dict[int, Corrupt]]:
        """Read stored progress, but none of an earlier subscription, or of another table."""
        found: dict[int, Progress] = {}
        broken: dict[int, Corrupt] = {}
        table = "" if topic.state is None else topic.state.table_uuid
        for number, data in stored.items():
            try:
                progress = decode_progress(data)
            except Corrupt as error:
                broken[number] = error
                continue
            if progress.is_of(self._uuid, str(topic.uuid), table):
                found[number] = progress
            elif not table and progress.is_of(self._uuid, "", progress.table):
                message = f"it is not known yet whether {self._topic_name} has the table of before"
                raise Retryable("PartitionOpening", message, 200)
        return found, broken

    def _go_on(
        self,
        spec: SubscriptionSpec,
        topic: Topic,
        partition: Partition,
        progress: Progress,
        wanted: Wanted | None,
    ) -> Part:
        """Go on where the last owner stopped, in this topic or an earlier one with its table."""
        cursor = decode_ranges(progress.next, progress.beyond)
        log_here, generation = partition.readable(), progress.generation
        is_ours = progress.topic == str(topic.uuid)
        # A topic that was made again has messages of its own from where its log begins.
        end = log_here.end if is_ours else min(log_here.start, log_here.end)
        lost = cursor.end - end
        if lost > 0 or not is_ours:
            # What was delivered before must not acknowledge what gets its offset next.
            cursor, generation = cursor.below(end), max(generation + 1, self._node.clock.now_us())
        if lost > 0:
            topic.counters["subscriptions_cut_back"] += 1
            log.warning(
                "subscription %s, partition %s: progress reached to %s, but what it was of ends at "
                "%s: acknowledged messages were lost; going on there",
                self._name, partition.number, cursor.end + lost, end,
            )  # fmt: skip
        failed = decode_failures(progress.next, progress.failed)
        part = self._make(
            spec, topic, partition, cursor, generation, wanted, progress.begun,
            failures={offset: times for offset, times in failed.items() if offset < end},
        )  # fmt: skip
        part.cut_back = max(lost, 0)
        return part

    async def _begin(
        self,
        spec: SubscriptionSpec,
        topic: Topic,
        partitions: list[Partition],
        late: set[int],
        begun: Begun,
        wanted: Wanted | None,
        parts: dict[int, Part],
    ) -> None:
        """Begin at `startFrom`; in partitions that came later, at their first message."""
        there = [p for p in partitions if p.number not in late]
        offsets = await start_offsets(self._node, topic, spec.start_from, there) if there else {}
        offsets |= {p.number: first_offset(p) for p in partitions if p.number in late}
        generation = self._node.clock.now_us()
        made = [
            self._make(spec, topic, p, Cursor(offsets[p.number]), generation, wanted, begun)
            for p in partitions
        ]
        # Stored before the first delivery: after a restart `latest` is still the same place.
        await asyncio.gather(*(part.make_durable() for part in made))
        await self._store.save({self.key(part): part.encode for part in made})
        parts.update({part.number: part for part in made})
        log.info("subscription %s begins at %s", self._name, offsets)

    def again(self, spec: SubscriptionSpec, part: Part) -> Part:
        """Make a part anew for another spec, at the same place."""
        wanted = make_filter(spec.filter, part.topic.spec)
        delivery = part.delivery
        return self._make(
            spec, part.topic, part.partition, delivery.cursor, delivery.generation, wanted,
            part.begun, delivery.last_lease, delivery.failures(),
        )  # fmt: skip

    def _make(
        self,
        spec: SubscriptionSpec,
        topic: Topic,
        partition: Partition,
        cursor: Cursor,
        generation: int,
        wanted: Wanted | None,
        begun: Begun,
        first_lease: int = 0,
        failures: Mapping[int, int] | None = None,
    ) -> Part:
        number = partition.number
        delivery = Delivery(
            policy_of(spec), cursor, generation, lambda key: self._owner(number, key),
            first_lease=first_lease, failures=failures,
        )  # fmt: skip
        window = Window(self._node, topic, partition, spec.isolation, wanted)
        return Part(topic, partition, self._uuid, delivery, window, begun, spec)
