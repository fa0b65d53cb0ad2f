"""The drained log of a partition that another volume goes on with: when it goes, and when not."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from owner_fakes import TOPIC, Member, World
from tidewater_coordination.port import WorkerInfo
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_worker.cluster import owning, passed_on
from tidewater_worker.cluster.handover import left
from tidewater_worker.log.producers import Duplicate
from tidewater_worker.log.reader import list_segments
from tidewater_worker.partition import DirectoryLock
from tidewater_worker.volume import DRAINED_FILE, read_drained, write_drained

LONG_S = 7 * 86_400
WAIT_S = 20.0


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(owning, "RETRY_S", 0.0)
    made = World(tmp_path, monkeypatch)
    await made.start()
    await made.assign("a")
    yield made
    await made.close()


async def drained(world: World) -> Member:
    """Have `a` store five messages, drain them and assign the partition to `b`."""
    a = await world.settle("a")
    for sequence in range(5):
        await a.append(b"%d" % sequence, sequence)
    await a.drain()
    await world.assign("b")
    return a


def age(a: Member) -> None:
    """Let the log's retention pass."""
    note = a.partition.directory / DRAINED_FILE
    then = note.stat().st_mtime - LONG_S
    os.utime(note, (then, then))


async def swept(a: Member) -> list[int]:
    """Return the segments that are left after a sweep."""
    await a.node.owning.passed_on.sweep()
    assert not a.partition.is_busy
    return list_segments(a.partition.directory)


async def test_it_goes_after_its_retention_and_leaves_what_may_be_asked_for(world: World) -> None:
    a = await drained(world)
    await world.settle("b")
    assert await swept(a) == [0], "its retention is not over"
    before = left(a.partition.directory)
    age(a)
    assert await swept(a) == []
    assert left(a.partition.directory) == before, "G8"
    assert read_drained(a.partition.directory) is not None
    assert await swept(a) == [], "twice changes nothing"


async def test_a_worker_looks_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed_on, "SWEEP_S", 0.01)
    a = await drained(world)
    await world.settle("b")
    age(a)
    async with asyncio.timeout(WAIT_S):
        while list_segments(a.partition.directory):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_partition_comes_back_to_where_its_log_is_gone(world: World, is_away: bool) -> None:
    a = await drained(world)
    b = await world.settle("b")
    assert (await b.append(b"5", 5)).offset == 5
    age(a)
    assert await swept(a) == []
    if is_away:
        await a.die()
    await b.drain()
    await world.assign("a")
    a = await world.settle("a")
    again = await a.append(b"3", 3)
    assert (type(again), again.offset) == (Duplicate, 3), "G8: of the first turn here"
    assert (await a.append(b"6", 6)).offset == 6


async def test_it_stays_until_the_next_owner_has_begun(world: World) -> None:
    a = await drained(world)
    age(a)
    assert await swept(a) == [0], "nobody has it"
    other = SqliteCoordination(world.directory / "coordination.db")
    await other.start(WorkerInfo("b", volume="volume-b"))
    grant = await other.acquire(TOPIC, 0)
    assert await swept(a) == [0], "it may give the partition back"
    await other.begin(TOPIC, 0, grant.epoch)
    assert await swept(a) == []
    await other.close()


async def test_a_table_that_forgot_needs_it(world: World) -> None:
    a = await drained(world)
    await world.settle("b")
    age(a)
    world.table.next = 4
    assert await swept(a) == [0], "G1 Durable"
    world.table.next = 5
    assert await swept(a) == []


@pytest.mark.parametrize(
    "wrong", [{"end": 4}, {"end": 6}, {"epoch": 99}, {"topic_uuid": "another"}, {"topic_uuid": ""}]
)
async def test_a_note_of_something_else_lets_nothing_go(
    world: World, wrong: dict[str, object]
) -> None:
    a = await drained(world)
    await world.settle("b")
    directory = a.partition.directory
    note = read_drained(directory)
    assert note is not None
    world.table.next = 10
    write_drained(directory, msgspec.structs.replace(note, **wrong))
    age(a)
    assert await swept(a) == [0]
    (directory / DRAINED_FILE).unlink()
    assert await swept(a) == [0], "nobody says that it is drained"


@pytest.mark.parametrize("how", ["busy", "locked"])
async def test_nothing_goes_that_is_being_opened(world: World, how: str) -> None:
    a = await drained(world)
    await world.settle("b")
    age(a)
    partition = a.partition
    if how == "busy":
        partition.is_busy = True
        await a.node.owning.passed_on.sweep()
        partition.is_busy = False
    else:
        lock = DirectoryLock(partition.directory)
        await a.node.owning.passed_on.sweep()
        lock.release()
    assert list_segments(partition.directory) == [0]
    assert await swept(a) == []


async def test_a_log_that_cannot_be_looked_at_keeps_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a = await drained(world)
    await world.settle("b")
    age(a)
    sweeper, directory = a.node.owning.passed_on, a.partition.directory
    note = directory / DRAINED_FILE
    saved, stat = note.read_bytes(), note.stat()
    note.unlink()
    note.mkdir()  # what is there cannot be read, as on a bad disk
    await sweeper.sweep()
    assert list_segments(directory) == [0]
    note.rmdir()
    note.write_bytes(saved)
    os.utime(note, (stat.st_atime, stat.st_mtime))
    world.table.next = 4
    with caplog.at_level("WARNING"):
        for _ in range(3):
            await sweeper.sweep()
    assert caplog.text.count("FrontierMovedBack") == 1, "told once"
    world.table.next = 5
    assert await swept(a) == []
