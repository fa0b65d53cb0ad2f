"""One subscription on this worker: pull, ack, nack, extend, seek, leave (G4).

Nothing runs while nobody asks: deadlines and delays take effect when the next consumer looks, and
a consumer that waits wakes up for the next of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from tidewater_coordination.port import CursorKey
from tidewater_core.crd.subscription import StartFrom, SubscriptionSpec, SubscriptionType
from tidewater_core.errors import Corrupt, Fenced, Overloaded, Retryable, TidewaterError
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.bell import Bell
from tidewater_worker.dispatch.counting import counts, described
from tidewater_worker.dispatch.cursor import RANGES_MAX
from tidewater_worker.dispatch.deadletter import DeadLetters
from tidewater_worker.dispatch.delivery import PARTITION_KEY
from tidewater_worker.dispatch.idle import Idle
from tidewater_worker.dispatch.keyshared import Ring, partition_owner
from tidewater_worker.dispatch.members import Members
from tidewater_worker.dispatch.opening import Load, Opener
from tidewater_worker.dispatch.part import MOVING_RETRY_MS, Delivered, Part
from tidewater_worker.dispatch.policy import Outcome
from tidewater_worker.dispatch.report import Refusal, Report, raise_why
from tidewater_worker.dispatch.starting import first_offset, start_offsets
from tidewater_worker.dispatch.store import SOON_S, ProgressStore
from tidewater_worker.node import Node
from tidewater_worker.reading import learn_starts
from tidewater_worker.topic import Topic

RETRY_S: Final = 0.5
"""How long a waiting pull leaves a partition alone that could not be read."""
Origin = tuple[int, int, int | None]
"""A message that a dead letter came from: partition, offset and the place of its key."""
_T = TypeVar("_T")


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
        version: int = 0,
    ) -> None:
        self.name = name
        """`namespace/name`."""
        self.uuid = uuid
        self.spec = spec
        self.version = version
        """The registry's, in which this spec was last seen."""
        self.topic_name = f"{name.partition('/')[0]}/{spec.topic}"
        self.parts: dict[int, Part] = {}
        self.broken: TidewaterError | None = None
        """Why some partition that is here cannot be served."""
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
        self.turn = 0
        """Counts looks, so that each begins with another partition or owner."""

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
        self._drop_parts([p for p in self.parts.values() if not p.is_current])
        changed = [p for p in self.parts.values() if p.spec.schema_ != topic.spec.schema_]
        if changed:
            await self._rebuild(changed)  # the topic has other columns
        missing = [p for p in topic.partitions.values() if p.number not in self.parts]
        ready = [p for p in missing if p.appender is not None and p.is_open]
        if not ready:
            self.broken = None
            return not missing
        async with self._opening:
            still = [p for p in ready if p.number not in self.parts]
            before, self.broken = self.parts.copy(), None
            try:
                if still:
                    await self._opener.open(self.spec, self.version, topic, still, self.parts)
            except Corrupt as error:
                self.broken = error  # the others are served, and have messages first
            if self.parts != before:
                self._members_changed()
        return len(ready) == len(missing) and self.broken is None

    def _drop_parts(self, parts: list[Part]) -> None:
        for part in parts:
            part.is_retired = True
            if self.parts.get(part.number) is part:
                del self.parts[part.number]
            # Not here: a slow read that is under way would hold up all other partitions.
            self._node.spawn(part.close())

    def _key(self, part: Part) -> CursorKey:
        return self._opener.key(part)

    async def change(self, spec: SubscriptionSpec, version: int) -> None:
        """Take a new spec. What is out stays acknowledgeable; a new resetToken moves it."""
        self.spec, self.version = spec, version
        self._members.change(spec.ack_deadline.seconds, is_exclusive=self._is_exclusive)
        parts = list(self.parts.values())
        token = spec.reset_token
        moved = [part for part in parts if token not in (None, part.begun.reset_token)]
        await self._rebuild([part for part in parts if part not in moved])
        if moved:
            self._drop_parts(moved)
            await self.open()
        self.notify()

    async def _rebuild(self, parts: list[Part]) -> None:
        """Deliver by the new spec from the same place."""
        for part in parts:
            await part.replace(self.spec, self._opener.again)
        self._members_changed()

    def end(self, why: TidewaterError) -> None:
        """Let every waiting consumer know that this is over here."""
        self.ended = why
        self.notify()

    def forget(self, why: TidewaterError) -> None:
        """End, and store no progress any more: the name may be another subscription's already."""
        self._drop_parts(list(self.parts.values()))
        self.end(why)

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
            self._note_failures(part)
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
        return await self._until(consumer, wait_s, lambda: self._take(consumer, limit, bytes_max))

    async def has_news(self, consumer: str, wait_s: float) -> bool:
        """Wait until there is something for a consumer; nothing is given to it.

        For a worker that serves the consumer and asks all owners at once: whoever stops to wait
        takes no message along.
        """
        return await self._until(consumer, wait_s, lambda: self._has_for(consumer))

    async def _until(self, consumer: str, wait_s: float, look: Callable[[], Awaitable[_T]]) -> _T:
        """Look again and again, until there is something or the time is over."""
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
                    found = await look()
                    left = deadline - now()
                    if found or left <= 0:
                        return found
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

    def _in_turn(self) -> list[Part]:
        """Return the parts, beginning with another one each time."""
        numbers = sorted(self.parts)
        self.turn += 1
        start = self.turn % len(numbers) if numbers else 0
        return [self.parts[number] for number in numbers[start:] + numbers[:start]]

    async def _take(self, consumer: str, limit: int, bytes_max: int) -> list[Delivered]:
        self._expire_members()
        now = self._node.clock.monotonic
        taken: list[tuple[Part, list[Delivered]]] = []
        errors: list[TidewaterError] = [self.broken] if self.broken else []
        count = size = 0
        parts = self._in_turn()
        try:
            for part in parts:
                if self.parts.get(part.number) is not part or count >= limit or size >= bytes_max:
                    continue
                allowed = partial(self._allowed, consumer, limit - count)
                taking = part.take(consumer, allowed, bytes_max - size, now)
                found = await self._look_at(part, taking, errors) or []
                taken.append((part, found))
                count += sum(len(piece.ack_ids) for piece in found)
                size += sum(piece.nbytes for piece in found)
        except BaseException:  # the consumer is gone, before it got anything
            for part, found in taken:
                part.take_back(consumer, found)
            self.notify()
            raise
        if errors and not count:
            raise_why(errors, len(parts))
        return [piece for _, found in taken for piece in found]

    async def _has_for(self, consumer: str) -> bool:
        self._expire_members()
        allowed, now = partial(self._allowed, consumer, 1), self._node.clock.monotonic
        errors: list[TidewaterError] = [self.broken] if self.broken else []
        parts = self._in_turn()
        for part in parts:
            if self.parts.get(part.number) is not part:
                continue
            if await self._look_at(part, part.has_for(consumer, allowed, now), errors):
                return True
        if errors:
            raise_why(errors, len(parts))
        return False

    def _allowed(self, consumer: str, limit: int) -> int:
        return min(limit, self.spec.max_unacked - self._holds(consumer))

    async def _look_at(
        self, part: Part, looking: Awaitable[_T], errors: list[TidewaterError]
    ) -> _T | None:
        before = part.delivery.fetched
        self._idle.used(part)
        try:
            found = await looking
            part.error = None
        except TidewaterError as error:
            part.error = error
            errors.append(error)
            return None
        if part.delivery.fetched != before:
            self.notify()  # some of it may be for others
            if self.spec.filter is not None:
                self._store.note(self._key(part), part.encode)
        self._note_failures(part)
        return found

    # ---- ack, nack, extend

    async def ack(self, ack_ids: Iterable[str]) -> Report:
        """Acknowledge deliveries; returns when that is stored."""
        report = Report()
        touched: dict[CursorKey, Part] = {}
        for part, ack_id, lease in await self._parse(ack_ids, report):
            cursor = part.delivery.cursor
            if len(cursor) >= RANGES_MAX and not cursor.touches(ack_id.offset):
                raise Overloaded("TooManyGaps", "acknowledge the oldest messages first", 1_000)
            report.settle(ack_id, part.delivery.ack(ack_id.offset, lease))
            # Also when it was acknowledged before: that may still be on its way to the store.
            touched[self._key(part)] = part
        if touched:
            self.notify()
            await self._save(touched.values())
        return report

    async def _save(self, parts: Iterable[Part]) -> None:
        """Store progress; that a partition has moved is told as something to try again."""
        parts = list(parts)
        late = [part for part in parts if not part.is_durable]
        try:
            if late:
                await asyncio.gather(*(part.make_durable() for part in late))
            await self._store.save({self._key(part): part.encode for part in parts})
        except Fenced as error:
            raise Retryable("PartitionMoving", error.message, MOVING_RETRY_MS) from error

    async def nack(self, ack_ids: Iterable[str], delay_s: float | None) -> Report:
        """Give messages back."""
        report = Report()
        touched: dict[CursorKey, Part] = {}
        now = self._node.clock.monotonic()
        for part, ack_id, lease in await self._parse(ack_ids, report):
            report.settle(ack_id, part.delivery.nack(ack_id.offset, lease, now, delay_s))
            touched[self._key(part)] = part
        self.notify()
        failed = {key: part.encode for key, part in touched.items() if self._note_failures(part)}
        if failed:
            # What fails for ever must be counted over every restart. What cannot be stored now is
            # stored with the next write.
            with suppress(TidewaterError):
                await self._store.save(failed)
        return report

    def _note_failures(self, part: Part) -> bool:
        """See to it that failed deliveries are counted also after a restart; tell if any are."""
        has_failed, part.delivery.has_failed = part.delivery.has_failed, False
        if has_failed:
            self._store.note(self._key(part), part.encode, SOON_S)
        if part.delivery.dead:
            self._bury(part)
        return has_failed

    async def extend(self, ack_ids: Iterable[str], deadline_s: float | None) -> Report:
        """Hold messages longer."""
        report = Report()
        now = self._node.clock.monotonic()
        time_s = self.spec.ack_deadline.seconds if deadline_s is None else deadline_s
        for part, ack_id, lease in await self._parse(ack_ids, report):
            report.settle(ack_id, part.delivery.extend(ack_id.offset, lease, now, time_s))
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
                report.settle(ack_id, lease)
            else:
                found.append((part, ack_id, lease))
        return found

    async def give_back(self, consumer: str, ack_ids: Iterable[str]) -> None:
        """Take back what did not reach its consumer, as if it had not been delivered."""
        for part, ack_id, _ in await self._parse(ack_ids, Report()):
            part.delivery.release(consumer, [ack_id.offset])
        self.notify()

    # ---- seek, leave

    async def seek(self, start: StartFrom) -> dict[int, int]:
        """Move to another place; returns where each partition is now, when that is stored."""
        await self.open()
        self._check_open(self.topic.partitions)
        parts = list(self.parts.values())
        offsets = await start_offsets(
            self._node, self.topic, start, [part.partition for part in parts]
        )
        for part in parts:
            async with part.lock:
                part.delivery.reset(offsets[part.number], self._node.clock.now_us())
                await part.window.close()
        self.notify()
        await self._save(parts)
        return offsets

    def _check_open(self, numbers: Iterable[int]) -> None:
        """Refuse what concerns partitions that open here: they would silently be left out."""
        for number in numbers:
            partition = self.topic.partitions.get(number)
            if partition is not None and number not in self.parts and not partition.is_elsewhere:
                said = f"partition {number} opens here; try again"
                opening = Retryable("PartitionOpening", said, MOVING_RETRY_MS)
                raise (self.broken or opening).with_traceback(None)

    async def restore(self, origins: Iterable[Origin]) -> tuple[int, int]:
        """Deliver acknowledged messages again; count them and the rest."""
        await self.open()
        origins = list(origins)
        self._check_open({number for number, _, _ in origins})
        await learn_starts(self._node, self.topic, [p.partition for p in self.parts.values()])
        touched: dict[CursorKey, Part] = {}
        restored = refused = 0
        for number, offset, key in origins:
            part = self.parts.get(number)
            if part is None or offset < first_offset(part.partition):
                refused += 1
                continue
            async with part.lock:  # a fetch that is under way counts on what is acknowledged
                if not part.delivery.room:
                    raise Overloaded("WindowFull", "too many messages are open already", 1_000)
                restored += part.delivery.restore(offset, key)
            touched[self._key(part)] = part
        if touched:
            self.notify()
            await self._save(touched.values())
        return restored, refused

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
        target = self.spec.dead_letter
        if not part.is_burying and target is not None:
            part.is_burying = True
            self._node.spawn(self._dead_letters.bury_all(self, part, target.topic))

    # ---- status

    def report(self) -> dict[str, Any]:
        """Count what is served here, for the operator and for metrics."""
        self._expire_members()
        consumers, now_us = len(self._members.names), self._node.clock.now_us()
        return counts(self.name, self.spec.topic, consumers, self.parts.values(), now_us)

    async def status(self) -> dict[str, Any]:
        """Describe the subscription: how far, who, how many wait."""
        with suppress(TidewaterError):
            await self.open()
        self._expire_members()
        holds = {name: self._holds(name) for name in self._members.names}
        return described(self.name, self.spec, holds, self.parts)
