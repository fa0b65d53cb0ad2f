"""Deliveries under any sequence of events: nothing lost, in order, no ack undone (G4)."""

from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tidewater_worker.dispatch.cursor import (
    Cursor,
    decode_failures,
    decode_ranges,
    encode_failures,
    encode_ranges,
)
from tidewater_worker.dispatch.delivery import PARTITION_KEY, Delivery
from tidewater_worker.dispatch.keyshared import Ring, partition_owner
from tidewater_worker.dispatch.policy import Leased, Order, Outcome, Policy

CONSUMERS = ("a", "b", "c")
WINDOW = 30
keys = st.one_of(st.none(), st.sampled_from([1, 2**31, 2**32 - 5]))


class Deliveries(RuleBasedStateMachine):
    """One partition of one subscription; the model is a dictionary and a few sets."""

    order: ClassVar[Order]

    @initialize(
        limit=st.sampled_from([None, 2]),
        initial=st.sampled_from([0.0, 1.0]),
        fresh=st.lists(st.tuples(keys, st.just(True)), min_size=8, max_size=WINDOW),
        pulls=st.lists(st.sampled_from(CONSUMERS), min_size=1, max_size=3),
    )
    def begin(
        self,
        limit: int | None,
        initial: float,
        fresh: list[tuple[int | None, bool]],
        pulls: list[str],
    ) -> None:
        self.policy = Policy(self.order, 10.0, limit, initial, 2.0, 4.0)
        self.now = 100.0
        self.members: list[str] = []
        self.keys: dict[int, int | None] = {}
        """Every message there is."""
        self.acked: set[int] = set()
        self.out: dict[int, tuple[str, int]] = {}
        """offset → consumer and lease: deliveries that the model knows to be under way."""
        self.given: list[tuple[int, Leased]] = []
        """Every delivery ever made, with the incarnation of the owner that made it."""
        self.revived: set[int] = set()
        """Dead ones that could not be put elsewhere."""
        self.replayed: set[int] = set()
        """By a person's wish these come after later ones."""
        self.incarnation = 0
        self.end = 0
        self.delivery = Delivery(self.policy, Cursor(), 0, self.owner, WINDOW)
        # Each run leaves some rules out: it should have something to work on all the same.
        self.publish_and_fetch(fresh)
        for consumer in pulls:
            self.pull(consumer, 4)

    def owner(self, key: int) -> str | None:
        if key == PARTITION_KEY:
            return partition_owner(0, self.members)
        return Ring(self.members).owner(key)

    def group(self, offset: int) -> Any:
        if self.order is Order.PARTITION:
            return "all"
        return self.keys[offset] if self.order is Order.KEY else None

    # ---- events

    @rule(fresh=st.lists(st.tuples(keys, st.booleans()), min_size=1, max_size=12))
    def publish_and_fetch(self, fresh: list[tuple[int | None, bool]]) -> None:
        fresh = fresh[: self.delivery.room]
        base = self.delivery.fetch_at
        for i, (key, _) in enumerate(fresh):
            self.keys.setdefault(base + i, key)
        known = [self.keys[base + i] for i in range(len(fresh))]
        wanted = [wanted or base + i < self.end for i, (_, wanted) in enumerate(fresh)]
        messages = {base + i: key for i, key in enumerate(known) if wanted[i]}
        self.delivery.offer(base, base + len(known), messages)
        self.acked |= {base + i for i, is_wanted in enumerate(wanted) if not is_wanted}
        self.end = max(self.end, base + len(fresh))

    @rule(pulls=st.lists(st.sampled_from(CONSUMERS), min_size=1, max_size=4))
    def all_pull(self, pulls: list[str]) -> None:
        for consumer in pulls:
            self.pull(consumer, 3)

    @rule(consumer=st.sampled_from(CONSUMERS), limit=st.integers(1, 6))
    def pull(self, consumer: str, limit: int) -> None:
        if consumer not in self.members:
            self.members.append(consumer)
            self.delivery.reassign()
        self.delivery.advance(self.now)
        self.sync()
        for leased in self.delivery.take(consumer, self.now, limit):
            self.check_lease(consumer, leased)
            self.out[leased.offset] = (consumer, leased.lease)
            self.given.append((self.incarnation, leased))

    def check_lease(self, consumer: str, leased: Leased) -> None:
        offset = leased.offset
        assert offset not in self.acked, f"G4: {offset} was acknowledged and is delivered again"
        assert offset not in self.out, f"G4: {offset} is with two consumers"
        limit = self.policy.deliveries_max
        assert limit is None or leased.delivery <= limit or offset in self.revived
        group = self.group(offset)
        if group is None:
            return
        for other in self.keys:
            if self.group(other) != group or other in self.acked or other >= self.end:
                continue
            if other in self.out:
                assert self.out[other][0] == consumer, f"G4: {group} is with two consumers"
                late = offset in self.replayed or other < offset
                assert late, f"G4: {offset} after {other} of the same group"
            else:
                assert other >= offset, f"G4: {offset} overtakes {other}"

    def sync(self) -> None:
        """Forget the deliveries that the machine ended by itself: deadlines and take-backs."""
        for offset, (_, lease) in list(self.out.items()):
            message = self.delivery._open.get(offset)
            if message is None or message.lease != lease or message.holder is None:
                del self.out[offset]

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        incarnation, leased = data.draw(st.sampled_from(self.given[-20:]))
        offset = leased.offset
        lease = leased.lease if incarnation == self.incarnation else None
        was_acked = offset in self.acked
        self.sync()
        held = self.out.get(offset)
        outcome = self.delivery.ack(offset, lease)
        if was_acked:
            assert outcome is Outcome.DONE
        elif held is not None and held[1] != lease:
            assert outcome is Outcome.STALE, "it is with somebody else now"
        if held is not None and held[1] == lease:
            assert outcome is Outcome.DONE, "its holder acknowledges it"
        if outcome is Outcome.DONE:
            self.acked.add(offset)
            self.out.pop(offset, None)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), goes=st.sampled_from(["ack", "nack", "nack", "late"]))
    def holders_work(self, data: st.DataObject, goes: str) -> None:
        """Do something with what is out now, and pull at once what that has changed."""
        offset = data.draw(st.sampled_from(sorted(self.out)))
        consumer, lease = self.out[offset]
        if goes == "ack":
            assert self.delivery.ack(offset, lease) is Outcome.DONE
            self.acked.add(offset)
            del self.out[offset]
        elif goes == "nack":
            self.delivery.nack(offset, lease, self.now, 2.0)
        else:
            self.now += 10.0
        self.sync()
        for name in [*self.members, consumer]:
            self.pull(name, 2)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), delay=st.sampled_from([None, 0.0, 3.0]))
    def nack(self, data: st.DataObject, delay: float | None) -> None:
        incarnation, leased = data.draw(st.sampled_from(self.given[-20:]))
        lease = leased.lease if incarnation == self.incarnation else None
        self.delivery.nack(leased.offset, lease, self.now, delay)
        self.sync()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        incarnation, leased = data.draw(st.sampled_from(self.given[-20:]))
        lease = leased.lease if incarnation == self.incarnation else None
        self.sync()
        held = self.out.get(leased.offset)
        outcome = self.delivery.extend(leased.offset, lease, self.now, 20.0)
        assert (outcome is Outcome.DONE) == (held is not None and held[1] == lease)

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.delivery.advance(self.now)
        self.sync()

    @precondition(lambda self: self.members)
    @rule(data=st.data(), gives_back=st.booleans())
    def a_consumer_goes(self, data: st.DataObject, gives_back: bool) -> None:
        consumer = data.draw(st.sampled_from(self.members))
        self.members.remove(consumer)
        if gives_back:
            self.delivery.release(consumer)
            assert not self.delivery.out_by[consumer]
        self.delivery.reassign()
        self.sync()

    @rule(works=st.booleans())
    def dead_letters(self, works: bool) -> None:
        for offset in list(self.delivery.dead):
            if works:
                self.delivery.bury(offset)
                self.acked.add(offset)
            else:
                self.delivery.revive(offset, self.now)
                self.revived.add(offset)

    @precondition(lambda self: self.acked)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.acked)))
        if self.delivery.room:
            assert self.delivery.restore(offset, self.keys[offset])
            self.acked.discard(offset)
            self.replayed.add(offset)

    @rule()
    def restart(self) -> None:
        """All is forgotten but what is stored: the cursor, and what has failed how often."""
        cursor = self.delivery.cursor
        again = decode_ranges(cursor.next, encode_ranges(cursor))
        failures = self.delivery.failures()
        stored = encode_failures(cursor.next, failures)
        assert decode_failures(cursor.next, stored) == failures
        self.delivery = Delivery(
            self.policy, again, 0, self.owner, WINDOW,
            failures=decode_failures(cursor.next, stored),
        )  # fmt: skip
        assert self.delivery.failures() == failures, "maxDeliveries holds over restarts"
        self.incarnation += 1
        self.out.clear()

    # ---- always

    @invariant()
    def the_cursor_is_what_was_acknowledged(self) -> None:
        if not hasattr(self, "delivery"):
            return
        cursor = self.delivery.cursor
        assert {i for i in range(self.end) if i in cursor} == {
            i for i in self.acked if i < self.end
        }, "G4: acknowledged and stored differ"
        assert self.delivery.open_count <= WINDOW, "G6: bounded"
        held = sum(self.delivery.out_by.values())
        assert held == sum(m.holder is not None for m in self.delivery._open.values())

    def teardown(self) -> None:
        """Whatever happened: two steady consumers get and acknowledge all that is left."""
        if not hasattr(self, "delivery"):
            return
        self.members = ["a", "b"]
        self.delivery.reassign()
        for _ in range(2_000):
            if self.delivery.cursor.next >= self.end:
                break
            self.dead_letters(works=True)
            base = self.delivery.fetch_at
            count = min(self.delivery.room, self.end - base)
            if count > 0:
                self.delivery.offer(
                    base, base + count, {base + i: self.keys[base + i] for i in range(count)}
                )
            for consumer in self.members:
                for leased in self.delivery.take(consumer, self.now, 100):
                    assert leased.offset not in self.acked, "G4: delivered after its ack"
                    assert self.delivery.ack(leased.offset, leased.lease) is Outcome.DONE
                    self.acked.add(leased.offset)
            event = self.delivery.next_event()
            self.now = max(self.now, event) if event is not None else self.now
        assert self.delivery.cursor.next >= self.end, "G4: a message is stuck or was skipped"
        assert not len(self.delivery.cursor)
        assert not self.delivery._open
        assert not self.delivery._groups
        assert not self.delivery.out_by


class Unordered(Deliveries):
    order = Order.NONE


class ByKey(Deliveries):
    order = Order.KEY


class ByPartition(Deliveries):
    order = Order.PARTITION


def _case(machine: type[Deliveries]) -> Any:
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return machine.TestCase


TestUnordered = _case(Unordered)
TestByKey = _case(ByKey)
TestByPartition = _case(ByPartition)
