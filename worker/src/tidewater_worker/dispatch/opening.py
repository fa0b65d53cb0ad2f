"""Serving a subscription from partitions that this worker has: where it was, or where it begins."""

import logging
from collections.abc import Awaitable, Callable, Mapping

from tidewater_coordination.port import CursorKey
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_worker.dispatch.cursor import (
    Cursor,
    decode_failures,
    decode_progress,
    decode_ranges,
)
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.part import Part, policy_of
from tidewater_worker.dispatch.starting import start_offsets
from tidewater_worker.dispatch.store import ProgressStore
from tidewater_worker.dispatch.window import Window
from tidewater_worker.filters.wanted import Wanted, make_filter
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic

log = logging.getLogger(__name__)

Load = Callable[[str, str], Awaitable[dict[int, bytes]]]
"""(subscription, topic) → stored progress by partition."""


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

    def key(self, part: Part) -> CursorKey:
        """Return under which key a part's progress is stored."""
        return CursorKey(self._name, self._topic_name, part.number)

    async def open(
        self,
        spec: SubscriptionSpec,
        topic: Topic,
        partitions: list[Partition],
        parts: dict[int, Part],
    ) -> None:
        """Add parts for partitions, from their stored progress or from `startFrom`."""
        stored = await self._load(self._name, self._topic_name)
        wanted = make_filter(spec.filter, topic.spec)
        begin: list[Partition] = []
        for partition in partitions:
            part = self._stored(spec, topic, partition, stored.get(partition.number), wanted)
            if part is None:
                begin.append(partition)
            else:
                parts[partition.number] = part
        if begin:
            await self._begin(spec, topic, begin, wanted, parts)

    def _stored(
        self,
        spec: SubscriptionSpec,
        topic: Topic,
        partition: Partition,
        data: bytes | None,
        wanted: Wanted | None,
    ) -> Part | None:
        """Go on where the last owner stopped; None: this partition begins anew."""
        if data is None:
            return None
        progress = decode_progress(data)
        if (progress.subscription, progress.topic) != (self._uuid, str(topic.uuid)):
            return None
        if spec.reset_token is not None and spec.reset_token != progress.reset_token:
            return None
        cursor = decode_ranges(progress.next, progress.beyond)
        return self._make(
            spec, topic, partition, cursor, progress.generation, wanted, progress.reset_token,
            failures=decode_failures(progress.next, progress.failed),
        )  # fmt: skip

    async def _begin(
        self,
        spec: SubscriptionSpec,
        topic: Topic,
        partitions: list[Partition],
        wanted: Wanted | None,
        parts: dict[int, Part],
    ) -> None:
        offsets = await start_offsets(self._node, topic, spec.start_from, partitions)
        generation = self._node.clock.now_us()
        begun = [
            self._make(
                spec, topic, p, Cursor(offsets[p.number]), generation, wanted, spec.reset_token
            )
            for p in partitions
        ]
        # Stored before the first delivery: after a restart `latest` is still the same place.
        await self._store.save({self.key(part): part.encode for part in begun})
        parts.update({part.number: part for part in begun})
        log.info("subscription %s begins at %s", self._name, offsets)

    def again(self, spec: SubscriptionSpec, part: Part) -> Part:
        """Make a part anew for another spec, at the same place."""
        wanted = make_filter(spec.filter, part.topic.spec)
        delivery = part.delivery
        return self._make(
            spec, part.topic, part.partition, delivery.cursor, delivery.generation, wanted,
            part.reset_token, delivery.last_lease, delivery.failures(),
        )  # fmt: skip

    def _make(
        self,
        spec: SubscriptionSpec,
        topic: Topic,
        partition: Partition,
        cursor: Cursor,
        generation: int,
        wanted: Wanted | None,
        token: str | None,
        first_lease: int = 0,
        failures: Mapping[int, int] | None = None,
    ) -> Part:
        number = partition.number
        delivery = Delivery(
            policy_of(spec), cursor, generation, lambda key: self._owner(number, key),
            first_lease=first_lease, failures=failures,
        )  # fmt: skip
        window = Window(self._node, topic, partition, spec.isolation, wanted)
        return Part(topic, partition, self._uuid, delivery, window, token)
