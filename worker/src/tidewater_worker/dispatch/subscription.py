"""One subscription on this worker: pull, ack, nack, extend, seek, leave (G4).

Nothing runs while nobody asks: deadlines and delays take effect when the next consumer looks, and
a consumer that waits wakes up for the next of them.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from tidewater_core.crd.subscription import StartFrom, SubscriptionSpec, SubscriptionType
from tidewater_core.errors import Fenced, Overloaded, Retryable, TidewaterError
from tidewater_worker.coordination.port import CursorKey
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.bell import Bell
from tidewater_worker.dispatch.deadletter import DeadLetters
from tidewater_worker.dispatch.delivery import PARTITION_KEY
from tidewater_worker.dispatch.idle import Idle
from tidewater_worker.dispatch.keyshared import Ring, partition_owner
from tidewater_worker.dispatch.members import Members
from tidewater_worker.dispatch.opening import Load, Opener
from tidewater_worker.dispatch.part import Delivered, Part
from tidewater_worker.dispatch.policy import Outcome
from tidewater_worker.dispatch.report import Refusal, Report
from tidewater_worker.dispatch.starting import start_offsets
from tidewater_worker.dispatch.store import ProgressStore
from tidewater_worker.node import Node
from tidewater_worker.topic import Topic

RANGES_MAX: Final = 100_000
"""Acknowledged ranges beyond the contiguous offset; past it only the gaps can be filled."""
RETRY_S: Final = 0.5
"""How long a waiting pull leaves a partition alone that could not be read."""
log = logging.getLogger(__name__)


class Subscription:
    """A subscription whose partitions on this worker are served here."""

    def __init__(
        self,
        node: Node,
        store: ProgressStore,
        bell: Bell,
        dead_letters: DeadLetters,
        idle: Idle,
        load: Load,
        name: str,
        uuid: str,
        spec: SubscriptionSpec,
    ) -> None:
        self.name = name
        """`namespace/name`."""
        self.uuid = uuid
        self.spec = spec
        self.topic_name = f"{name.partition('/')[0]}/{spec.topic}"
        self.parts: dict[int, Part] = {}
        self.ended: TidewaterError | None = None
        """Why it is no longer served here."""
        self._node, self._store, self._bell = node, store, bell
        self._dead_letters = dead_letters
        self._idle = idle
        self._opener = Opener(node, store, load, name, uuid, self.topic_name, self._owner)
        self._members = Members(spec.ack_deadline.seconds, is_exclusive=self._is_exclusive)
        self._ring = Ring([])
        self._waiters: set[asyncio.Event] = set()
        self._opening = asyncio.Lock()
        self._turn = 0

    @property
    def _is_exclusive(self) -> bool:
        return self.spec.type is SubscriptionType.EXCLUSIVE

    # ---- partitions

    @property
    def topic(self) -> Topic:
        """The topic as this worker has it."""
        if self.ended is not None:
            raise self.ended
        return self._node.topic(*self.topic_name.split("/"))

    async def open(self) -> bool:
        """Serve the partitions that are here now; tell whether all that could be are open."""
        topic = self.topic
        await self._drop_parts([p for p in self.parts.values() if not p.is_current])
        changed = [part for part in self.parts.values() if part.spec is not topic.spec]
        if changed:
            await self._rebuild(changed)  # the topic has other columns
        missing = [p for p in topic.partitions.values() if p.number not in self.parts]
        ready = [p for p in missing if p.appender is not None and p.is_open]
        if ready:
            async with self._opening:
                still = [p for p in ready if p.number not in self.parts]
                if still:
                    await self._opener.open(self.spec, topic, still, self.parts)
                    self._members_changed()
        return len(ready) == len(missing)

    async def _drop_parts(self, parts: list[Part]) -> None:
        for part in parts:
            part.is_retired = True
            if self.parts.get(part.number) is part:
                del self.parts[part.number]
            async with part.lock:
                await part.window.close()

    def _key(self, part: Part) -> CursorKey:
        return self._opener.key(part)

    async def change(self, spec: SubscriptionSpec) -> None:
        """Take a new spec. What is out stays acknowledgeable; a new resetToken moves it."""
        before, self.spec = self.spec, spec
        self._members.change(spec.ack_deadline.seconds, is_exclusive=self._is_exclusive)
        resets = spec.reset_token is not None and spec.reset_token != before.reset_token
        parts = list(self.parts.values())
        if resets:
            await self._drop_parts(parts)
            await self.open()
        else:
            await self._rebuild(parts)
        self.notify()

    async def _rebuild(self, parts: list[Part]) -> None:
        """Deliver by the new spec from the same place."""
        for part in parts:
            async with part.lock:
                fresh = self._opener.again(self.spec, part)
                await part.window.close()
                part.delivery, part.window = fresh.delivery, fresh.window
                part.spec = part.topic.spec
        self._members_changed()

    def end(self, why: TidewaterError) -> None:
        """Let every waiting consumer know that this is over here."""
        self.ended = why
        self.notify()

    # ---- members

    @property
    def consumers(self) -> list[str]:
        """The consumers that are here."""
        self._expire_members()
        return self._members.names

    def _owner(self, partition: int, key: int) -> str | None:
        if key != PARTITION_KEY:
            return self._ring.owner(key)
        names = self._members.names
        if self.spec.type is SubscriptionType.EXCLUSIVE:
            return names[0] if names else None
        return partition_owner(partition, names)

    def _members_changed(self) -> None:
        if self.spec.type is SubscriptionType.KEY_SHARED:
            self._ring = Ring(self._members.names)
        if self.spec.type is not SubscriptionType.SHARED:
            for part in self.parts.values():
                part.delivery.reassign()
        self.notify()

    def _holds(self, consumer: str) -> int:
        return sum(part.delivery.out_by[consumer] for part in self.parts.values())

    def _expire_members(self) -> None:
        now = self._node.clock.monotonic()
        for part in self.parts.values():
            part.delivery.advance(now)
        if self._members.expire(now, lambda name: bool(self._holds(name))):
            self._members_changed()

    def notify(self) -> None:
        """Let the waiting consumers look again."""
        for waiter in self._waiters:
            waiter.set()

    # ---- pull

    async def pull(
        self, consumer: str, limit: int, wait_s: float, bytes_max: int
    ) -> list[Delivered]:
        """Return the consumer's next messages; wait for some if there are none."""
        await self.open()
        self._expire_members()
        now = self._node.clock.monotonic
        if self._members.enter(consumer, now()):
            self._members_changed()
        deadline = now() + wait_s
        woken = asyncio.Event()
        self._waiters.add(woken)
        try:
            with self._bell.listen(self.topic, woken):
                while True:
                    woken.clear()
                    self._bell.watch(self.topic)
                    delivered = await self._take(consumer, limit, bytes_max)
                    left = deadline - now()
                    if delivered or left <= 0:
                        return delivered
                    await self._wait(woken, left)
                    await self.open()
        finally:
            self._waiters.discard(woken)
            self._members.leave_wait(consumer, now())

    async def _wait(self, woken: asyncio.Event, left_s: float) -> None:
        now = self._node.clock.monotonic()
        moments = [part.delivery.next_event() for part in self.parts.values()]
        if self.spec.type is not SubscriptionType.SHARED:
            moments.append(self._members.next_expiry())
        times = [moment - now for moment in moments if moment is not None]
        if any(part.error is not None for part in self.parts.values()):
            times.append(RETRY_S)
        wait_s = max(min([left_s, *times]), 0.001)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await woken.wait()

    async def _take(self, consumer: str, limit: int, bytes_max: int) -> list[Delivered]:
        self._expire_members()
        numbers = sorted(self.parts)
        self._turn += 1
        start = self._turn % len(numbers) if numbers else 0
        delivered: list[Delivered] = []
        errors: list[TidewaterError] = []
        count = size = 0
        for number in numbers[start:] + numbers[:start]:
            part = self.parts.get(number)
            if part is None or count >= limit or size >= bytes_max:
                continue
            found = await self._take_from(part, consumer, limit - count, bytes_max - size, errors)
            delivered += found
            count += sum(len(piece.ack_ids) for piece in found)
            size += sum(piece.batch.nbytes for piece in found)
        if errors and not delivered:
            self._raise(errors, len(numbers))
        return delivered

    async def _take_from(
        self,
        part: Part,
        consumer: str,
        limit: int,
        bytes_max: int,
        errors: list[TidewaterError],
    ) -> list[Delivered]:
        before = part.delivery.fetched
        allowed = self.spec.max_unacked
        self._idle.used(part)
        try:
            found = await part.take(
                consumer,
                lambda: min(limit, allowed - self._holds(consumer)),
                bytes_max,
                self._node.clock.monotonic,
            )
            part.error = None
        except TidewaterError as error:
            part.error = error
            errors.append(error)
            return []
        if part.delivery.fetched != before:
            self.notify()  # some of it may be for others
            if self.spec.filter is not None:
                self._store.note(self._key(part), part.encode)
        if part.delivery.dead:
            self._bury(part)
        return found

    def _raise(self, errors: list[TidewaterError], partitions: int) -> None:
        """Say why there is nothing, unless it passes by itself and others are fine."""
        lasting = [error for error in errors if not isinstance(error, Retryable)]
        if lasting:
            raise lasting[0]
        if len(errors) == partitions:
            raise errors[0]

    # ---- ack, nack, extend

    async def ack(self, ack_ids: Iterable[str]) -> Report:
        """Acknowledge deliveries; returns when that is stored."""
        report = Report()
        touched: dict[CursorKey, Part] = {}
        for part, ack_id, lease in await self._parse(ack_ids, report):
            cursor = part.delivery.cursor
            if len(cursor) >= RANGES_MAX and ack_id.offset != cursor.next:
                raise Overloaded("TooManyGaps", "acknowledge the oldest messages first", 1_000)
            self._settle(report, ack_id, part.delivery.ack(ack_id.offset, lease))
            # Also when it was acknowledged before: that may still be on its way to the store.
            touched[self._key(part)] = part
        if touched:
            self.notify()
            await self._store.save({key: part.encode for key, part in touched.items()})
        return report

    async def nack(self, ack_ids: Iterable[str], delay_s: float | None) -> Report:
        """Give messages back."""
        report = Report()
        now = self._node.clock.monotonic()
        for part, ack_id, lease in await self._parse(ack_ids, report):
            self._settle(report, ack_id, part.delivery.nack(ack_id.offset, lease, now, delay_s))
            if part.delivery.dead:
                self._bury(part)
        self.notify()
        return report

    async def extend(self, ack_ids: Iterable[str], deadline_s: float | None) -> Report:
        """Hold messages longer."""
        report = Report()
        now = self._node.clock.monotonic()
        time_s = self.spec.ack_deadline.seconds if deadline_s is None else deadline_s
        for part, ack_id, lease in await self._parse(ack_ids, report):
            self._settle(report, ack_id, part.delivery.extend(ack_id.offset, lease, now, time_s))
        return report

    async def _parse(
        self, ack_ids: Iterable[str], report: Report
    ) -> list[tuple[Part, AckId, int | None]]:
        """Find what ids name; all are read before the first has an effect."""
        parsed = [AckId.parse(text) for text in ack_ids]
        await self.open()
        found: list[tuple[Part, AckId, int | None]] = []
        for ack_id in parsed:
            part = self.parts.get(ack_id.partition)
            if part is None:
                self.topic.partition(ack_id.partition)
                report.refused.append(
                    Refusal(str(ack_id), "PartitionOpening", "its partition opens here; try again")
                )
                continue
            lease = part.lease_of(ack_id)
            if isinstance(lease, Outcome):
                self._settle(report, ack_id, lease)
            else:
                found.append((part, ack_id, lease))
        return found

    def _settle(self, report: Report, ack_id: AckId, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            report.done += 1
        else:
            report.refused.append(
                Refusal(
                    str(ack_id), "Stale", "this delivery is over: the message was given to another "
                    "consumer, given back, or the subscription was moved",
                )
            )  # fmt: skip

    # ---- seek, leave

    async def seek(self, start: StartFrom) -> dict[int, int]:
        """Move to another place; returns where each partition is now, when that is stored."""
        await self.open()
        parts = list(self.parts.values())
        if not parts:
            raise Retryable("PartitionOpening", "no partition is open on this worker yet", 200)
        offsets = await start_offsets(
            self._node, self.topic, start, [part.partition for part in parts]
        )
        for part in parts:
            async with part.lock:
                part.delivery.reset(offsets[part.number], self._node.clock.now_us())
                await part.window.close()
        self.notify()
        await self._store.save({self._key(part): part.encode for part in parts})
        return offsets

    async def restore(self, origins: Iterable[tuple[int, int, int | None]]) -> tuple[int, int]:
        """Deliver acknowledged messages (partition, offset, key) again; count them and the rest."""
        await self.open()
        touched: dict[CursorKey, Part] = {}
        restored = refused = 0
        for number, offset, key in origins:
            part = self.parts.get(number)
            if part is None or offset < self._first_kept(part):
                refused += 1
                continue
            if not part.delivery.room:
                raise Overloaded("WindowFull", "too many messages are open already", 1_000)
            restored += part.delivery.restore(offset, key)
            touched[self._key(part)] = part
        if touched:
            self.notify()
            await self._store.save({key: part.encode for key, part in touched.items()})
        return restored, refused

    def _first_kept(self, part: Part) -> int:
        return min(part.partition.table.start, part.partition.readable().start)

    def leave(self, consumer: str) -> None:
        """Forget a consumer; its messages go to others at once, and no delivery is counted."""
        for part in self.parts.values():
            part.delivery.release(consumer)
        if self._members.remove(consumer):
            self._members_changed()
        self.notify()

    def touch(self, consumer: str) -> None:
        """Note a sign of life of a consumer."""
        self._members.touch(consumer, self._node.clock.monotonic())

    # ---- dead letters

    def _bury(self, part: Part) -> None:
        if not part.is_burying and self.spec.dead_letter is not None:
            part.is_burying = True
            self._node.spawn(self._bury_all(part))

    async def _bury_all(self, part: Part) -> None:
        """Put dead messages into the dead-letter topic, or let them live on if that fails."""
        target = self.spec.dead_letter
        assert target is not None
        try:
            while part.delivery.dead and part.is_current:
                try:
                    buried = await self._dead_letters.bury(self, part, target.topic)
                except TidewaterError as error:
                    log.warning("%s: no dead letters into %s: %s", self.name, target.topic, error)
                    part.error = error
                    for offset in list(part.delivery.dead):
                        part.delivery.revive(offset, self._node.clock.monotonic())
                    break
                for offset in buried:
                    part.delivery.bury(offset)
                with suppress(Fenced):
                    await self._store.save({self._key(part): part.encode})
        except TidewaterError as error:
            # In memory they are buried; the store gets it with the next write.
            log.warning("%s: progress of dead letters is not stored yet: %s", self.name, error)
        finally:
            part.is_burying = False
            self.notify()

    # ---- status

    async def status(self) -> dict[str, Any]:
        """Describe the subscription: how far, who, how many wait."""
        with suppress(TidewaterError):
            await self.open()
        self._expire_members()
        parts = [self.parts[number].status() for number in sorted(self.parts)]
        return {
            "namespace": self.name.partition("/")[0],
            "name": self.name.partition("/")[2],
            "topic": self.spec.topic,
            "type": self.spec.type.value,
            "isolation": self.spec.isolation.value,
            "lag": sum(int(part["lag"]) for part in parts),  # type: ignore[call-overload]
            "unacked": sum(int(part["unacked"]) for part in parts),  # type: ignore[call-overload]
            "consumers": [
                {"name": name, "unacked": self._holds(name)} for name in self._members.names
            ],
            "partitions": parts,
        }
