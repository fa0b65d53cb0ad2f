"""A subscription that is deleted and made again has a place of its own (G4)."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_coordination.port import WorkerInfo
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.names import TopicName
from tidewater_worker.dispatch import opening
from tidewater_worker.dispatch.cursor import decode_progress
from tidewater_worker.dispatch.manager import Dispatch
from tidewater_worker.dispatch.part import Part
from tidewater_worker.partition import Partition
from tidewater_worker.ports import PartitionState

SPEC = (
    '{"topic":"orders","startFrom":{"position":"%s"},"maxDeliveries":1,'
    '"deadLetter":{"topic":"graves"},"backoff":{"initial":"0s"}}'
)


class Log:
    """As far as subscriptions look at a log."""

    def __init__(self, end: int) -> None:
        self.start, self.end, self.durable_end = 0, end, end
        self.segments: list[Any] = []

    async def wait_past(self, _offset: int, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return False


class NoWindow:
    """Messages without payloads."""

    def __init__(self, *_: Any) -> None:
        pass

    async def fetch(self, delivery: Any, _want: int) -> bool:
        if delivery.fetched >= 3:
            return False
        delivery.offer(delivery.fetched, 3, dict.fromkeys(range(3)))
        return True

    async def close(self) -> None:
        pass


async def test_an_old_one_that_is_still_at_work_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "Window", NoWindow)
    store = SqliteCoordination(tmp_path / "coordination.db")
    await store.start(WorkerInfo("w", "", "", "volume"))
    await store.register_topic("shop/orders", "{}", "t")
    await store.acquire("shop/orders", 0)
    log: Any = Log(3)
    partition = Partition(
        "shop/orders", 0, tmp_path, epoch=1, table=PartitionState(), is_open=True, appender=log
    )
    topic = SimpleNamespace(
        name=TopicName("shop", "orders"), spec=TopicSpec(), uuid="t", state=None,
        partitions={0: partition}, counters=Counter(), is_spread=False,
    )  # fmt: skip
    clock = SimpleNamespace(monotonic=time.monotonic, now_us=lambda: 1)
    node: Any = SimpleNamespace(
        clock=clock, topic=lambda *_: topic, topics={}, spawn=asyncio.create_task, link=None
    )
    dispatch = Dispatch(node, store)
    await store.register_subscription("shop/s", SPEC % "earliest", "old")
    await dispatch._sync()
    old = dispatch.local("shop", "orders", "s")
    await old.open()
    part: Part = old.parts[0]

    await store.unregister_subscription("shop/s")
    await store.register_subscription("shop/s", SPEC % "latest", "new")
    await dispatch._sync()
    await dispatch.local("shop", "orders", "s").open()

    async def stored() -> tuple[str, int]:
        progress = decode_progress((await store.load_cursors("shop/s", "shop/orders"))[0])
        return progress.subscription, progress.next

    assert await stored() == ("new", 3)
    # What was under way of the old one ends now: a letter is buried, an ack is stored.
    dispatch.store.note(old._key(part), part.encode, 0.0)
    await asyncio.sleep(0.05)
    await dispatch.store.close()
    assert await stored() == ("new", 3), "G4: the old one's place was stored for the new one"
    await store.close()
