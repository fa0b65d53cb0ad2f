"""A crash between a dead letter and its acknowledgement: perhaps twice, never lost (G4)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tidewater_coordination.port import CursorKey
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.dispatch import deadletter
from tidewater_worker.dispatch.cursor import (
    Begun,
    decode_failures,
    decode_progress,
    decode_ranges,
)
from tidewater_worker.dispatch.deadletter import DeadLetters, _letters
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.part import Part, policy_of
from tidewater_worker.dispatch.policy import Leased
from tidewater_worker.dispatch.store import ProgressStore
from tidewater_worker.dispatch.window import Piece
from tidewater_worker.log.group import Rows
from tidewater_worker.ports import PartitionState
from tidewater_worker.schema import table_arrow_schema

SPEC = SubscriptionSpec.model_validate(
    {"topic": "orders", "maxDeliveries": 2, "deadLetter": {"topic": "graves"},
     "backoff": {"initial": "0s"}}
)  # fmt: skip
SCHEMA = table_arrow_schema(TopicSpec())


class Crash(BaseException):
    """The process ends here."""


class Window:
    """One message in memory."""

    end = 1

    def is_live(self, _delivery: Delivery) -> bool:
        return True

    async def fetch(self, delivery: Delivery, _want: int) -> bool:
        if delivery.fetched:
            return False
        delivery.offer(0, 1, {0: None})
        return True

    async def payloads(self, leases: Sequence[Leased]) -> AsyncIterator[Piece]:
        row = {"tw_partition": 0, "tw_offset": 0, "tw_time": 0, "tw_key": b"k", "value": b"poison"}
        yield Piece(pa.RecordBatch.from_pylist([row], SCHEMA), list(leases), 1)


class Letters(DeadLetters):
    """A dead-letter topic, and the store of progress; either may be where the process ends."""

    def __init__(self, stored: bytes) -> None:
        clock = SimpleNamespace(monotonic=lambda: 0.0)
        graves = SimpleNamespace(spec=TopicSpec(), name="shop/graves")
        node: Any = SimpleNamespace(clock=clock, topic=lambda *_: graves)
        super().__init__(node, self, self)  # type: ignore[arg-type]
        self.letters: list[dict[str, str]] = []
        self.stored = stored
        self.ends_at = ""

    async def _produce(self, _topic: Any, payload: Any) -> None:
        if self.ends_at == "before the letter":
            raise Crash
        assert isinstance(payload, Rows)
        self.letters += [dict(headers or ()) for headers in payload.headers or ()]

    async def save(self, items: Any) -> None:
        if self.ends_at == "before the ack":
            raise Crash
        for encode in items.values():
            self.stored = encode()[0]


def part_of(stored: bytes | None) -> Part:
    """Open the partition, with what is stored."""
    log = SimpleNamespace(start=0, end=1, durable_end=1)
    partition: Any = SimpleNamespace(
        number=0, epoch=1, drained=None, appender=log, readable=lambda: log, table=PartitionState()
    )
    topic: Any = SimpleNamespace(spec=TopicSpec(), uuid="t", state=None, partitions={0: partition})
    progress = None if stored is None else decode_progress(stored)
    cursor = decode_ranges(progress.next if progress else 0, progress.beyond if progress else [])
    failures = decode_failures(progress.next, progress.failed) if progress else {}
    delivery = Delivery(policy_of(SPEC), cursor, 0, lambda _key: None, failures=failures)
    window: Any = Window()
    return Part(topic, partition, "u", delivery, window, Begun())


async def take(part: Part) -> int:
    found = await part.take("c", lambda: 10, 1_000, lambda: 0.0)
    return sum(len(each.ack_ids) for each in found)


@pytest.mark.parametrize(
    ("ends_at", "letters"), [("before the letter", 1), ("before the ack", 2), ("", 1)]
)
async def test_a_crash_never_loses_a_dead_letter(
    tmp_path: Path, ends_at: str, letters: int
) -> None:
    subscription: Any = SimpleNamespace(
        name="shop/s", topic_name="shop/orders", notify=lambda: None
    )
    part = part_of(None)
    for _ in range(2):
        assert await take(part) == 1
        part.delivery.nack(0, part.delivery.last_lease, 0.0, 0.0)
    counted = part.encode()  # stored before the nack is answered
    assert counted is not None
    graves = Letters(counted[0])
    graves.ends_at = ends_at
    if ends_at:
        with pytest.raises(Crash):
            await graves.bury_all(subscription, part, "graves")
        graves.ends_at = ""
        part = part_of(graves.stored)
        assert await take(part) == 0, "it was delivered often enough"
    await graves.bury_all(subscription, part, "graves")
    assert len(graves.letters) == letters
    last = graves.letters[-1]
    reason = "MaxDeliveries" if ends_at else "Nacked"
    assert (last["tidewater-reason"], last["tidewater-attempts"]) == (reason, "2")
    assert decode_progress(graves.stored).next == 1, "then it counts as acknowledged"


def test_headers_without_a_value_do_not_keep_a_letter_back() -> None:
    """Older tables hold them; the worker that has the dead letters' partition refuses them."""
    row = {"tw_partition": 0, "tw_offset": 0, "tw_time": 0, "value": b"v"}
    row |= {"tw_headers": [("a", None), ("b", "1")]}
    topic: Any = SimpleNamespace(spec=TopicSpec())
    letters = _letters(pa.RecordBatch.from_pylist([row], SCHEMA), topic, [{"c": "2"}])
    assert isinstance(letters, Rows)
    assert letters.headers == [[("b", "1"), ("c", "2")]]


class Cursors:
    """A store of progress that takes its time."""

    def __init__(self) -> None:
        self.stored: dict[CursorKey, bytes] = {}

    async def load_cursors(self, subscription: str, topic: str) -> dict[int, bytes]:
        await asyncio.sleep(0)
        wanted = (subscription, topic)
        return {key.partition: data for key, data in self.stored.items() if key[:2] == wanted}

    async def store_cursors(self, items: Any, epochs: Any = None) -> None:
        await asyncio.sleep(0.01)
        self.stored |= items


class Graves(DeadLetters):
    """A dead-letter topic with ten letters of each subscription."""

    async def _origins(  # type: ignore[override]
        self, _of: Any, _topic: Any, _partition: Any, begin: int, limit: int
    ) -> tuple[list[int], int]:
        found = list(range(begin, min(begin + limit, 10)))
        return found, begin + len(found)


async def test_replays_at_once_go_on_where_the_other_has_ended() -> None:
    log = SimpleNamespace(start=0)
    partition = SimpleNamespace(
        number=0, epoch=7, is_elsewhere=False, table=log, readable=lambda: log
    )
    graves = SimpleNamespace(name="shop/graves", uuid="t", state=None, partitions={0: partition})
    node: Any = SimpleNamespace(topic=lambda *_: graves)
    cursors: Any = Cursors()
    letters = Graves(node, ProgressStore(cursors), cursors)
    restored: dict[str, list[int]] = {"shop/s": [], "shop/other": []}

    def subscription(name: str) -> Any:  # another object for each request
        async def restore(origins: list[int]) -> tuple[int, int]:
            await asyncio.sleep(0.01)
            restored[name] += origins
            return len(origins), 0

        return SimpleNamespace(name=name, uuid="u", spec=SPEC, restore=restore)

    asked = [("shop/s", 4), ("shop/s", 4), ("shop/s", 4), ("shop/other", 100)]
    told = await asyncio.gather(*(letters.replay(subscription(name), n) for name, n in asked))
    assert [each["replayed"] for each in told] == [4, 4, 2, 10], "and none is told 409 Fenced"
    assert restored == {"shop/s": list(range(10)), "shop/other": list(range(10))}, "each once"
    assert not letters._replaying, "nothing is kept of replays that are over"


@pytest.mark.parametrize(
    ("offset", "found"), [("7", (0, 7)), ("9" * 5_000, None), ("9" * 20, None), ("x", None)]
)
def test_a_letter_that_somebody_else_wrote_keeps_no_other(
    offset: str, found: tuple[int, int] | None
) -> None:
    name: Any = SimpleNamespace(name="shop/s", local=SimpleNamespace(topic_name="shop/orders"))
    headers = {
        deadletter.SUBSCRIPTION: "shop/s",
        deadletter.ORIGIN_TOPIC: "shop/orders",
        deadletter.ORIGIN_PARTITION: "0",
        deadletter.ORIGIN_OFFSET: offset,
    }
    assert deadletter._origin(headers, name) == found
