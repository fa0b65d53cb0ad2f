"""A partition on its way to another volume: what stops it stays, and no offset is given twice."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from owner_fakes import Member, World
from tidewater_core.errors import Conflict, Overloaded, Retryable
from tidewater_worker.cluster import owning
from tidewater_worker.ports import PartitionState, Phase


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(owning, "RETRY_S", 0.0)
    made = World(tmp_path, monkeypatch)
    await made.start()
    await made.assign("a")
    yield made
    await made.close()


async def with_five(world: World) -> Member:
    a = await world.settle("a")
    for sequence in range(5):
        await a.append(b"%d" % sequence, sequence)
    return a


def say(worker: Member, phase: Phase, reason: str = "") -> None:
    """Let the table process say how the partition stands."""
    partition = worker.partition
    partition.note(
        PartitionState(next=0, epoch=partition.epoch, state=phase, reason=reason, message=reason)
    )


async def test_a_drain_that_fails_leaves_a_partition_stopped(world: World) -> None:
    a = await with_five(world)
    say(a, Phase.STOPPED, "LogBehindTable")
    for _ in range(2):
        await a.drain()
        with pytest.raises(Conflict, match="LogBehindTable"):
            a.partition.ready()


async def test_a_drain_that_meets_what_nobody_foresaw_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await with_five(world)

    async def flush(*_: Any) -> None:
        raise SystemError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(a.node.link, "flush", flush)
        await a.drain()
    assert a.node.owning._retry
    assert (await a.append(b"5", 5)).offset == 5, "it takes messages meanwhile"


async def test_nothing_is_taken_while_it_drains_whatever_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await with_five(world)
    refused = []

    async def flush(*_: Any) -> None:
        say(a, Phase.STOPPED, "CatalogOdd")
        say(a, Phase.RUNNING)
        with pytest.raises(Retryable) as told:
            a.partition.ready()
        refused.append(told.value.reason)
        raise Retryable("CatalogAway", "not now")

    monkeypatch.setattr(a.node.link, "flush", flush)
    a.partition.refusal = Overloaded("BacklogFull", "which is no reason to stay", 1)
    await a.drain()
    assert refused == ["PartitionMoving"], "G1: what is taken behind a drain's end is lost"
    assert a.partition.ready().next_offset == 5, "it failed, and the partition goes on"


async def drained(world: World) -> None:
    a = await with_five(world)
    await a.drain()
    await world.assign("b")


@pytest.mark.parametrize("is_away", [False, True])
async def test_the_next_owner_of_a_table_that_forgot_begins_nothing(
    world: World, is_away: bool
) -> None:
    """The catalog was restored from a backup; the drained log is still where it was."""
    await drained(world)
    if is_away:
        await world.members["a"].die()
    world.table.next = 3
    b = await world.join("b")
    for _ in range(2):
        await b.round()
    assert not b.is_open, "G1 Durable: offsets 3 and 4 would be given twice"
    assert b.partition.refusal is not None
    assert b.partition.refusal.reason == "FrontierMovedBack"
    await world.assign("a")
    a = await world.settle("a")
    assert a.partition.ready().next_offset == 5, "who drained it still has the messages"
    assert (await a.append(b"5", 5)).offset == 5


@pytest.mark.parametrize("is_away", [False, True])
async def test_it_forgot_before_the_next_owner_had_a_message(world: World, is_away: bool) -> None:
    await drained(world)
    if is_away:
        await world.members["a"].die()
    b = await world.settle("b")
    await b.die()
    world.table.next = 3
    b = await world.join("b")
    await b.round()
    assert not b.is_open, "G1 Durable: offsets 3 and 4 would be given twice"
    assert b.partition.refusal is not None
    assert b.partition.refusal.reason == "FrontierMovedBack"
    world.table.next = 5
    b = await world.settle("b")
    assert (await b.append(b"5", 5)).offset == 5
