"""Consumers and what belongs to them."""

from collections import Counter

import pytest

from tidewater_core.errors import Conflict, Invalid, Overloaded
from tidewater_worker.dispatch.keyshared import Ring, key_hash, partition_owner
from tidewater_worker.dispatch.members import CONSUMERS_MAX, Members

KEYS = [key_hash(f"key-{i}".encode()) for i in range(4_000)]


def test_keys_are_divided_evenly() -> None:
    shares = Counter(Ring(["a", "b", "c", "d"]).owner(key) for key in KEYS)
    assert set(shares) == {"a", "b", "c", "d"}
    assert max(shares.values()) < 1.6 * min(shares.values())


def test_one_more_consumer_moves_only_its_own_share() -> None:
    """What does not go to the new one stays where it was."""
    before, after = Ring(["a", "b", "c"]), Ring(["c", "d", "a", "b"])
    moved = [key for key in KEYS if before.owner(key) != after.owner(key)]
    assert {after.owner(key) for key in moved} == {"d"}
    assert len(moved) < len(KEYS) / 2


def test_nobody() -> None:
    assert Ring([]).owner(1) is None
    assert partition_owner(3, []) is None


def test_partitions_are_dealt_out() -> None:
    """By name alone: workers that see the same consumers agree."""
    dealt = [partition_owner(number, ["c", "a", "b"]) for number in range(6)]
    assert dealt == ["a", "b", "c", "a", "b", "c"]


def test_a_consumer_is_there_while_it_waits_holds_or_speaks() -> None:
    members = Members(10.0, is_exclusive=False)
    assert members.enter("a", 0.0)
    assert not members.expire(100.0, lambda _: False), "it waits"
    members.leave_wait("a", 100.0)
    assert not members.expire(109.0, lambda _: False), "it was heard of"
    assert not members.expire(120.0, lambda _: True), "it holds messages"
    members.touch("a", 120.0)
    assert members.next_expiry() == 130.0
    assert members.expire(130.0, lambda _: False)
    assert members.names == []
    members.touch("a", 130.0)
    members.leave_wait("a", 130.0)
    assert members.names == [], "a sign of life is no way in"


def test_exclusive_has_one() -> None:
    members = Members(10.0, is_exclusive=True)
    members.enter("a", 0.0)
    assert not members.enter("a", 1.0), "it may come twice"
    with pytest.raises(Conflict, match="'a' has this Exclusive"):
        members.enter("b", 1.0)
    members.remove("a")
    assert members.enter("b", 1.0)


def test_a_change_of_type_sends_nobody_away() -> None:
    members = Members(10.0, is_exclusive=False)
    for name in "ab":
        members.enter(name, 0.0)
    members.change(0.1, is_exclusive=True)
    assert members.names == ["a", "b"]
    assert members.timeout_s == 1.0
    with pytest.raises(Conflict):
        members.enter("c", 0.0)


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
def test_names(name: str) -> None:
    with pytest.raises(Invalid):
        Members(1.0, is_exclusive=False).enter(name, 0.0)


def test_consumers_are_bounded() -> None:
    members = Members(1.0, is_exclusive=False)
    for i in range(CONSUMERS_MAX):
        members.enter(str(i), 0.0)
    with pytest.raises(Overloaded):
        members.enter("one more", 0.0)
