"""One partition's messages between fetched and acknowledged, for one subscription. Pure.

    fetched ─▶ waiting ─take─▶ out ─ack─▶ gone (in the cursor)
                 ▲  ▲           │
                 │  └─ delayed ◀┤ nack, deadline: counted, backoff       ┌─ buried ─▶ gone
                 └──────────────┤ its order group went back: not counted │
                                └ delivered too often ─▶ dead ───────────┴─ revived ─▶ delayed

Messages that must keep their order form a group: the whole partition (`Order.PARTITION`), or the
messages of one key (`Order.KEY`). Within a group messages go out by offset, to one consumer at
a time: to the one that still holds some of it, else to the one that `owner` names. When a message
of a group goes back, those after it that are out go back with it, so that whoever gets them next
gets them in order. A group whose first message is delayed or dead waits for it.

Time is an argument; nothing happens on its own. Whoever waits asks `next_event` when to look again.
Bounded (G6): at most `WINDOW_MAX` messages are open; when they are, a consumer may take keys of
another that does not come for them (the order within a key holds all the same).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from tidewater_worker.dispatch.cursor import RANGES_MAX, Cursor
from tidewater_worker.dispatch.opened import Group, Open
from tidewater_worker.dispatch.policy import Leased, Order, Outcome, Policy

WINDOW_MAX: Final = 50_000
"""Messages of a partition that are fetched and not acknowledged."""
assert WINDOW_MAX <= RANGES_MAX, "what is open may all lie between acknowledged ranges"
PARTITION_KEY: Final = -1
"""The key of the one group of `Order.PARTITION`."""
_SLACK: Final = 1_024
"""Outdated timers that are carried along before they are swept."""


class Delivery:
    """The deliveries of one partition to one subscription."""

    def __init__(
        self,
        policy: Policy,
        cursor: Cursor,
        generation: int,
        owner: Callable[[int], str | None],
        window_max: int = WINDOW_MAX,
        first_lease: int = 0,
        failures: Mapping[int, int] | None = None,
    ) -> None:
        self.policy = policy
        self.cursor = cursor
        self.generation = generation
        """Counts seeks."""
        self.fetched = cursor.next
        """Offsets below this were offered."""
        self.out_by: Counter[str] = Counter()
        """How many messages each consumer holds."""
        self.dead: dict[int, str] = {}
        """Messages that were delivered too often, and what happened last."""
        self.redeliveries = 0
        """Deliveries that were not a message's first, since this began."""
        self._owner = owner
        self._window_max = window_max
        self._open: dict[int, Open] = {}
        self._groups: dict[int, Group] = {}
        self._queues: dict[str, list[tuple[int, int]]] = {}
        """consumer → heap of (first offset, key) of groups that it may have next."""
        self._loose: list[int] = []
        """Heap of offsets without a group that can go."""
        self._timers: list[tuple[float, int]] = []
        self.first_lease = first_lease
        """Leases up to this were given by a delivery that this one has replaced."""
        self._lease = first_lease
        self._failures = dict(failures or ())
        """offset → failed deliveries, also of messages that are not fetched yet."""
        self.has_failed = False
        """A delivery has failed since somebody last stored that."""

    # ---- what there is

    @property
    def room(self) -> int:
        """How many messages more can be open."""
        return max(self._window_max - len(self._open), 0)

    @property
    def fetch_at(self) -> int:
        """The next offset that is worth fetching."""
        return self.cursor.acknowledged_from(self.fetched)

    @property
    def open_count(self) -> int:
        """How many messages are fetched and not acknowledged."""
        return len(self._open)

    @property
    def last_lease(self) -> int:
        """The newest lease."""
        return self._lease

    def deliveries(self, offset: int) -> int:
        """Tell how often an open message was delivered."""
        found = self._open.get(offset)
        return found.deliveries if found else 0

    def failures(self) -> dict[int, int]:
        """Return how often deliveries failed, of messages for which one did.

        One that is under way has not failed: a worker's restart is not the consumer's fault.
        """
        return {offset: n for offset, n in self._failures.items() if offset not in self.cursor}

    def next_event(self) -> float | None:
        """Return when the next deadline or delay ends; None: nothing is timed."""
        while self._timers:
            due, offset = self._timers[0]
            message = self._open.get(offset)
            if message is not None and message.due == due:
                return due
            heappop(self._timers)
        return None

    # ---- in

    def offer(self, base: int, end: int, keys: Mapping[int, int | None]) -> None:
        """Take the fetched messages of [base, end); offsets not among them count as acknowledged.

        `keys` has the messages by offset, in order: what orders each with `Order.KEY`, None for no
        key.
        """
        assert base >= self.fetched, "messages are offered in order"
        assert self.cursor.acknowledged_from(self.fetched) >= base, "nothing is left out"
        if len(keys) < end - base:
            at = base
            for offset in keys:
                assert at <= offset < end, "messages are in order, and of this range"
                self.cursor.add(at, offset)
                at = offset + 1
            self.cursor.add(at, end)
        for start, stop in self.cursor.open_ranges(base, end):
            for offset in range(start, stop):
                self._add(offset, keys[offset])
        self.fetched = end

    def restore(self, offset: int, key: int | None) -> bool:
        """Take an acknowledgement back, so that the message is delivered again."""
        if not self.cursor.remove(offset):
            return False
        self._failures.pop(offset, None)
        if offset < self.fetched:
            self._add(offset, key)
        return True

    def _add(self, offset: int, key: int | None) -> None:
        if self.policy.order is Order.PARTITION:
            key = PARTITION_KEY
        elif self.policy.order is Order.NONE:
            key = None
        group = None
        if key is not None:
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = Group(key)
        message = Open(offset, group)
        self._open[offset] = message
        message.deliveries = self._failures.get(offset, 0)
        if self._is_dead(message):
            message.dead = self.dead[offset] = "MaxDeliveries"
        self._wait(message)
        if group is not None:
            self._queue(group)

    # ---- out

    def take(self, consumer: str, now: float, limit: int) -> list[Leased]:
        """Give a consumer the next messages that are its."""
        self.advance(now)
        taken: list[Leased] = []
        while len(taken) < limit:
            message = self._next(consumer)
            if message is None:
                break
            taken.append(self._lease_out(message, consumer, now))
        if len(taken) < limit and self.policy.order is Order.KEY and not self.room:
            taken += self._take_idle_keys(consumer, now, limit - len(taken))
        return taken

    def _next(self, consumer: str) -> Open | None:
        loose = self._loose
        while loose and not self._can_go(loose[0]):
            heappop(loose)
        group = self._next_group(consumer)
        if group is not None and (not loose or group.waiting[0] < loose[0]):
            heappop(self._queues[consumer])
            group.queued = None
            return self._open[heappop(group.waiting)]
        return self._open[heappop(loose)] if loose else None

    def _can_go(self, offset: int) -> bool:
        message = self._open.get(offset)
        return message is not None and message.can_go

    def _next_group(self, consumer: str) -> Group | None:
        """Return the group whose first message is the consumer's next; it stays queued."""
        queue = self._queues.get(consumer)
        while queue:
            offset, key = queue[0]
            group = self._groups.get(key)
            if group is None or group.queued != (consumer, offset):
                heappop(queue)
                continue
            first = self._first(group)
            if first is not None and first.offset == offset and self._who(group) == consumer:
                return group
            heappop(queue)
            group.queued = None
            self._queue(group)
        return None

    def _first(self, group: Group) -> Open | None:
        """Return the group's first waiting message if it can go."""
        waiting = group.waiting
        while waiting:
            message = self._open.get(waiting[0])
            if message is not None and message.holder is None:
                return message if message.can_go else None
            heappop(waiting)
        return None

    def _who(self, group: Group) -> str | None:
        return group.holder or self._owner(group.key)

    def _queue(self, group: Group) -> None:
        """Put a group where its next consumer finds it; every change of a group ends here."""
        first = self._first(group)
        if first is None:
            if not group.waiting and not group.out:
                self._groups.pop(group.key, None)
            return
        who = self._who(group)
        if who is not None and group.queued != (who, first.offset):
            group.queued = (who, first.offset)
            heappush(self._queues.setdefault(who, []), (first.offset, group.key))

    def _take_idle_keys(self, consumer: str, now: float, limit: int) -> list[Leased]:
        """Take from keys that nobody holds and whose owner does not come for them."""
        taken: list[Leased] = []
        for other in [name for name in self._queues if name != consumer]:
            while len(taken) < limit and (group := self._next_group(other)) is not None:
                if group.out:
                    break
                heappop(self._queues[other])
                group.queued = None
                message = self._open[heappop(group.waiting)]
                taken.append(self._lease_out(message, consumer, now))
        return taken

    def _lease_out(self, message: Open, consumer: str, now: float) -> Leased:
        self._lease += 1
        message.lease = self._lease
        message.deliveries += 1
        self.redeliveries += message.deliveries > 1
        message.holder = consumer
        self.out_by[consumer] += 1
        self._set_timer(message, now + self.policy.ack_deadline_s)
        group = message.group
        if group is not None:
            group.out[message.offset] = message
            self._queue(group)
        return Leased(message.offset, message.lease, message.deliveries)

    # ---- back

    def ack(self, offset: int, lease: int | None) -> Outcome:
        """Acknowledge a delivery; `lease` None: it was made by an owner before this one."""
        if offset in self.cursor:
            return Outcome.DONE
        message = self._open.get(offset)
        if message is None:
            if lease is not None:
                return Outcome.STALE
            self.cursor.add(offset, offset + 1)
            return Outcome.DONE
        if message.lease != lease and (lease is not None or message.holder is not None):
            return Outcome.STALE
        self._settle(message)
        return Outcome.DONE

    def nack(self, offset: int, lease: int | None, now: float, delay_s: float | None) -> Outcome:
        """Give a message back, to be delivered again after `delay_s` (None: the backoff)."""
        message = self._open.get(offset)
        if message is None or message.lease != lease:
            return Outcome.STALE
        if message.holder is not None:
            self._give_back(message, now, "Nacked", delay_s)
        return Outcome.DONE

    def extend(self, offset: int, lease: int | None, now: float, deadline_s: float) -> Outcome:
        """Let a consumer hold a message until `deadline_s` from now."""
        message = self._open.get(offset)
        if message is None or message.lease != lease or message.holder is None:
            return Outcome.STALE
        self._set_timer(message, now + deadline_s)
        return Outcome.DONE

    def release(self, consumer: str, offsets: Sequence[int] | None = None) -> None:
        """Take everything (or some) back from a consumer, as if it had not been delivered."""
        held = [
            message
            for message in (
                self._open.values()
                if offsets is None
                else [self._open[offset] for offset in offsets if offset in self._open]
            )
            if message.holder == consumer
        ]
        groups = {id(message.group): message.group for message in held}
        if offsets is not None:  # it never reached the consumer
            self.redeliveries -= sum(message.deliveries > 1 for message in held)
        for message in held:
            if message.holder is not None:
                self._return(message)
                self._take_back_later(message)
                if message.group is None:
                    heappush(self._loose, message.offset)
        for group in groups.values():
            if group is not None:
                self._queue(group)

    def advance(self, now: float) -> None:
        """Let deadlines and delays that are over have their effect."""
        while self._timers and self._timers[0][0] <= now:
            due, offset = heappop(self._timers)
            message = self._open.get(offset)
            if message is None or message.due != due:
                continue
            if message.holder is not None:
                self._give_back(message, now, "AckDeadline", None)
            else:
                message.due = 0.0
                self._can_go_again(message)

    def bury(self, offset: int) -> None:
        """Note that a dead message is in the dead-letter topic."""
        message = self._open.get(offset)
        if message is not None and message.dead is not None:
            self._settle(message)

    def revive(self, offset: int, now: float) -> None:
        """Deliver a dead message again after all: it could not be put elsewhere."""
        message = self._open.get(offset)
        if message is None or message.dead is None:
            return
        del self.dead[offset]
        message.dead = None
        self._set_timer(message, now + max(self.policy.backoff_max_s, 0.001))

    def reset(self, offset: int, generation: int) -> None:
        """Begin at `offset`; every delivery made so far is over."""
        self.cursor = Cursor(offset)
        self.generation = max(generation, self.generation + 1)
        self.fetched = offset
        self.out_by.clear()
        self.dead.clear()
        self._open.clear()
        self._groups.clear()
        self._queues.clear()
        self._loose.clear()
        self._timers.clear()
        self._failures.clear()

    def reassign(self) -> None:
        """Ask `owner` anew who gets what: consumers came or went."""
        self._queues.clear()
        for group in list(self._groups.values()):
            group.queued = None
            self._queue(group)

    def _settle(self, message: Open) -> None:
        """Put a message into the cursor."""
        offset = message.offset
        del self._open[offset]
        self.dead.pop(offset, None)
        self._failures.pop(offset, None)
        self._forget_holder(message)
        self.cursor.add(offset, offset + 1)
        if message.group is not None:
            self._queue(message.group)

    def _give_back(self, message: Open, now: float, reason: str, delay_s: float | None) -> None:
        """End a delivery that failed."""
        self._forget_holder(message)
        self._failures[message.offset] = message.deliveries
        self.has_failed = True
        if self._is_dead(message):
            message.dead = self.dead[message.offset] = reason
            message.due = 0.0
            self._wait(message)
        else:
            wait_s = self.policy.backoff_s(message.deliveries) if delay_s is None else delay_s
            if wait_s > 0:
                self._set_timer(message, now + wait_s)
            else:
                message.due = 0.0
            self._wait(message)
        self._take_back_later(message)
        if message.group is not None:
            self._queue(message.group)

    def _is_dead(self, message: Open) -> bool:
        limit = self.policy.deliveries_max
        return limit is not None and message.deliveries >= limit

    def _take_back_later(self, message: Open) -> None:
        """Give back what is out after a message of its group: it must not overtake it."""
        if message.group is not None:
            for later in [m for m in message.group.out.values() if m.offset > message.offset]:
                self._return(later)

    def _return(self, message: Open) -> None:
        """End a delivery that does not count."""
        self._forget_holder(message)
        message.deliveries -= 1
        message.due = 0.0
        if message.group is not None:
            heappush(message.group.waiting, message.offset)

    def _forget_holder(self, message: Open) -> None:
        if message.holder is None:
            return
        self.out_by[message.holder] -= 1
        if not self.out_by[message.holder]:
            del self.out_by[message.holder]
        message.holder = None
        if message.group is not None:
            message.group.out.pop(message.offset, None)

    def _wait(self, message: Open) -> None:
        """Put a message among the waiting ones; its group's queue is the caller's matter."""
        if message.group is not None:
            heappush(message.group.waiting, message.offset)
        elif message.can_go:
            heappush(self._loose, message.offset)

    def _can_go_again(self, message: Open) -> None:
        if message.group is not None:
            self._queue(message.group)
        else:
            heappush(self._loose, message.offset)

    def _set_timer(self, message: Open, due: float) -> None:
        message.due = due
        heappush(self._timers, (due, message.offset))
        if len(self._timers) > 2 * len(self._open) + _SLACK:
            self._timers = [(m.due, m.offset) for m in self._open.values() if m.due]
            heapify(self._timers)
