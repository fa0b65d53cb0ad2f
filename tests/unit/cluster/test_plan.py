"""What a worker does about a partition, as a table of cases."""

import pytest

from tidewater_coordination.port import Ownership, WorkerInfo
from tidewater_worker.cluster.plan import GAP_OFFSETS, Action, decide, next_after_gap

ME = WorkerInfo("a", "http://a", "", "volume-a")
MINE = Ownership(0, "a", 3, "volume-a", "s1", is_live=True)
MINE_DEAD = Ownership(0, "a", 3, "volume-a", "old")
MY_NAME_OTHER_DISK = Ownership(0, "a", 3, "volume-lost", "old")
THEIRS = Ownership(0, "b", 3, "volume-b", "s2", is_live=True)
THEIRS_DEAD = Ownership(0, "b", 3, "volume-b", "old")
DRAINED = Ownership(0, "b", 3, "volume-b", "", drained_at=41)
GIVEN_UP = Ownership(0, "b", 3, "volume-b", "old", given_up="burnt")
GIVEN_UP_LIVE = Ownership(0, "b", 3, "volume-b", "s2", is_live=True, given_up="burnt")


@pytest.mark.parametrize(
    ("assigned", "owner", "holds", "expected"),
    [
        (None, None, False, Action.OPEN),
        ("a", None, False, Action.OPEN),
        ("b", None, False, Action.LEAVE),
        (None, MINE, True, Action.KEEP),
        (None, MINE_DEAD, True, Action.KEEP),
        (None, MINE_DEAD, False, Action.OPEN),
        ("b", MINE_DEAD, False, Action.OPEN),
        ("b", MINE, True, Action.DRAIN),
        ("gone", MINE, True, Action.KEEP),
        (None, THEIRS, False, Action.LEAVE),
        ("a", THEIRS, False, Action.LEAVE),
        ("a", THEIRS, True, Action.LEAVE),
        (None, THEIRS_DEAD, False, Action.LEAVE),
        ("a", THEIRS_DEAD, False, Action.LEAVE),
        ("a", MY_NAME_OTHER_DISK, False, Action.LEAVE),
        (None, DRAINED, False, Action.OPEN),
        ("a", DRAINED, False, Action.OPEN),
        ("b", DRAINED, False, Action.LEAVE),
        ("a", DRAINED, True, Action.LEAVE),
        ("a", GIVEN_UP, False, Action.OPEN),
        (None, GIVEN_UP, False, Action.LEAVE),
        ("a", GIVEN_UP_LIVE, False, Action.LEAVE),
    ],
)
def test_decide(
    assigned: str | None, owner: Ownership | None, holds: bool, expected: Action
) -> None:
    assert decide(ME, assigned, owner, {"a", "b"}, holds=holds) is expected


@pytest.mark.parametrize(
    ("assigned", "owner", "holds", "expected"),
    [
        (None, None, False, Action.LEAVE),
        (None, DRAINED, False, Action.LEAVE),
        ("a", None, False, Action.OPEN),
        ("a", DRAINED, False, Action.OPEN),
        (None, MINE, True, Action.KEEP),  # nobody is there to take it
        (None, MINE_DEAD, False, Action.OPEN),  # its messages are here
        ("b", MINE, True, Action.DRAIN),
    ],
)
def test_decide_with_assigned_only(
    assigned: str | None, owner: Ownership | None, holds: bool, expected: Action
) -> None:
    decided = decide(ME, assigned, owner, {"a", "b"}, holds=holds, assigned_only=True)
    assert decided is expected


@pytest.mark.parametrize(
    ("assigned", "owner", "holds", "expected"),
    [
        ("a", None, False, Action.LEAVE),
        ("a", DRAINED, False, Action.LEAVE),
        ("a", GIVEN_UP, False, Action.LEAVE),
        ("b", THEIRS, False, Action.LEAVE),
        ("a", MINE, True, Action.DRAIN),
        (None, MINE, True, Action.DRAIN),
        ("b", MINE_DEAD, False, Action.OPEN),  # what it has must come into the table first
        ("a", THEIRS, True, Action.LEAVE),
    ],
)
def test_decide_while_a_topic_is_deleted(
    assigned: str | None, owner: Ownership | None, holds: bool, expected: Action
) -> None:
    decided = decide(ME, assigned, owner, {"a", "b"}, holds=holds, deleting=True)
    assert decided is expected


@pytest.mark.parametrize("frontier", [0, 1, GAP_OFFSETS - 1, GAP_OFFSETS, 7 * GAP_OFFSETS + 3])
def test_a_gap_is_longer_than_any_log(frontier: int) -> None:
    after = next_after_gap(frontier)
    assert after - frontier > GAP_OFFSETS
    assert after % GAP_OFFSETS == 0
