"""Deliveries, case by case (the state machine in tests/property draws the rest)."""

from collections.abc import Sequence

from tidewater_worker.dispatch.cursor import Cursor
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.keyshared import partition_owner
from tidewater_worker.dispatch.policy import Leased, Order, Outcome, Policy


def offer(delivery: Delivery, base: int, keys: Sequence[int | None]) -> None:
    delivery.offer(base, base + len(keys), {base + i: key for i, key in enumerate(keys)})


class Scene:
    """One partition with consumers."""

    def __init__(self, order: Order, window: int = 100, **policy: float) -> None:
        self.members = ["a"]
        self.delivery = Delivery(
            Policy(order, 10.0, None, **policy), Cursor(), 0, self.owner, window
        )

    def owner(self, key: int) -> str | None:
        return partition_owner(max(key, 0), self.members)

    def join(self, *names: str) -> None:
        self.members = list(names)
        self.delivery.reassign()

    def offsets(self, consumer: str, now: float = 0.0, limit: int = 100) -> list[int]:
        return [leased.offset for leased in self.take(consumer, now, limit)]

    def take(self, consumer: str, now: float = 0.0, limit: int = 100) -> list[Leased]:
        return self.delivery.take(consumer, now, limit)


def test_a_partition_waits_for_its_holder() -> None:
    """G4: after a change of members nobody overtakes what is still out."""
    scene = Scene(Order.PARTITION)
    scene.join("b")
    offer(scene.delivery, 0, [None] * 4)
    held = scene.take("b", limit=2)
    scene.join("a", "b")
    assert scene.offsets("a") == []
    assert scene.delivery.ack(held[0].offset, held[0].lease) is Outcome.DONE
    assert scene.offsets("a") == []
    assert scene.delivery.ack(held[1].offset, held[1].lease) is Outcome.DONE
    assert scene.offsets("a") == [2, 3]


def test_what_follows_goes_back_too() -> None:
    """G4: a nack in a group takes the later ones back, uncounted, and holds up the rest."""
    scene = Scene(Order.PARTITION, backoff_initial_s=5.0)
    offer(scene.delivery, 0, [None] * 5)
    held = scene.take("a", limit=3)
    assert scene.delivery.nack(1, held[1].lease, 0.0, None) is Outcome.DONE
    assert scene.delivery.out_by["a"] == 1, "0 is still out"
    assert scene.offsets("a", 4.9) == []
    again = scene.take("a", 5.0)
    assert [(at.offset, at.delivery) for at in again] == [(1, 2), (2, 1), (3, 1), (4, 1)]
    assert scene.delivery.ack(2, held[2].lease) is Outcome.STALE


def test_keys_do_not_wait_for_each_other() -> None:
    scene = Scene(Order.KEY, backoff_initial_s=5.0)
    offer(scene.delivery, 0, [0, 2, 0, 2, None])
    held = scene.take("a", limit=2)
    scene.delivery.nack(0, held[0].lease, 0.0, None)
    assert scene.offsets("a", 1.0) == [3, 4], "key 0 waits with all its messages"
    assert scene.offsets("a", 5.0) == [0, 2]


def test_a_late_ack_counts_until_somebody_else_has_it() -> None:
    scene = Scene(Order.NONE, backoff_initial_s=0.0)
    offer(scene.delivery, 0, [None, None])
    first, second = scene.take("a")
    scene.delivery.advance(10.0)
    assert scene.delivery.ack(0, first.lease) is Outcome.DONE
    assert scene.offsets("b", 10.0) == [1]
    assert scene.delivery.ack(1, second.lease) is Outcome.STALE
    assert scene.delivery.extend(1, second.lease, 10.0, 5.0) is Outcome.STALE
    assert scene.delivery.nack(1, second.lease, 10.0, None) is Outcome.STALE


def test_acks_of_an_owner_before() -> None:
    """They count unless the message is out again."""
    scene = Scene(Order.NONE)
    assert scene.delivery.ack(1, None) is Outcome.DONE, "not even fetched yet"
    offer(scene.delivery, 0, [None] * 3)
    assert scene.offsets("a", limit=1) == [0]
    assert scene.delivery.ack(0, None) is Outcome.STALE
    assert scene.delivery.ack(2, None) is Outcome.DONE


def test_idle_keys_of_another_are_taken_when_the_window_is_full() -> None:
    """A consumer that does not come for its keys does not hold up the others."""
    scene = Scene(Order.KEY, window=4)
    scene.join("a", "b")
    offer(scene.delivery, 0, [0, 0, 0])
    assert scene.offsets("b") == [], "key 0 is a's, and there is room"
    offer(scene.delivery, 3, [0])
    assert scene.offsets("b", limit=1) == [0]
    assert scene.offsets("a") == [], "b holds the key now"
    assert scene.offsets("b") == [1, 2, 3]


def test_a_reset_ends_everything() -> None:
    scene = Scene(Order.NONE)
    offer(scene.delivery, 0, [None] * 3)
    held = scene.take("a")
    scene.delivery.reset(1, 7)
    assert (scene.delivery.generation, scene.delivery.fetch_at) == (7, 1)
    assert scene.delivery.next_event() is None
    offer(scene.delivery, 1, [None] * 2)
    assert scene.delivery.ack(1, held[1].lease) is Outcome.STALE
    assert scene.offsets("a") == [1, 2]


def test_backoff() -> None:
    policy = Policy(backoff_initial_s=1.0, backoff_multiplier=10.0, backoff_max_s=50.0)
    assert [policy.backoff_s(n) for n in (1, 2, 3, 10_000)] == [1.0, 10.0, 50.0, 50.0]
    assert Policy(backoff_initial_s=0.0).backoff_s(3) == 0.0


def test_failed_deliveries_count_over_owners() -> None:
    """MaxDeliveries holds over restarts; what was only under way was nobody's fault."""
    policy = Policy(Order.NONE, 10.0, 3, 0.0)
    failures: dict[int, int] = {}
    delivery = Delivery(policy, Cursor(), 0, lambda key: None)
    for owner in range(3):
        delivery = Delivery(policy, Cursor(), 0, lambda key: None, failures=failures)
        offer(delivery, 0, [None, None])
        failed, under_way = delivery.take("a", 0.0, 2)
        assert (failed.delivery, under_way.delivery) == (owner + 1, 1)
        delivery.nack(failed.offset, failed.lease, 0.0, None)
        assert delivery.has_failed
        failures = delivery.failures()
    assert failures == {0: 3}
    assert delivery.dead == {0: "Nacked"}
    delivery = Delivery(policy, Cursor(), 0, lambda key: None, failures=failures)
    offer(delivery, 0, [None, None])
    assert delivery.dead == {0: "MaxDeliveries"}, "it was not buried before the restart"
    assert [leased.offset for leased in delivery.take("a", 0.0, 2)] == [1]
    delivery.bury(0)
    assert not delivery.failures()


def test_what_nobody_wants_counts_as_acknowledged() -> None:
    """However many offsets lie between two messages, and however they were passed over."""
    scene = Scene(Order.NONE)
    scene.delivery.offer(0, 1_000_000, {5: None, 999_998: None})
    assert scene.offsets("a") == [5, 999_998]
    assert scene.delivery.cursor.next == 5
    assert scene.delivery.cursor.ranges == [(6, 999_998), (999_999, 1_000_000)]
    scene.delivery.offer(1_000_000, 2_000_000, {})
    assert scene.delivery.ack(5, 1) is Outcome.DONE
    assert scene.delivery.ack(999_998, 2) is Outcome.DONE
    assert (scene.delivery.cursor.next, len(scene.delivery.cursor)) == (2_000_000, 0)
