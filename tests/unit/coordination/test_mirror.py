"""What the registry in memory does not know, and what it cannot read."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import AcceptedLoss, WorkerInfo
from tidewater_core.errors import Conflict, Corrupt
from tidewater_testing.parts.etcd import Etcd

TOPIC = "shop/orders"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


@pytest.fixture
async def worker(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[EtcdCoordination]:
    store = EtcdCoordination(etcd.endpoints, request.node.name)
    await store.start(WorkerInfo("a", "http://a", "", "volume-a"))
    yield store
    await store.close()


@pytest.fixture
async def other(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[EtcdCoordination]:
    store = EtcdCoordination(etcd.endpoints, request.node.name)
    await store.start()
    yield store
    await store.close()


async def test_etcd_can_be_asked_past_a_watch_that_stands_still(
    worker: EtcdCoordination, other: EtcdCoordination
) -> None:
    watch = other._mirror._task
    assert watch is not None
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    await worker.acquire(TOPIC, 0)
    assert (await other.registry()).owners == {}, "it does not know what it was not told"
    asked = await other.ask_registry()
    assert asked.owners[TOPIC][0].worker_id == "a"
    assert asked.owners[TOPIC][0].is_live
    assert set(asked.workers) == {"a"}


async def test_who_waits_for_a_change_goes_on_when_the_store_is_closed(
    worker: EtcdCoordination, other: EtcdCoordination
) -> None:
    version = (await other.registry()).version
    waits = [
        asyncio.create_task(other.changed(version, 60)),
        asyncio.create_task(other._mirror.reaches(version + 1_000, 60)),
    ]
    await asyncio.sleep(0.1)
    await other.close()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*waits) == [version, None]
    asked_again = asyncio.create_task(other.changed(version, 60))
    await asyncio.sleep(0)
    assert not asked_again.done(), "whoever asks again and again must let others run"
    assert await asyncio.wait_for(asked_again, 5) == version


async def test_what_cannot_be_read_is_not_nothing(
    worker: EtcdCoordination, other: EtcdCoordination
) -> None:
    await worker.acquire(TOPIC, 0)
    await worker.acquire(TOPIC, 1)
    key = worker._keys.owner(TOPIC, 0)
    await worker._write(wire.put(key, b'{"partition":0,"worker_id":'))
    version = (await other.registry()).version
    while not (await other.registry()).unreadable:
        version = await other.changed(version, 5)
    for seen in (await other.registry(), await other.ask_registry()):
        assert seen.unreadable == (f"owners/{TOPIC}/0",)
        assert set(seen.owners[TOPIC]) == {1}
    with pytest.raises(Corrupt, match="RecordUnreadable"):
        await worker.acquire(TOPIC, 0)
    await worker._write(wire.delete(key))
    assert (await worker.registry()).unreadable == ()


async def test_a_word_and_what_it_gives_up_are_one(
    worker: EtcdCoordination, other: EtcdCoordination
) -> None:
    """G1: each word counts once, whatever became of those who acted on it."""
    await other.register_topic(TOPIC, "{}", "u")
    for number in (0, 1):
        await worker.acquire(TOPIC, number)
    word = AcceptedLoss("0,1", (1,), 99)
    with pytest.raises(Conflict, match="OwnerIsLive"):
        await other.accept_loss(TOPIC, "u", word, [0], "burnt")
    assert (await other.registry()).topics[TOPIC].accepted is None, "nothing of it was done"
    await worker.close()
    assert not await other.accept_loss(TOPIC, "another", word, [0], "burnt")
    assert await other.accept_loss(TOPIC, "u", word, [0], "burnt")
    seen = await other.registry()
    assert seen.topics[TOPIC].accepted == word
    assert {n: owner.given_up for n, owner in seen.owners[TOPIC].items()} == {0: "burnt", 1: None}
    # Another one has taken it and gone: not by the same word.
    await worker.start(WorkerInfo("b", "http://b", "", "volume-b"))
    grant = await worker.acquire(TOPIC, 0)
    await worker.begin(TOPIC, 0, grant.epoch)
    await worker.close()
    assert not await other.accept_loss(TOPIC, "u", AcceptedLoss("0,1"), [0], "burnt")
    assert (await other.ask_registry()).owners[TOPIC][0].given_up is None
    # For the one that it waited for it still counts, and a new spec changes nothing of it.
    await other.register_topic(TOPIC, '{"partitions":2}', "u")
    assert await other.accept_loss(TOPIC, "u", AcceptedLoss("0,1"), [1], "burnt")
    seen = await other.registry()
    assert seen.topics[TOPIC].accepted == AcceptedLoss("0,1")
    assert seen.owners[TOPIC][1].given_up == "burnt"
    assert await other.accept_loss(TOPIC, "u", AcceptedLoss("0 again"), [0], "burnt")
