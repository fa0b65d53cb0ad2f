"""Pulls that are cut short, and what else happens to a part meanwhile (G4)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tidewater_core.crd.subscription import StartFrom, SubscriptionSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Retryable
from tidewater_worker.api import encode
from tidewater_worker.api.subscriptions import _arrow, _arrow_schema, gaps_of, with_gaps
from tidewater_worker.dispatch import opening
from tidewater_worker.dispatch.cursor import Begun, Cursor
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.part import Delivered, Part
from tidewater_worker.dispatch.policy import Leased, Policy
from tidewater_worker.dispatch.spread import Spread, decode_delivered
from tidewater_worker.dispatch.subscription import Subscription
from tidewater_worker.dispatch.window import Piece
from tidewater_worker.ports import PartitionState


class Log:
    """As far as subscriptions look at a log."""

    def __init__(self, end: int) -> None:
        self.start, self.end, self.durable_end = 0, end, end


class Window:
    """Messages in memory; `gate` holds their payloads back."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.gate = asyncio.Event()
        self.gate.set()

    def is_live(self, _delivery: Delivery) -> bool:
        return True

    async def fetch(self, delivery: Delivery, _want: int) -> bool:
        if delivery.fetched >= self.end:
            return False
        delivery.offer(delivery.fetched, self.end, dict.fromkeys(range(self.end)))
        return True

    async def payloads(self, leases: Sequence[Leased]) -> AsyncIterator[Piece]:
        await self.gate.wait()
        offsets = pa.array([leased.offset for leased in leases])
        yield Piece(pa.record_batch([offsets], ["tw_offset"]), list(leases), 1)

    async def close(self) -> None:
        pass


class Stored:
    """Takes progress."""

    async def save(self, _items: object) -> None:
        pass

    def note(self, *_: object) -> None:
        pass


def subscription_of(*ends: int) -> Subscription:
    """Return a subscription whose partitions are all in memory."""
    topic: Any = SimpleNamespace(spec=TopicSpec(), uuid="t", partitions={}, state=None)
    clock = SimpleNamespace(monotonic=lambda: 0.0, now_us=lambda: 0)
    node: Any = SimpleNamespace(clock=clock, topic=lambda *_: topic)
    other: Any = SimpleNamespace(used=lambda _part: None)
    store: Any = Stored()
    spec = SubscriptionSpec(topic="orders")
    made = Subscription(node, store, other, other, other, other, "shop/s", "u", spec)
    for number, end in enumerate(ends):
        log = Log(end)
        partition: Any = SimpleNamespace(
            number=number, epoch=1, drained=None, appender=log, readable=lambda log=log: log,
            table=PartitionState(), is_open=True, is_elsewhere=False,
        )  # fmt: skip
        topic.partitions[number] = partition
        delivery = Delivery(Policy(), Cursor(0), 0, lambda _key: None)
        window: Any = Window(end)
        made.parts[number] = Part(topic, partition, "u", delivery, window, Begun())
    return made


async def test_a_pull_that_is_cut_between_partitions_keeps_nothing() -> None:
    subscription = subscription_of(3, 3)
    parts = subscription.parts
    subscription.turn = 1  # the next look begins with partition 0
    parts[1].window.gate.clear()  # type: ignore[attr-defined]
    pull = asyncio.create_task(subscription._take("c", 100, 1_000_000))
    async with asyncio.timeout(5):
        while not parts[1].delivery.out_by["c"]:
            await asyncio.sleep(0)
    assert parts[0].delivery.out_by["c"] == 3
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert [part.delivery.out_by["c"] for part in parts.values()] == [0, 0]
    parts[1].window.gate.set()  # type: ignore[attr-defined]
    await subscription._take("d", 100, 1_000_000)
    assert [part.delivery.out_by["d"] for part in parts.values()] == [3, 3]


async def test_nothing_is_delivered_once_the_next_owner_may() -> None:
    part = subscription_of(3).parts[0]
    part.window.gate.clear()  # type: ignore[attr-defined]
    taking = asyncio.create_task(part.take("c", lambda: 10, 1_000, lambda: 0.0))
    await asyncio.sleep(0)
    part.partition.drained = 3
    part.window.gate.set()  # type: ignore[attr-defined]
    with pytest.raises(Retryable, match="PartitionMoving"):
        await taking
    for look in (
        part.take("c", lambda: 10, 1_000, lambda: 0.0),
        part.has_for("c", lambda: 1, lambda: 0.0),
    ):
        with pytest.raises(Retryable, match="PartitionMoving"):
            await look
    assert part.delivery.out_by["c"] == 0


async def test_a_change_of_the_topic_gives_nothing_back_unless_its_columns_change() -> None:
    subscription = subscription_of(3)
    (part,) = subscription.parts.values()
    await part.take("c", lambda: 10, 1_000, lambda: 0.0)
    subscription.topic.spec = TopicSpec.model_validate({"freshness": "1m"})
    await subscription.open()
    assert part.delivery.out_by["c"] == 3
    field = {"name": "id", "type": "long"}
    subscription.topic.spec = TopicSpec.model_validate({"schema": {"fields": [field]}})
    await subscription.open()
    assert part.delivery.out_by["c"] == 0


async def test_an_ack_is_not_taken_back_under_a_fetch() -> None:
    subscription = subscription_of(3)
    (part,) = subscription.parts.values()
    part.delivery.cursor.add(0, 2)
    async with part.lock:
        restoring = asyncio.create_task(subscription.restore([(0, 1, None)]))
        await asyncio.sleep(0.01)
        assert 1 in part.delivery.cursor
    assert await restoring == (1, 0)
    assert 1 not in part.delivery.cursor


async def test_a_look_is_not_counted_as_a_delivery() -> None:
    (part,) = subscription_of(1).parts.values()
    assert await part.take("c", lambda: 10, 1_000, lambda: 0.0)
    part.delivery.nack(0, 1, 0.0, 0.0)
    for _ in range(5):
        assert await part.has_for("c", lambda: 1, lambda: 0.0)
    assert part.delivery.redeliveries == 0
    assert await part.take("c", lambda: 10, 1_000, lambda: 0.0)
    assert part.delivery.redeliveries == 1


async def test_what_was_lost_is_named_with_the_first_message_after_it() -> None:
    (part,) = subscription_of(8).parts.values()
    part.partition.table = PartitionState(gaps=((2, 5), (6, 9)))
    part.delivery.cursor.add(2, 5)
    assert (await part.take("c", lambda: 2, 1_000, lambda: 0.0))[0].gaps == []
    after = await part.take("c", lambda: 2, 1_000, lambda: 0.0)
    named = [{"partition": 0, "start": 2, "end": 5}]
    assert gaps_of(after) == named
    # And so from one worker to the next.
    schema = _arrow_schema(after[0].batch.schema)
    head = encode.arrow_schema_message(with_gaps(schema, after))
    passed_on = decode_delivered(head + _arrow([*after, *after], schema) + encode.ARROW_END)
    assert gaps_of(passed_on) == named
    assert gaps_of(decode_delivered(encode.arrow_schema_message(schema) + encode.ARROW_END)) == []


async def test_a_place_is_not_moved_while_a_partition_opens_here() -> None:
    """Replayed letters would be dropped as expired, and a seek move a part of it."""
    subscription = subscription_of(5, 5)
    for part in subscription.parts.values():
        part.delivery.cursor.add(0, 5)
    opening = subscription.topic.partitions[1]
    del subscription.parts[1]
    opening.appender, opening.is_open = None, False
    with pytest.raises(Retryable, match="PartitionOpening"):
        await subscription.restore([(0, 1, None), (1, 1, None)])
    assert 1 in subscription.parts[0].delivery.cursor, "nothing is taken back by halves"
    with pytest.raises(Retryable, match="PartitionOpening"):
        await subscription.seek(StartFrom(offset=0))
    assert await subscription.restore([(0, 1, None)]) == (1, 0)
    opening.is_elsewhere = True  # its owner is asked, too
    assert await subscription.seek(StartFrom(offset=0)) == {0: 0}


async def test_owners_with_news_that_cannot_be_read_are_not_asked_without_a_pause() -> None:
    asked = 0

    async def news(*_: object) -> bool:
        return True

    async def pull(*_: object) -> list[Delivered]:
        nonlocal asked
        asked += 1
        return []

    there = SimpleNamespace(is_elsewhere=True, remote_url="http://b")
    topic = SimpleNamespace(is_spread=True, partitions={0: there, 1: there})
    here: Any = SimpleNamespace(topic=topic, spec=SubscriptionSpec(topic="orders"), turn=0)
    clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
    node: Any = SimpleNamespace(clock=clock)
    spread: Any = Spread(node, here)
    spread._has_news, spread._pull_from = news, pull
    assert await spread.pull("c", 10, 1.0, 1000) == []
    assert 2 <= asked <= 10, "G6 Bounded: it asked again at once, for ever"


class Closing(Window):
    """Closes when it is told to, as one does whose read of the table goes on for a moment."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.may_close = asyncio.Event()

    async def close(self) -> None:
        await self.may_close.wait()


@pytest.mark.parametrize("comes", ["before", "amid"])
async def test_a_new_spec_gives_no_two_consumers_one_number(
    monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """Else the ack of the first one would count for what the second one has."""
    monkeypatch.setattr(opening, "Window", lambda *_: Window(5))
    found = subscription_of(5)
    part = found.parts[0]
    old: Any = Closing(5)
    part.window = old

    async def take(consumer: str) -> list[str]:
        taken = await part.take(consumer, lambda: 3, 1_000_000, lambda: 0.0)
        return [ack_id for piece in taken for ack_id in piece.ack_ids]

    await part.window.fetch(part.delivery, 5)  # for all
    old.gate.clear()
    spec = SubscriptionSpec(topic="orders", max_unacked=7)
    if comes == "before":
        first = asyncio.create_task(take("a"))
        await asyncio.sleep(0)
        changing = asyncio.create_task(found.change(spec, 2))
    else:
        changing = asyncio.create_task(found.change(spec, 2))
        await asyncio.sleep(0)
        first = asyncio.create_task(take("a"))
    await asyncio.sleep(0)
    old.may_close.set()
    old.gate.set()
    await changing
    second = await take("b")
    assert second
    assert not set(await first) & set(second)
    held = part.delivery.out_by["b"]
    if ids := await first:
        await found.ack(ids)
    assert part.delivery.out_by["b"] == held


async def test_other_columns_are_taken_once_however_many_look() -> None:
    found = subscription_of(5)
    part = found.parts[0]
    made: list[Any] = []
    real = found._opener.again

    def again(spec: SubscriptionSpec, of: Part) -> Part:
        made.append(of)
        return real(spec, of)

    found._opener.again = again  # type: ignore[method-assign, assignment]
    fields = [{"name": "region", "type": "string"}]
    part.topic.spec = TopicSpec.model_validate({"schema": {"fields": fields}})
    async with part.lock:  # a read that is under way
        both = asyncio.gather(found.open(), found.open())
        await asyncio.sleep(0.01)
    await both
    assert len(made) == 1


async def test_what_was_taken_before_a_seek_is_not_delivered_after_it() -> None:
    found = subscription_of(5)
    part = found.parts[0]
    window: Any = part.window
    window.gate.clear()
    first = asyncio.create_task(part.take("a", lambda: 5, 1_000_000, lambda: 0.0))
    await asyncio.sleep(0)
    part.delivery.reset(4, 7)
    window.gate.set()
    assert await first == []
    assert not part.delivery.out_by


async def test_a_partition_whose_progress_cannot_be_read_keeps_no_other() -> None:
    found = subscription_of(5, 5)
    del found.parts[1]

    async def opened(*_: object) -> None:
        raise Corrupt("CursorCorrupt", "what is stored cannot be read")

    found._opener.open = opened  # type: ignore[method-assign, assignment]
    assert not await found.open()
    (taken,) = await found._take("a", 10, 1_000_000)
    assert len(taken.ack_ids) == 5
    assert (await found.ack(taken.ack_ids)).done == 5
    with pytest.raises(Corrupt, match="CursorCorrupt"):
        await found._take("a", 10, 1_000_000)  # nothing is left: why is told
    with pytest.raises(Corrupt, match="CursorCorrupt"):
        await found._has_for("a")
    with pytest.raises(Corrupt, match="CursorCorrupt"):
        await found.seek(StartFrom(offset=0))
