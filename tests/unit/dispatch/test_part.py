"""Consumers of one partition that meet while messages are fetched."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from tidewater_worker.dispatch.cursor import Begun, Cursor
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.part import Part
from tidewater_worker.dispatch.policy import Leased, Policy
from tidewater_worker.dispatch.window import Piece
from tidewater_worker.ports import PartitionState


class Slow:
    """A window that fetches one message at a time, and rings when one is there."""

    def __init__(self, end: int, live_from: int) -> None:
        self.end = end
        self.rung = asyncio.Event()
        self._live_from = live_from

    def is_live(self, delivery: Delivery) -> bool:
        return delivery.fetch_at >= self._live_from

    async def fetch(self, delivery: Delivery, want: int) -> bool:
        if delivery.fetch_at >= self.end:
            return False
        if not self.is_live(delivery):
            await asyncio.sleep(0)
        delivery.offer(delivery.fetch_at, delivery.fetch_at + 1, {delivery.fetch_at: None})
        self.rung.set()
        return True

    async def payloads(self, leases: Sequence[Leased]) -> AsyncIterator[Piece]:
        values = pa.array([leased.offset for leased in leases])
        yield Piece(pa.record_batch([values], ["offset"]), list(leases), 1)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("live_from", [0, 2, 5])
async def test_whoever_comes_as_a_fetch_ends_gets_the_rest(live_from: int) -> None:
    """The second looks after the fetch is over, and before anybody was told of that."""
    window = Slow(5, live_from)
    partition = cast(
        "Any",
        SimpleNamespace(
            number=0,
            epoch=1,
            drained=None,
            readable=lambda: SimpleNamespace(end=5),
            table=PartitionState(),
        ),
    )
    topic = cast("Any", SimpleNamespace(spec=None))
    delivery = Delivery(Policy(), Cursor(0), 0, lambda key: None)
    part = Part(topic, partition, "uuid", delivery, cast("Any", window), Begun())

    async def take(consumer: str) -> list[int]:
        found = await part.take(consumer, lambda: 10, 1_000_000, lambda: 0.0)
        return [offset for piece in found for offset in piece.batch.column(0).to_pylist()]

    async def second() -> list[int]:
        await window.rung.wait()
        return await take("b")

    both = await asyncio.gather(take("a"), second())
    assert sorted(both[0] + both[1]) == [0, 1, 2, 3, 4]
