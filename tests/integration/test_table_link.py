"""The calls between edge and table process, over their real socket and a real process."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from table_fakes import HandLog, assignment, message_batch, worker_settings
from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, Retryable
from tidewater_testing.process import ManagedProcess
from tidewater_worker.link.client import TableLink
from tidewater_worker.ports import Commits, Offer, TopicAssignment

SPEC = TopicSpec.model_validate({"writer": {"flushInterval": "1h"}, "freshness": "1h"})
TOPIC = "shop/orders"
ROWS = 6


class Side:
    """The edge's side: a log written by hand, and the link."""

    def __init__(self, data: Path) -> None:
        self.settings = worker_settings(data)
        self.log = HandLog(data / "log" / TOPIC / "0", 0)
        self.commits = Commits.ALONE
        self.is_owner = True
        self.link = TableLink(
            self.settings.run_dir / "table.sock", self.assignments, lambda _: None
        )

    def assignments(self) -> list[TopicAssignment]:
        made = assignment(SPEC, [self.log] if self.is_owner else [])
        return [msgspec.structs.replace(made, commits=self.commits)]

    async def add(self) -> int | None:
        values = [f"v{self.log.end + i}".encode() for i in range(ROWS)]
        keys = [f"k{self.log.end + i}".encode() for i in range(ROWS)]
        self.log.append(message_batch(SPEC, values, keys=keys))
        self.link.durable({TOPIC: {0: self.log.end}})
        return (await self.link.flush(TOPIC, {0: self.log.end}, 30)).snapshot_id


@pytest.fixture
async def side(tmp_path: Path) -> AsyncIterator[Side]:
    made = Side(tmp_path)
    settings = tmp_path / "settings.json"
    settings.write_text(made.settings.to_json())
    command = [sys.executable, "-m", "tidewater_worker.table.process", str(settings)]
    with ManagedProcess(command, log_file=tmp_path / "table.log"):
        made.link.start()
        async with asyncio.timeout(60):
            while not made.link.is_connected:
                await asyncio.sleep(0.02)
        yield made
        await made.link.close()


async def test_flushes_that_wait_keep_nobody_else_waiting(side: Side) -> None:
    """G6: sixteen of them stopped every read and every figure of all topics for a minute."""
    await side.add()
    waiting = [
        asyncio.create_task(side.link.flush(TOPIC, {0: side.log.end + ROWS}, 60)) for _ in range(40)
    ]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        assert (await side.link.bounds(TOPIC))[0].next == ROWS
        assert (await side.link.stats(TOPIC))["table_rows"] == ROWS
        read = [batch.num_rows async for batch in side.link.history(TOPIC, 0, 0, ROWS, 100)]
        assert sum(read) == ROWS
    with pytest.raises(Retryable, match="FlushTimeout"):
        await side.link.flush(TOPIC, {0: side.log.end + ROWS}, 0.1)
    snapshot = await side.add()
    for told in await asyncio.gather(*waiting):
        assert (told.snapshot_id, told.frontier) == (snapshot, {0: 2 * ROWS})


async def test_follow_columns_filters_and_dropping(side: Side) -> None:
    await side.link.ping(30)
    first = await side.add()
    seen = await side.link.follow(TOPIC, None, 30)
    assert (seen.snapshot_id, seen.partitions[0].next) == (first, ROWS)
    assert await side.link.follow(TOPIC, first, 0.1) == seen, "no news: the time is up"
    waiting = [asyncio.create_task(side.link.follow(TOPIC, first, 30)) for _ in range(10)]
    await side.add()
    for news in await asyncio.gather(*waiting):
        assert news.partitions[0].next == 2 * ROWS
    batches = [
        batch async for batch in side.link.history(TOPIC, 0, ROWS + 1, 2 * ROWS, 100, ["value"])
    ]
    rows = pa.Table.from_batches(batches)
    assert rows.column_names == ["tw_offset", "value"]
    assert rows["tw_offset"].to_pylist() == list(range(ROWS + 1, 2 * ROWS))
    found = [each async for each in side.link.sift(TOPIC, 0, 1, 2 * ROWS, FilterSpec(key="k8"))]
    assert [offset for each in found for offset in each.rows["tw_offset"].to_pylist()] == [8]
    assert (found[0].start, found[-1].end) == (1, 2 * ROWS)
    assert [each.end for each in found[:-1]] == [each.start for each in found[1:]]
    with pytest.raises(Invalid, match="InvalidFilter"):
        async for _ in side.link.sift(TOPIC, 0, 0, 1, FilterSpec(where="no = 1")):
            pass
    health = await side.link.stats(TOPIC)
    assert (health["small_files"], health["debt_files"]) == (2, 2)
    with pytest.raises(Retryable, match="TopicInUse"):
        await side.link.drop_table(TOPIC)
    side.is_owner = False
    side.link.assign()
    assert await side.link.drop_table(TOPIC)
    assert not await side.link.drop_table(TOPIC)


async def test_without_anybody_to_commit_for_it_a_worker_commits_alone(side: Side) -> None:
    side.link.on_offer = None
    side.commits = Commits.ELSEWHERE
    side.link.assign()
    assert await side.add() is not None
    stats = await side.link.stats(TOPIC)
    assert (stats["commits"], stats["handed_over"], stats["commits_by"]) == (1, 0, "elsewhere")


async def test_an_offer_for_a_topic_that_is_not_here_is_refused(side: Side) -> None:
    offer = Offer(id="1", topic="shop/else", topic_uuid="", table_uuid="", partitions={})
    with pytest.raises(Retryable, match="NotCommitter"):
        await side.link.commit(offer, 30)
    with pytest.raises(Invalid, match="InvalidOffer"):
        await side.link.commit({"topic": 1}, 30)
