"""Partitions that persons move by way of any worker: no move undoes another."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_coordination.port import Registry, WorkerInfo
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_worker.api.cluster import _assign

TOPIC = "shop/orders"


class Behind(SqliteCoordination):
    """A worker's store; what it hears of the registry is that of its start."""

    heard: Registry

    async def registry(self) -> Registry:
        return self.heard


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[dict[str, Behind]]:
    """Join workers; `a` has all partitions, and none is assigned."""
    path = tmp_path / "coordination.db"
    joined = {name: Behind(path) for name in "abc"}
    for name, store in joined.items():
        await store.start(WorkerInfo(name, volume=f"volume-{name}"))
    await joined["a"].register_topic(TOPIC, "{}", "uuid")
    for number in range(3):
        await joined["a"].acquire(TOPIC, number)
    for store in joined.values():
        store.heard = await SqliteCoordination.registry(store)
    yield joined
    for store in joined.values():
        await store.close()


async def test_a_move_through_a_worker_that_has_not_heard_of_another(
    workers: dict[str, Behind],
) -> None:
    found = SimpleNamespace(spec=SimpleNamespace(partitions=3), partition=lambda _: None)
    node: Any = SimpleNamespace(topic=lambda *_: found)
    await _assign(node, workers["a"], TOPIC, 0, "b")
    await _assign(node, workers["c"], TOPIC, 1, "c")
    registry = await SqliteCoordination.registry(workers["b"])
    assert registry.assignments[TOPIC] == {0: "b", 1: "c", 2: "a"}, "both were answered 202"
