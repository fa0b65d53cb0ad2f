"""Fetching for a subscription: wanted messages, what lies between them, and lost volumes (G4)."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tidewater_core.crd.subscription import FilterSpec, Isolation
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Invalid, Retryable
from tidewater_worker.dispatch.cursor import Cursor
from tidewater_worker.dispatch.delivery import Delivery
from tidewater_worker.dispatch.policy import Leased, Policy
from tidewater_worker.dispatch.window import Window
from tidewater_worker.filters.wanted import make_filter
from tidewater_worker.partition import Partition, TableEnd
from tidewater_worker.ports import PartitionState, Sifted
from tidewater_worker.schema import table_arrow_schema

SPEC = TopicSpec()
SCHEMA = table_arrow_schema(SPEC)
HOT = FilterSpec(key="hot")


def rows(offsets: Any) -> pa.RecordBatch:
    """Return messages; each tenth is wanted, and the value tells the offset."""
    return pa.RecordBatch.from_pylist(
        [
            {
                "tw_partition": 0, "tw_offset": offset, "tw_time": 0,
                "tw_key": b"hot" if offset % 10 == 0 else b"cold", "value": b"%d" % offset,
            }
            for offset in offsets
        ],
        SCHEMA,
    )  # fmt: skip


class Table:
    """A table process that answers in portions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.portion = 7
        self.shift = 0
        self.error: Exception | None = None

    async def history(
        self, _topic: str, _number: int, start: int, end: int, limit: int, _columns: Any
    ) -> AsyncIterator[pa.RecordBatch]:
        self.calls.append(("history", start, end))
        end = min(end, start + limit)
        for at in range(start, end, self.portion):
            yield rows(range(at, min(at + self.portion, end)))

    async def sift(
        self, _topic: str, _number: int, start: int, end: int, wanted: FilterSpec
    ) -> AsyncIterator[Sifted]:
        self.calls.append(("sift", start, end))
        assert wanted == HOT
        if self.error is not None:
            raise self.error
        for at in range(start + self.shift, end, self.portion):
            upto = min(at + self.portion, end)
            yield Sifted(at, upto, rows([o for o in range(at, upto) if o % 10 == 0]))


class Scene:
    """A window on a partition that is in the table alone."""

    def __init__(self, folder: Path, end: int, spec: FilterSpec | None = HOT, **state: Any) -> None:
        self.table = Table()
        state = {"next": end, **state}
        self.partition = Partition(
            "shop/orders", 0, folder, table=PartitionState(**state), table_end=TableEnd(end)
        )
        node: Any = SimpleNamespace(link=self.table)
        topic: Any = SimpleNamespace(spec=SPEC, name="shop/orders")
        wanted = make_filter(spec, SPEC)
        self.window = Window(node, topic, self.partition, Isolation.ACKNOWLEDGED, wanted)
        self.delivery = Delivery(Policy(), Cursor(), 0, lambda _: None)

    async def fetch(self, want: int = 1) -> list[Leased]:
        """Fetch to the end, and take everything."""
        while await self.window.fetch(self.delivery, want):
            pass
        return self.delivery.take("c", 0.0, 1_000)

    async def values(self, leases: list[Leased]) -> list[bytes]:
        return [
            value
            async for piece in self.window.payloads(leases)
            for value in piece.batch["value"].to_pylist()
        ]


async def test_what_is_not_wanted_is_passed_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 45)
    leases = await scene.fetch()
    assert [leased.offset for leased in leases] == [0, 10, 20, 30, 40]
    assert await scene.values(leases) == [b"0", b"10", b"20", b"30", b"40"]
    assert scene.table.calls == [("sift", 0, 45)], "one stream, and nothing is read again"
    assert scene.delivery.cursor.next == 0
    for leased in leases:
        scene.delivery.ack(leased.offset, leased.lease)
    assert (scene.delivery.cursor.next, len(scene.delivery.cursor)) == (45, 0)


async def test_a_full_window_stops_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 45)
    scene.table.portion = 100
    scene.delivery = Delivery(Policy(), Cursor(), 0, lambda _: None, window_max=2)
    assert [leased.offset for leased in await scene.fetch()] == [0, 10]
    assert scene.delivery.fetched == 20
    scene.delivery.ack(0, 1)
    assert [leased.offset for leased in await scene.fetch()] == [20]
    scene.delivery.ack(10, 2)
    scene.delivery.ack(20, 3)
    assert [leased.offset for leased in await scene.fetch()] == [30, 40]
    assert len(scene.table.calls) == 1


async def test_a_message_whose_ack_was_taken_back_is_read_again(tmp_path: Path) -> None:
    """Also one that the filter of today would not let through."""
    scene = Scene(tmp_path, 45)
    leases = await scene.fetch()
    assert scene.delivery.restore(13, None)
    (again,) = scene.delivery.take("c", 0.0, 10)
    both = sorted([*leases, again])
    assert await scene.values(both) == [b"0", b"10", b"13", b"20", b"30", b"40"]
    assert scene.table.calls[1] == ("history", 10, 45)


@pytest.mark.parametrize("spec", [HOT, None])
async def test_offsets_that_were_lost_with_a_volume_count_as_acknowledged(
    tmp_path: Path, spec: FilterSpec | None
) -> None:
    scene = Scene(tmp_path, 1_045, spec, gaps=((5, 1_005),))
    leases = await scene.fetch()
    expected = [o for o in (*range(5), *range(1_005, 1_045)) if spec is None or o % 10 == 0]
    assert [leased.offset for leased in leases] == expected
    assert await scene.values(leases) == [b"%d" % offset for offset in expected]
    for leased in leases:
        scene.delivery.ack(leased.offset, leased.lease)
    assert (scene.delivery.cursor.next, len(scene.delivery.cursor)) == (1_045, 0)


async def test_an_answer_that_leaves_offsets_out_is_refused(tmp_path: Path) -> None:
    """G7: an answer must begin where the one before it ended."""
    scene = Scene(tmp_path, 45)
    scene.table.shift = 1
    with pytest.raises(Corrupt, match="HistoryGap"):
        await scene.fetch()


async def test_a_filter_that_the_table_process_does_not_know_yet_is_tried_again(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, 45)
    scene.table.error = Invalid("InvalidFilter", "there is no column 'late'")
    with pytest.raises(Retryable, match="HistoryNotReady"):
        await scene.fetch()
    scene.table.error = None
    assert len(await scene.fetch()) == 5
