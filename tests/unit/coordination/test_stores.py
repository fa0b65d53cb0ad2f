"""One suite for both stores: what the port promises, SQLite and etcd both keep."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import Coordination, CursorKey, Gap, TopicPhase, WorkerInfo
from tidewater_coordination.rules import undrained
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_core.errors import Conflict, Fenced, Retryable
from tidewater_testing.parts.etcd import Etcd

TTL_S = 2.0
_numbers = itertools.count()
Make = Callable[[], Coordination]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


@pytest.fixture(params=["sqlite", "etcd"])
async def make(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Callable[[], Coordination]]:
    """Make connections to one store; close them at the end."""
    made: list[Coordination] = []

    def one() -> Coordination:
        store: Coordination
        if request.param == "sqlite":
            store = SqliteCoordination(tmp_path / "coordination.db")
        else:
            store = EtcdCoordination(request.getfixturevalue("etcd").endpoints)
        made.append(store)
        return store

    yield one
    for store in made:
        await store.close()


@pytest.fixture
def topic() -> str:
    """Return a name of this test's own: the etcd server is shared."""
    return f"shop/t{next(_numbers)}"


async def join(make: Make, name: str, volume: str = "", ttl_s: float = TTL_S) -> Coordination:
    store = make()
    await store.start(WorkerInfo(name, f"http://{name}", "", volume or f"volume-{name}"), ttl_s)
    return store


async def test_registry(make: Make, topic: str) -> None:
    store, other = make(), make()
    await store.start()
    await other.start()
    first = await store.register_topic(topic, '{"partitions":1}', "u1")
    assert (first.topic, first.uuid) == (topic, "u1")
    version = (await other.registry()).version
    again = await store.register_topic(topic, '{"partitions":2}', "u2")
    assert (again.uuid, again.spec) == ("u1", '{"partitions":2}'), "an existing one keeps its uuid"
    assert await other.changed(version, 5) != version
    assert (await store.registry()).topics[topic] == again
    await store.register_subscription("shop/s", "{}", "u3")
    assert "shop/s" in [found.name for found in await store.subscriptions()]
    await store.set_assignment(topic, {0: "a", 1: "b"})
    assert (await store.registry()).assignments[topic] == {0: "a", 1: "b"}
    await store.unregister_subscription("shop/s")
    await store.unregister_topic(topic)
    left = await store.registry()
    assert topic not in left.topics
    assert topic not in left.assignments
    assert "shop/s" not in left.subscriptions


async def test_one_partition_is_assigned_and_the_rest_stays(make: Make, topic: str) -> None:
    a, b = await join(make, "a"), await join(make, "b")
    await a.assign(topic, 1, "b", {0: "a"})
    await b.assign(topic, 0, "b", {0: "gone", 2: "a"})  # whatever b has heard of by now
    wanted = {0: "b", 1: "b", 2: "a"}
    assert (await b.registry()).assignments[topic] == wanted
    version = (await b.registry()).version
    await b.assign(topic, 0, "b", {})
    assert await b.changed(version, 0.2) == version, "nothing was changed"
    every = range(3, 12)
    await asyncio.gather(*((a, b)[n % 2].assign(topic, n, f"w{n}", {}) for n in every))
    wanted |= {number: f"w{number}" for number in every}
    for store in (a, b):
        registry = await store.registry()
        while registry.assignments[topic] != wanted:
            assert await store.changed(registry.version, 5) != registry.version, "a move is lost"
            registry = await store.registry()


async def test_a_topic_goes_through_its_life_once(make: Make, topic: str) -> None:
    store, other = make(), make()
    await store.start()
    await other.start()
    assert (await store.register_topic(topic, "{}", "u1")).phase is TopicPhase.ACTIVE
    assert not await store.set_topic_phase(topic, "u2", TopicPhase.DELETING), "not that one"
    assert not await store.set_topic_phase(f"{topic}x", "u1", TopicPhase.DELETING)
    version = (await other.registry()).version
    assert await store.set_topic_phase(topic, "u1", TopicPhase.DELETING)
    assert await other.changed(version, 5) != version
    again = await store.register_topic(topic, '{"partitions":2}', "u2")
    assert (again.uuid, again.phase) == ("u1", "deleting"), "another spec is no way back"
    assert await store.set_topic_phase(topic, "u1", TopicPhase.DROPPED)
    assert await store.set_topic_phase(topic, "u1", TopicPhase.DELETING), "already further on"
    assert (await store.registry()).topics[topic].phase is TopicPhase.DROPPED
    await store.unregister_topic(topic)
    assert not await store.set_topic_phase(topic, "u1", TopicPhase.DELETING)
    anew = await store.register_topic(topic, "{}", "u2")
    assert (anew.uuid, anew.phase) == ("u2", "active")
    await store.unregister_topic(topic)


async def test_epochs_begin_above_those_of_a_table(make: Make, topic: str) -> None:
    a = await join(make, "a")
    assert (await a.acquire(topic, 0, epoch_above=41)).epoch == 42
    assert (await a.acquire(topic, 0, epoch_above=7)).epoch == 43


async def test_what_is_not_drained(make: Make, topic: str) -> None:
    a = await join(make, "a")
    for number in range(3):
        await a.acquire(topic, number)
    await a.release(topic, 1, 1, drained_at=10)
    await a.release(topic, 2, 1)
    owners = (await a.registry()).owners[topic]
    assert [owner.partition for owner in undrained(owners)] == [0, 2]
    await a.give_up(topic, 2, "burnt")
    owners = (await a.registry()).owners[topic]
    assert [owner.partition for owner in undrained(owners)] == [0], "nobody waits for what is lost"
    assert undrained({}) == []


async def test_changed_waits_no_longer_than_asked(make: Make) -> None:
    store = make()
    await store.start()
    version = (await store.registry()).version
    begun = time.monotonic()
    assert await store.changed(version, 0.3) == version
    assert time.monotonic() - begun < 3


async def test_epochs_only_rise_and_a_volume_comes_back(make: Make, topic: str) -> None:
    a = await join(make, "a")
    grant = await a.acquire(topic, 0)
    assert (grant.epoch, grant.previous) == (1, None)
    owner = (await a.registry()).owners[topic][0]
    assert (owner.worker_id, owner.epoch, owner.is_live, owner.url) == ("a", 1, True, "http://a")
    b = await join(make, "b")
    with pytest.raises(Fenced, match="OwnedElsewhere"):
        await b.acquire(topic, 0)
    await a.close()
    with pytest.raises(Fenced, match="VolumeElsewhere"):
        await b.acquire(topic, 0)
    again = await join(make, "a")
    grant = await again.acquire(topic, 0)
    assert grant.epoch == 2
    assert grant.previous is not None
    assert grant.previous.worker_id == "a"


async def test_a_drained_partition_goes_anywhere(make: Make, topic: str) -> None:
    a, b = await join(make, "a"), await join(make, "b")
    grant = await a.acquire(topic, 0)
    await a.release(topic, 0, grant.epoch, drained_at=41)
    taken = await b.acquire(topic, 0)
    assert taken.epoch == 2
    assert taken.previous is not None
    assert taken.previous.drained_at == 41
    await a.release(topic, 0, grant.epoch, drained_at=50)  # an old owner's word counts no more
    owner = (await b.registry()).owners[topic][0]
    assert (owner.worker_id, owner.drained_at) == ("b", None)
    with pytest.raises(Fenced):
        await a.acquire(topic, 0)


async def test_a_volume_is_given_up_by_a_persons_word_only(make: Make, topic: str) -> None:
    a, b = await join(make, "a"), await join(make, "b")
    epoch = (await a.acquire(topic, 0)).epoch
    with pytest.raises(Conflict, match="OwnerIsLive"):
        await b.give_up(topic, 0, "burnt")
    await a.close()
    await b.give_up(topic, 0, "burnt")
    grant = await b.acquire(topic, 0)
    assert grant.epoch == epoch + 1
    assert grant.previous is not None
    assert grant.previous.given_up == "burnt"
    gap = Gap(10, 1000, "volume-a", "burnt")
    with pytest.raises(Fenced):
        await b.begin(topic, 0, epoch, gap)
    await b.begin(topic, 0, grant.epoch, gap)
    await b.release(topic, 0, grant.epoch, drained_at=1000)
    c = await join(make, "c")
    await c.acquire(topic, 0)
    assert (await c.registry()).owners[topic][0].gap == gap, "G7: a gap stays recorded"
    with pytest.raises(Conflict, match="NothingToGiveUp"):
        await c.give_up(topic, 7, "")


async def test_who_has_not_begun_leaves_it_as_it_was(make: Make, topic: str) -> None:
    """G1, G7: what was given up is still given up after an attempt that failed, or died."""
    a, b, c = await join(make, "a"), await join(make, "b"), await join(make, "c")
    await a.acquire(topic, 0)
    await a.close()
    await b.give_up(topic, 0, "burnt")
    tried = await b.acquire(topic, 0)
    there = (await b.registry()).owners[topic][0]
    assert (there.worker_id, there.is_live) == ("b", True)
    with pytest.raises(Fenced, match="OwnedElsewhere"):
        await c.acquire(topic, 0)
    await b.release(topic, 0, tried.epoch, drained_at=5)
    left = (await b.registry()).owners[topic][0]
    assert (left.worker_id, left.given_up, left.drained_at) == ("a", "burnt", None)
    again = await b.acquire(topic, 0)
    assert (again.epoch, again.previous) == (tried.epoch + 1, left)
    third = await b.acquire(topic, 0)
    assert third.previous is not None
    assert third.previous.given_up == "burnt", "an attempt on top of one that is under way"
    await b.close()
    registry = await c.registry()
    while registry.owners[topic][0].worker_id == "b":  # c hears of it a moment later
        await c.changed(registry.version, 1)
        registry = await c.registry()
    assert registry.owners[topic][0].given_up == "burnt", "it died before it began"
    taken = await c.acquire(topic, 0)
    assert taken.previous is not None
    assert (taken.epoch, taken.previous.given_up) == (third.epoch + 1, "burnt")
    gap = Gap(10, 1000, "volume-a", "burnt")
    await c.begin(topic, 0, taken.epoch, gap)
    await c.begin(topic, 0, taken.epoch, gap)
    await c.release(topic, 0, taken.epoch)
    left = (await c.registry()).owners[topic][0]
    assert (left.worker_id, left.given_up, left.gap) == ("c", None, gap), "it has begun"


async def test_what_was_drained_is_drained_until_the_next_one_begins(
    make: Make, topic: str
) -> None:
    a, b = await join(make, "a"), await join(make, "b")
    first = await a.acquire(topic, 0)
    await a.release(topic, 0, first.epoch, drained_at=41)
    tried = await b.acquire(topic, 0)
    await b.release(topic, 0, tried.epoch)
    left = (await b.registry()).owners[topic][0]
    assert (left.worker_id, left.drained_at) == ("a", 41)
    with pytest.raises(Fenced):
        await a.begin(topic, 0, first.epoch)
    back = await a.acquire(topic, 0)  # its own log: there is nothing to come after
    assert (back.epoch, back.previous) == (tried.epoch + 1, left)
    with pytest.raises(Fenced):
        await b.acquire(topic, 0)
    await a.close()
    with pytest.raises(Fenced, match="VolumeElsewhere"):
        await b.acquire(topic, 0)


async def test_a_session_that_is_not_renewed_runs_out(make: Make, topic: str) -> None:
    a, b = await join(make, "a"), await join(make, "b")
    await a.acquire(topic, 0)
    version = (await b.registry()).version
    while topic not in (await b.registry()).owners:  # b hears of it by a watch, a moment later
        version = await b.changed(version, 1)
    session = a.session
    assert 0 < a.session_deadline - time.monotonic() <= TTL_S
    await a._keeper.close()  # type: ignore[attr-defined]
    assert a.session_deadline < time.monotonic(), "G5: nothing may be appended now"
    deadline = time.monotonic() + 10 * TTL_S
    while (await b.registry()).owners[topic][0].is_live:
        assert time.monotonic() < deadline, "the session never ran out"
        version = await b.changed(version, 1)
    assert "a" not in (await b.registry()).workers
    with pytest.raises(Retryable, match="SessionLost"):
        await a.acquire(topic, 1)
    await a._keeper._once()  # type: ignore[attr-defined]
    assert a.session != session, "what was lost is not renewed: another session is opened"
    assert (await a.acquire(topic, 0)).epoch == 2


async def test_a_session_is_renewed(make: Make, topic: str) -> None:
    a = await join(make, "a")
    session = a.session
    await asyncio.sleep(1.6 * TTL_S)
    assert a.session == session
    assert a.session_deadline > time.monotonic()
    await a.acquire(topic, 0)


async def test_one_id_is_one_volume(make: Make, topic: str) -> None:
    a = await join(make, "a")
    await a.acquire(topic, 0)
    with pytest.raises(Fenced, match="WorkerIdTaken"):
        await join(make, "a", "another-volume")
    # The same volume: its earlier process is dead, or it could not have the lock.
    again = await join(make, "a")
    assert (await again.acquire(topic, 0)).epoch == 2
    with pytest.raises(Retryable, match="SessionLost"):
        await a.acquire(topic, 1)


async def test_a_lost_volume_under_its_old_name_is_another_volume(make: Make, topic: str) -> None:
    a = await join(make, "a")
    await a.acquire(topic, 0)
    await a.close()
    empty = await join(make, "a", "a-new-disk")
    with pytest.raises(Fenced, match="VolumeElsewhere"):
        await empty.acquire(topic, 0)


async def test_named_leases(make: Make, topic: str) -> None:
    a, b = await join(make, "a"), await join(make, "b")
    assert await a.take_lease(topic)
    assert await a.take_lease(topic)
    assert not await b.take_lease(topic)
    assert await b.lease_holder(topic) == "a"
    await b.drop_lease(topic)
    assert await b.lease_holder(topic) == "a"
    await a.drop_lease(topic)
    assert await b.take_lease(topic)
    await b.close()
    assert await a.lease_holder(topic) is None
    assert await a.take_lease(topic)


async def test_a_job_holds_leases_and_is_no_worker(make: Make, topic: str) -> None:
    worker, job, other = await join(make, "a"), make(), make()
    await job.start(WorkerInfo("job-1", is_job=True), TTL_S)
    await other.start(WorkerInfo("job-2", is_job=True), TTL_S)
    assert await job.take_lease(topic)
    assert not await other.take_lease(topic)
    assert not await worker.take_lease(topic)
    assert await other.lease_holder(topic) == "job-1"
    assert not {"job-1", "job-2"} & (await worker.registry()).workers.keys()
    await job.close()
    assert await other.take_lease(topic)


async def test_cursors(make: Make, topic: str) -> None:
    a = await join(make, "a")
    epoch = (await a.acquire(topic, 0)).epoch
    assert await a.load_cursors("shop/s", topic) == {}
    items = {CursorKey("shop/s", topic, n): b"\0%d" % n for n in range(150)}
    await a.store_cursors(items)
    assert await a.load_cursors("shop/s", topic) == {n: b"\0%d" % n for n in range(150)}
    one = CursorKey("shop/s", topic, 0)
    await a.store_cursors({one: b"new"}, {(topic, 0): epoch})
    assert (await a.load_cursors("shop/s", topic))[0] == b"new"
    later = (await a.acquire(topic, 0)).epoch
    with pytest.raises(Fenced):
        await a.store_cursors({one: b"zombie"}, {(topic, 0): epoch})
    await a.store_cursors({one: b"owner"}, {(topic, 0): later})
    assert (await a.load_cursors("shop/s", topic))[0] == b"owner", "G4: no zombie's progress"
    other = await join(make, "b")
    await other.load_cursors("shop/s", topic)
    await a.store_cursors({one: b"newer"})
    await other.store_cursors({one: b"newest"})
    assert (await a.load_cursors("shop/s", topic))[0] == b"newest"


async def test_cursors_outlive_a_topic_whose_table_is_kept(make: Make, topic: str) -> None:
    """G4: a Topic that was deleted by mistake and applied again goes on where it was."""
    a = await join(make, "a")
    mine, nobodys = f"{topic}-mine", f"{topic}-nobodys"
    await a.register_topic(topic, "{}", "u1")
    await a.register_subscription(mine, "{}", "u2")
    other = f"{topic}x"
    items = {CursorKey(mine, topic, n): b"%d" % n for n in range(100)}
    items |= {CursorKey(nobodys, topic, 0): b"stray", CursorKey(nobodys, other, 0): b"theirs"}
    await a.store_cursors(items)
    epoch = (await a.acquire(topic, 0)).epoch
    await a.unregister_topic(topic, keep_cursors=True)
    assert topic not in (await a.registry()).owners
    assert await a.load_cursors(mine, topic) == {n: b"%d" % n for n in range(100)}
    assert await a.load_cursors(nobodys, topic) == {}, "nobody would ever delete it"
    assert await a.load_cursors(nobodys, other) == {0: b"theirs"}
    with pytest.raises(Fenced):
        await a.store_cursors({CursorKey(mine, topic, 0): b"late"}, {(topic, 0): epoch})
    await a.unregister_topic(topic)
    assert await a.load_cursors(mine, topic) == {}, "they went with the table"
    await a.store_cursors({CursorKey(mine, topic, 0): b"0", CursorKey(mine, other, 0): b"1"})
    await a.unregister_subscription(mine)
    assert await a.load_cursors(mine, topic) == await a.load_cursors(mine, other) == {}
    await a.unregister_subscription(nobodys)


async def test_many_want_one_partition(make: Make, topic: str) -> None:
    workers = [await join(make, name) for name in "abcd"]
    results = await asyncio.gather(
        *(worker.acquire(topic, 0) for worker in workers), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["Fenced"] * 3 + ["Grant"], (
        "G5 One owner"
    )
