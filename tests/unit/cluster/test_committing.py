"""Who commits for all: the lease's holder, or a stand-in that everybody finds alone."""

import pytest

from tidewater_worker.cluster.committing import Target, choose

OWNERS = {"a": "http://a", "b": "http://b", "c": "http://c"}


@pytest.mark.parametrize(
    ("me", "holder", "away", "expected"),
    [
        ("b", "a", (), Target("a", "http://a", stands_in=False)),
        ("a", "a", (), Target("a", "", stands_in=False)),
        # It does not answer: the first of the others, by name, for all of them.
        ("b", "a", ("a",), Target("b", "", stands_in=True)),
        ("c", "a", ("a",), Target("b", "http://b", stands_in=True)),
        ("c", "a", ("a", "b"), Target("c", "", stands_in=True)),
        ("c", "b", ("b",), Target("a", "http://a", stands_in=True)),
        # Nobody has the lease, or nobody knows: the store is away.
        ("b", None, (), Target("a", "http://a", stands_in=True)),
        ("a", None, (), Target("a", "", stands_in=True)),
        # It has no partition any more, or its session is gone.
        ("b", "d", (), Target("a", "http://a", stands_in=True)),
    ],
)
def test_choose(me: str, holder: str | None, away: tuple[str, ...], expected: Target) -> None:
    assert choose(me, holder, OWNERS, away) == expected


def test_all_that_see_the_same_choose_the_same() -> None:
    for away in ((), ("a",), ("a", "b")):
        chosen = {choose(me, "a", OWNERS, away).worker_id for me in OWNERS if me not in away}
        assert len(chosen) == 1, (away, chosen)
