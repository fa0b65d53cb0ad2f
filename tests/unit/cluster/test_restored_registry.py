"""A registry that was restored from a copy counts from before; what runs goes on (G5, G7)."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from owner_fakes import TOPIC, Cut, Kind, Member, World
from tidewater_coordination.port import CursorKey, Ownership
from tidewater_coordination.sqlite_schema import put_owner
from tidewater_worker.cluster import owning


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World(tmp_path, monkeypatch)
    await made.start()
    await made.assign("a")
    yield made
    await made.close()


async def with_later_epoch(world: World) -> tuple[Member, Ownership]:
    """Return a worker with messages, and the record of its partition from two epochs before."""
    a = await world.settle("a")
    copy = await world.owner()
    await a.append(b"0", 0)
    for _ in range(2):
        await a.die()
        a = await world.settle("a")
    await a.append(b"1", 1)
    assert world.table.epoch == a.partition.epoch == copy.epoch + 2
    return a, copy


def restore(world: World, record: Ownership) -> None:
    with sqlite3.connect(world.directory / "coordination.db") as db:
        put_owner(db, TOPIC, record)
    db.close()


async def taken_again(world: World, worker: Member, above: int) -> None:
    """Check that a partition gets messages, and that the table takes its rows."""
    assert worker.partition.epoch > above
    assert (await world.owner()).epoch == worker.partition.epoch
    assert world.table.epoch == worker.partition.epoch, "G5 One owner: the table refuses it"
    assert (await worker.append(b"2", 2)).offset == 2


@pytest.mark.parametrize("session", ["the one that it knows", "a new one"])
async def test_an_owner_tells_a_restored_registry_its_epoch(
    world: World, monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    a, copy = await with_later_epoch(world)
    epoch = a.partition.epoch
    if session == "the one that it knows":
        copy = Ownership(0, "a", copy.epoch, copy.volume, session=a.store.session)
    restore(world, copy)
    await a.round()
    if session == "the one that it knows":
        assert a.partition.epoch == epoch, "a registry that is only a little behind is waited for"
    else:
        a.partition.session = "of before"
    monkeypatch.setattr(owning, "UNHEARD_S", 0.0)
    for _ in range(3):
        await a.round()
    await taken_again(world, a, epoch)


async def test_a_worker_that_starts_beside_a_restored_registry(world: World) -> None:
    a, copy = await with_later_epoch(world)
    epoch = a.partition.epoch
    await a.die()
    restore(world, copy)
    await taken_again(world, await world.settle("a"), epoch)


async def test_another_volumes_epoch_is_not_ours_to_pass(world: World) -> None:
    """Messages that only that volume has may have these offsets: a person must look."""
    a, copy = await with_later_epoch(world)
    await a.die()
    world.table.epoch += 5
    restore(world, copy)
    again = await world.settle("a")
    assert again.partition.epoch < world.table.epoch
    assert again.partition.refusal is not None
    assert again.partition.refusal.reason == "Fenced"


@pytest.mark.parametrize("then", ["another takes it", "it comes back"])
async def test_a_copy_from_before_it_began_does_not_give_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The one before drained it; what its successor acknowledged is on that one's volume alone."""
    a = await world.settle("a")
    await a.append(b"0", 0)
    await world.join("b")
    await world.assign("b")
    await a.drain()
    copy = await world.owner()
    b = await world.settle("b")
    await b.append(b"1", 1)
    restore(world, copy)
    monkeypatch.setattr(owning, "UNHEARD_S", 0.0)
    for _ in range(3):
        await b.round()
    await b.append(b"2", 2)
    await b.die()
    left = await world.owner()
    assert left.worker_id == "b", "G1 Durable: the partition went back to who had drained it"
    assert left.drained_at is None
    if then == "another takes it":
        monkeypatch.setattr("owner_fakes.SETTLE_S", 0.5)
        await world.assign("c")
        with pytest.raises(AssertionError):  # it waits for b's volume
            await world.settle("c")
    else:
        b = await world.settle("b")
        assert (await b.append(b"3", 3)).offset == 3


async def test_an_epoch_whose_answer_was_lost_is_taken_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, copy = await with_later_epoch(world)
    restore(world, copy)
    monkeypatch.setattr(owning, "UNHEARD_S", 0.0)
    world.cut = Cut("a", 0, Kind.FAILS_DONE)
    await a.round()
    world.cut = Cut()
    for _ in range(3):
        await a.round()
    assert (await world.owner()).epoch == a.partition.epoch, "G4: every ack would be refused"
    key = CursorKey("shop/s", TOPIC, 0)
    await a.store.store_cursors({key: b"{}"}, {(TOPIC, 0): a.partition.epoch})
    await a.drain()
    assert (await world.owner()).drained_at == 2
