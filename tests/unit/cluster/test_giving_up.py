"""A person's word about a lost volume is taken whole or not at all."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from tidewater_coordination.port import RegisteredTopic, Registry, WorkerInfo
from tidewater_core.errors import Invalid, NotFound
from tidewater_worker.api.cluster import add_cluster

TOPIC = "shop/orders"


class Store:
    """Notes what is given up."""

    def __init__(self) -> None:
        self.given_up: list[int] = []
        self.assigned: dict[int, str] = {}

    async def registry(self) -> Registry:
        topics = {TOPIC: RegisteredTopic(TOPIC, "uuid", "{}")}
        return Registry(1, topics, workers={"b": WorkerInfo("b")})

    async def give_up(self, _topic: str, partition: int, _reason: str) -> Any:
        self.given_up.append(partition)
        return SimpleNamespace(volume="volume-a")

    async def assign(self, _topic: str, number: int, to: str, others: dict[int, str]) -> None:
        self.assigned = {**others, number: to}


class Topic:
    """Has one partition."""

    spec = SimpleNamespace(partitions=1)

    def partition(self, number: int) -> None:
        if number:
            raise NotFound("UnknownPartition", "there is one")


def _give_up(store: Store) -> Any:
    app, node = FastAPI(), SimpleNamespace(topic=lambda *_: Topic())
    add_cluster(app, node, store)  # type: ignore[arg-type]
    (route,) = [each for each in app.routes if getattr(each, "path", "").endswith("/give-up")]
    return route.endpoint  # type: ignore[attr-defined]


async def test_nothing_is_given_up_for_a_worker_that_is_not_there() -> None:
    """G1: what is refused has lost nothing, since giving up cannot be taken back."""
    store = Store()
    with pytest.raises(Invalid) as refused:
        await _give_up(store)("shop", "orders", 0, "the disk burnt", "bb")
    assert refused.value.reason == "UnknownWorker"
    assert store.given_up == []
    await _give_up(store)("shop", "orders", 0, "the disk burnt", "b")
    assert (store.given_up, store.assigned) == ([0], {0: "b"})
