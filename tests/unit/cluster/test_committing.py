"""Who commits for all: the lease's holder, or a stand-in that everybody finds alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_coordination.port import Ownership, Registry, WorkerInfo
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_core.clock import SystemClock
from tidewater_core.errors import Retryable
from tidewater_worker.cluster.committing import Committing, Target, choose

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


LEASE = "committer/shop/orders"


class Member:
    """A worker of the topic, as far as it looks for who commits."""

    def __init__(self, store: SqliteCoordination, name: str) -> None:
        self.store = store
        self._owning = SimpleNamespace(registry=Registry())
        node = SimpleNamespace(
            settings=SimpleNamespace(worker_id=name),
            clock=SystemClock(),
            owning=self._owning,
            link=SimpleNamespace(),
            topics={},
        )
        self._committing = Committing(node, store)  # type: ignore[arg-type]

    async def target(self, *owners: str) -> Target:
        workers = {name: WorkerInfo(name, f"http://{name}") for name in owners}
        owned = {i: Ownership(i, name, 1, is_live=True) for i, name in enumerate(owners)}
        self._owning.registry = Registry(workers=workers, owners={"shop/orders": owned})
        topic: Any = SimpleNamespace(name="shop/orders")
        return await self._committing._committer_of(topic)

    async def round(self) -> None:
        """Look once at what it holds; it has no topic any more."""
        await self._committing._round()


async def _member(directory: Path, name: str) -> Member:
    store = SqliteCoordination(directory / "coordination.db")
    await store.start(WorkerInfo(name, f"http://{name}", volume=name), ttl_s=600)
    return Member(store, name)


async def test_a_holder_that_has_no_part_any_more_is_not_waited_for(tmp_path: Path) -> None:
    """The lease went from hand to hand meanwhile: without asking again two would commit."""
    a, b, c = [await _member(tmp_path, name) for name in "abc"]
    try:
        assert await c.target("a", "b", "c") == Target("c", "", stands_in=False)
        assert await b.target("a", "b", "c") == Target("c", "http://c", stands_in=False)
        await c.store.drop_lease(LEASE)  # its last partition went elsewhere
        assert await a.target("a", "b") == Target("a", "", stands_in=False)
        assert await b.target("a", "b") == Target("a", "http://a", stands_in=False)
    finally:
        for member in (a, b, c):
            await member.store.close()


async def test_a_lease_of_an_earlier_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker stands in until that session has run out, and then takes the lease itself."""
    a = await _member(tmp_path, "a")

    async def held_before(_: str) -> bool:
        return False

    async def by_itself(_: str) -> str:
        return "a"

    try:
        with monkeypatch.context() as patch:
            patch.setattr(a.store, "take_lease", held_before)
            patch.setattr(a.store, "lease_holder", by_itself)
            assert await a.target("a", "b") == Target("a", "", stands_in=True)
        assert await a.target("a", "b") == Target("a", "", stands_in=False)
    finally:
        await a.store.close()


async def test_a_lease_that_could_not_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again: a lease that was forgotten stays with a worker that has no part."""
    a = await _member(tmp_path, "a")

    async def away(_: str) -> None:
        raise Retryable("StoreAway", "not now", 100)

    try:
        assert await a.target("a", "b") == Target("a", "", stands_in=False)
        with monkeypatch.context() as patch:
            patch.setattr(a.store, "drop_lease", away)
            with pytest.raises(Retryable):
                await a.round()
        assert await a.store.lease_holder(LEASE) == "a"
        await a.round()
        assert await a.store.lease_holder(LEASE) is None
    finally:
        await a.store.close()
