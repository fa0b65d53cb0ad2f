"""A table is asked for its health after commits, and while time or a job may change it."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from tidewater_worker.table_health import AGAIN_S, ASK_S, TableHealth


class Node:
    """A node with one idle topic; its table process says what it is told to."""

    def __init__(self, health: dict[str, int]) -> None:
        self.health = health
        self.asked = 0
        self.link = self
        self.tasks: list[asyncio.Task[None]] = []

    async def stats(self, _topic: str) -> dict[str, int]:
        self.asked += 1
        return dict(self.health)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))


async def look(known: TableHealth, node: Node, snapshot: int, now: float) -> dict[str, Any]:
    topic: Any = SimpleNamespace(name="shop/orders", state=SimpleNamespace(snapshot_id=snapshot))
    known.of(topic, now)
    await asyncio.gather(*node.tasks)
    return known.of(topic, now)


async def test_small_files_of_an_idle_topic_are_looked_at_again() -> None:
    """An hour that closed, or a job that had joined them, was never noticed."""
    node = Node({"small_files": 9, "debt_files": 0})
    known = TableHealth(node, node.spawn)
    assert (await look(known, node, 1, 0.0))["debt_files"] == 0
    node.health = {"small_files": 9, "debt_files": 9}
    assert (await look(known, node, 1, AGAIN_S - 1))["debt_files"] == 0, "not at once"
    assert (await look(known, node, 1, AGAIN_S))["debt_files"] == 9
    node.health = {"small_files": 0, "debt_files": 0}
    assert (await look(known, node, 1, 2 * AGAIN_S))["debt_files"] == 0
    assert node.asked == 3
    await look(known, node, 1, 9 * AGAIN_S)
    assert node.asked == 3, "nothing to wait for: an idle topic costs nothing"
    await look(known, node, 2, 9 * AGAIN_S + ASK_S)
    assert node.asked == 4, "a commit is looked at"
