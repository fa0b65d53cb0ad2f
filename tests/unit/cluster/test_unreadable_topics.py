"""A topic whose record in the registry cannot be read is there all the same (G7)."""

from pathlib import Path

import msgspec
import pytest

from owner_fakes import TOPIC, Member, World
from tidewater_coordination.port import Registry

UNREADABLE = (f"topics/{TOPIC}",)


def spoil(worker: Member) -> None:
    """Have the worker's registry say what etcd's does of a record that cannot be decoded."""
    real = worker.node._coordination.registry

    async def registry() -> Registry:
        found = await real()
        topics = {name: topic for name, topic in found.topics.items() if name != TOPIC}
        return msgspec.structs.replace(found, topics=topics, unreadable=UNREADABLE)

    worker.node._coordination.registry = registry  # type: ignore[method-assign]


async def test_it_is_served_on_and_its_log_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    await world.start()
    await world.assign("a")
    worker = await world.settle("a")
    await worker.append(b"one", 1)
    directory = worker.partition.directory
    spoil(worker)
    await worker.round()
    assert TOPIC in worker.node.topics
    await worker.append(b"two", 2)
    assert list(directory.glob("*.wal"))
    assert worker.node.owning.refused[TOPIC].reason == "RecordUnreadable"
    keeper = worker.store._keeper
    assert keeper is not None
    await worker.lose_session()
    await keeper._once()
    await worker.round()
    await worker.append(b"three", 3)  # by the next session, too
    await world.close()


async def test_a_start_does_not_take_its_logs_for_those_of_a_topic_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    await world.start()
    await world.assign("a")
    worker = await world.settle("a")
    directory = worker.partition.directory
    (directory / "drained.json").write_bytes(b'{"end": 0, "epoch": 1}')
    await world.store.register_topic("shop/other", '{"partitions":1}', "8" * 8)
    spoil(worker)
    worker.node.owning.leaving._is_swept = False
    await worker.node.owning.leaving.sweep_once(await worker.node._coordination.registry())
    assert directory.is_dir()
    assert worker.node.owning.leaving.leftovers == []
    await world.close()
