"""A whole subscription while consumers come, go, fail and fall silent (G4).

Three partitions, a clock that the test moves, any sequence of events: what is acknowledged does not
come again, order groups are with one consumer at a time and in order, and in the end two steady
consumers get all that is left. Nothing is stuck, nothing is skipped.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewater_coordination.port import CursorKey, Registry
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Conflict, Fenced
from tidewater_core.names import TopicName
from tidewater_worker.dispatch import window as window_module
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.bell import Bell
from tidewater_worker.dispatch.idle import Idle
from tidewater_worker.dispatch.keyshared import key_hash
from tidewater_worker.dispatch.store import ProgressStore
from tidewater_worker.dispatch.subscription import Subscription
from tidewater_worker.partition import Partition
from tidewater_worker.ports import Sifted
from tidewater_worker.schema import HEADERS_TYPE, TIME_TYPE, table_arrow_schema
from tidewater_worker.topic import Topic

PARTITIONS = 3
CONSUMERS = ("a", "b", "c")
KEYS = (None, b"k1", b"k2", b"k3")
TOPIC_SPEC = TopicSpec.model_validate({"partitions": PARTITIONS})
SCHEMA = table_arrow_schema(TOPIC_SPEC)
BYTES_MAX = 1 << 20
ROUNDS_MAX = 300
Place = tuple[int, int]

consumers = st.sampled_from(CONSUMERS)
which = st.integers(0, 30)
numbers = st.integers(0, PARTITIONS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"), st.integers(0, 2), st.lists(st.sampled_from(KEYS), max_size=6)
        ),
        st.tuples(st.just("pull"), consumers, st.integers(1, 6)),
        st.tuples(st.just("pull"), consumers, st.integers(1, 6)),
        st.tuples(st.just("ack"), which, st.integers(1, 4)),
        st.tuples(st.just("ack"), which, st.integers(1, 4)),
        st.tuples(st.just("nack"), which, st.sampled_from([None, 0.0, 3.0])),
        st.tuples(st.just("fail"), which, consumers),
        st.tuples(st.just("extend"), which, st.sampled_from([None, 30.0])),
        st.tuples(st.just("give_back"), which, st.none()),
        st.tuples(st.just("leave"), consumers, st.none()),
        st.tuples(st.just("news"), consumers, st.none()),
        st.tuples(st.just("time"), st.sampled_from([0.5, 3.0, 11.0]), st.none()),
        st.tuples(st.just("move"), numbers, st.none()),
        st.tuples(st.just("restart"), st.none(), st.none()),
    ),
    min_size=8,
    max_size=40,
)


class Log:
    """Stands for a partition's log: keys of its messages; the newer half is said to be live."""

    def __init__(self) -> None:
        self.keys: list[bytes | None] = []
        self.start = 0
        self.segments: list[object] = [object()]

    @property
    def end(self) -> int:
        return len(self.keys)

    @property
    def durable_end(self) -> int:
        return self.end

    @property
    def tail(self) -> SimpleNamespace:
        return SimpleNamespace(start=self.end // 2)

    async def wait_past(self, offset: int, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return self.end > offset


class Reader:
    """Reads a `Log` in place of the real reader."""

    def __init__(self, _node: object, _topic: Topic, partition: Partition, offset: int) -> None:
        self._partition, self.offset = partition, offset

    async def sifted(self, _wanted: object) -> AsyncIterator[Sifted]:
        start = self.offset
        async for batch in self.batches(1 << 62):
            yield Sifted(start, self.offset, batch)
            start = self.offset

    async def batches(self, limit: int) -> AsyncIterator[pa.RecordBatch]:
        while limit > 0:
            log: Any = self._partition.readable()
            rows = min(limit, log.end - self.offset, 5)
            if rows <= 0:
                return
            await asyncio.sleep(0)
            keys = log.keys[self.offset : self.offset + rows]
            columns = [
                pa.array([self._partition.number] * rows, pa.int32()),
                pa.array(np.arange(self.offset, self.offset + rows, dtype=np.int64)),
                pa.array([0] * rows, TIME_TYPE),
                pa.array(keys, pa.binary()),
                pa.nulls(rows, HEADERS_TYPE),
                pa.array([b"v"] * rows, pa.binary()),
            ]
            self.offset += rows
            limit -= rows
            yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class Port:
    """Stores progress in memory, and refuses it from an owner that is over."""

    def __init__(self, epochs: Callable[[int], int]) -> None:
        self.stored: dict[CursorKey, bytes] = {}
        self._epochs = epochs

    async def registry(self) -> Registry:
        return Registry()

    async def changed(self, since: int, timeout_s: float) -> int:
        await asyncio.sleep(timeout_s)
        return since

    async def load_cursors(self, subscription: str, topic: str) -> dict[int, bytes]:
        return {key.partition: data for key, data in self.stored.items()}

    async def store_cursors(
        self,
        items: Mapping[CursorKey, bytes],
        epochs: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        for (_, number), epoch in (epochs or {}).items():
            if epoch != self._epochs(number):
                raise Fenced("Fenced", "another epoch")
        self.stored.update(items)


class Scene:
    """A subscription and the model of what it owes."""

    def __init__(self, kind: str) -> None:
        self.kind, self.now = kind, 1_000.0
        clock = SimpleNamespace(
            monotonic=lambda: self.now, now_us=lambda: int(self.now * 1e6) + self.ticks()
        )
        self._ticks = 0
        self.logs = [Log() for _ in range(PARTITIONS)]
        partitions: dict[int, Partition] = {}
        for number, log in enumerate(self.logs):
            part = Partition("shop/all", number, Path("/nowhere"), epoch=1, is_open=True)
            part.appender = log  # type: ignore[assignment]
            partitions[number] = part
        self.topic = Topic(TopicName("shop", "all"), UUID(int=1), TOPIC_SPEC, "", partitions)
        self.node: Any = SimpleNamespace(
            clock=clock, topic=lambda *_name: self.topic, spawn=asyncio.ensure_future
        )
        self.port = Port(lambda number: self.topic.partitions[number].epoch)
        self.store, self.bell, self.idle = ProgressStore(self.port), Bell(), Idle(clock)
        self.spec = SubscriptionSpec.model_validate(
            {"topic": "all", "type": kind, "ackDeadline": "10s", "maxUnacked": 8,
             "backoff": {"initial": "1s", "max": "2s"}}
        )  # fmt: skip
        self.subscription = self.make()
        self.acked: set[Place] = set()
        self.given: list[tuple[str, str]] = []
        """Consumer and ack id of every delivery."""

    def ticks(self) -> int:
        self._ticks += 1
        return self._ticks

    def make(self) -> Subscription:
        return Subscription(
            self.node, self.store, self.bell, None, self.idle,  # type: ignore[arg-type]
            self.port.load_cursors, "shop/s", "uuid", self.spec,
        )  # fmt: skip

    async def close(self) -> None:
        await self.idle.close()
        await self.bell.close()
        await self.store.close()

    # ---- what must hold

    def group(self, place: Place) -> object:
        if self.kind in ("Exclusive", "Failover"):
            return place[0]
        key = self.logs[place[0]].keys[place[1]]
        return None if self.kind == "Shared" or key is None else (place[0], key_hash(key))

    def held(self) -> dict[Place, str]:
        """Return who has what, as the subscription sees it."""
        return {
            (number, offset): message.holder
            for number, part in self.subscription.parts.items()
            for offset, message in part.delivery._open.items()
            if part.is_current and message.holder is not None
        }

    def check(self, consumer: str, places: list[Place], before: dict[Place, str]) -> None:
        held = self.held()
        for place in places:
            assert place not in self.acked, f"G4: {place} was acknowledged and comes again"
            assert before.get(place) is None, f"G4: {place} is with {before[place]} as well"
            group = self.group(place)
            if group is None:
                continue
            for offset in range(place[1]):
                other = (place[0], offset)
                if self.group(other) == group and other not in self.acked:
                    assert held.get(other) == consumer, f"G4: {place} overtakes {other}"
            for offset in range(place[1] + 1, self.logs[place[0]].end):
                other = (place[0], offset)
                if self.group(other) == group:
                    assert other not in before, f"G4: {place} comes while {other} is out"

    # ---- events

    async def publish(self, number: int, keys: list[bytes | None]) -> None:
        self.logs[number].keys += keys

    async def pull(self, consumer: str, limit: int) -> list[Place]:
        self.subscription._expire_members()
        before = self.held()
        try:
            found = await self.subscription.pull(consumer, limit, 0, BYTES_MAX)
        except Conflict:
            assert self.kind == "Exclusive"
            return []
        ids = [text for piece in found for text in piece.ack_ids]
        self.given += ((consumer, text) for text in ids)
        places = [(at.partition, at.offset) for at in map(AckId.parse, ids)]
        assert len(places) <= limit
        self.check(consumer, places, before)
        assert sum(who == consumer for who in self.held().values()) <= self.spec.max_unacked
        return places

    async def ack(self, at: int, count: int) -> None:
        some = self.given[-1 - at :][:count]
        ids = [text for _, text in some]
        try:
            report = await self.subscription.ack(ids)
        except Fenced:
            return
        refused = {each.ack_id for each in report.refused}
        for text in ids:
            if text not in refused:
                parsed = AckId.parse(text)
                self.acked.add((parsed.partition, parsed.offset))

    async def nack(self, at: int, delay_s: float | None) -> None:
        await self.subscription.nack([text for _, text in self.given[-1 - at :][:1]], delay_s)

    async def fail(self, at: int, other: str) -> None:
        """Give something back, and see who gets what after the backoff."""
        for consumer, _ in self.given[-1 - at :][:1]:
            await self.nack(at, None)
            self.now += 2.0
            await self.pull(consumer, 2)
            await self.pull(other, 2)

    async def extend(self, at: int, deadline_s: float | None) -> None:
        await self.subscription.extend([text for _, text in self.given[-1 - at :][:1]], deadline_s)

    async def give_back(self, at: int, _none: None) -> None:
        for consumer, text in self.given[-1 - at :][:1]:
            await self.subscription.give_back(consumer, [text])

    async def leave(self, consumer: str, _none: None) -> None:
        self.subscription.leave(consumer)
        assert consumer not in self.held().values()

    async def news(self, consumer: str, _none: None) -> None:
        before = self.held()
        try:
            has_news = await self.subscription.has_news(consumer, 0)
        except Conflict:
            return
        gone = {place for place, who in before.items() if self.held().get(place) != who}
        assert not self.held().keys() - before.keys(), "who asks for news takes nothing along"
        if has_news and not gone:
            assert await self.pull(consumer, 1), "there was news"

    async def time(self, seconds: float, _none: None) -> None:
        self.now += seconds

    async def move(self, number: int, _none: None) -> None:
        """Let another owner have a partition, which happens to be this one again."""
        self.topic.partitions[number].epoch += 1

    async def restart(self, *_none: None) -> None:
        for partition in self.topic.partitions.values():
            partition.epoch += 1
        self.subscription = self.make()

    async def settle(self) -> None:
        """Two steady consumers get all that is left."""
        for consumer in CONSUMERS:
            self.subscription.leave(consumer)
        wanted = {(n, offset) for n, log in enumerate(self.logs) for offset in range(log.end)}
        for _ in range(ROUNDS_MAX):
            if wanted <= self.acked:
                break
            for consumer in ("a",) if self.kind == "Exclusive" else ("a", "b"):
                places = await self.pull(consumer, 8)
                if places:
                    await self.ack(len(places) - 1, len(places))
            self.now += 0.5
        left = sorted(wanted - self.acked)
        assert not left, f"G4: stuck or skipped: {left[:5]} of {len(left)}"
        for number, part in self.subscription.parts.items():
            assert part.delivery.cursor.next == self.logs[number].end
            assert not part.delivery.open_count


async def live(kind: str, script: list[tuple[str, Any, Any]]) -> None:
    scene = Scene(kind)
    try:
        for number in range(PARTITIONS):
            await scene.publish(number, list(KEYS) * 2)
        for name, first, second in script:
            event: Callable[..., Awaitable[object]] = getattr(scene, name)
            await event(first, second)
        await scene.settle()
    finally:
        await scene.close()


@pytest.mark.parametrize("kind", ["Shared", "KeyShared", "Failover", "Exclusive"])
def test_nothing_is_stuck_or_skipped(kind: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(steps)
    def run(script: list[tuple[str, Any, Any]]) -> None:
        asyncio.run(live(kind, script))

    with patch.object(window_module, "PartitionReader", Reader):
        run()
