"""Columns of history, and following what is committed."""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from table_bench import Bench
from table_fakes import SteppedClock, message_batch
from table_faults import compact
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, Retryable, TidewaterError
from tidewater_worker.ports import Followed
from tidewater_worker.table.follower import Follower
from tidewater_worker.table.topic import TopicRun

SPEC = TopicSpec.model_validate(
    {
        "schema": {
            "fields": [
                {"name": "region", "type": "string"},
                {"name": "amount", "type": "decimal(10,2)"},
                {"name": "day", "type": "date"},
            ]
        }
    }
)


@pytest.fixture
def run(bench: Bench) -> Iterator[TopicRun]:
    """Three files of four rows; the region, the key and the amount rise with the offset."""
    log = bench.log()
    made = bench.topic(SPEC, log)
    for part, region in enumerate(("asia", "europe", "oceania")):
        rows: list[bytes | dict[str, object]] = [
            {"region": region, "amount": None if i == 3 else part * 10 + i, "day": None}
            for i in range(4)
        ]
        keys = [f"k{part}{i}".encode() for i in range(4)]
        log.append(message_batch(SPEC, rows, keys=keys))
        bench.flush(made, log)
    yield made
    bench.settle(made)


def test_columns_of_files_that_were_rewritten(bench: Bench, run: TopicRun) -> None:
    compact(bench.table())
    rows = pa.Table.from_batches(run.reader.read(0, 2, 7, 100, ["amount"]))
    assert rows.column_names == ["tw_offset", "amount"]
    assert rows["tw_offset"].to_pylist() == [2, 3, 4, 5, 6]
    (batch,) = run.reader.read(0, 0, 3, 100, ["region"])
    assert batch.schema.names == ["tw_offset", "region"]
    assert batch.column("region").to_pylist() == ["asia"] * 3
    with pytest.raises(Invalid, match="UnknownColumn"):
        list(run.reader.read(0, 0, 12, 100, ["nowhere"]))


def test_many_followers_cost_one_look_per_interval(bench: Bench, run: TopicRun) -> None:
    clock = SteppedClock()
    loads: list[int] = []
    view = run.reader.view

    def counted(*args: Any, **kwargs: Any) -> Any:
        loads.append(1)
        return view(*args, **kwargs)

    run.reader.view = counted  # type: ignore[method-assign]
    follower = Follower(run.reader, clock, 0.5)
    assert follower.step() is None, "nobody waits: nobody looks"
    told: list[Followed | TidewaterError] = []
    head = bench.table().metadata.current_snapshot_id
    for _ in range(100):
        follower.wait(head, clock.monotonic() + 5, told.append)
    again = follower.step()
    assert (len(loads), told) == (1, [])
    assert again == clock.monotonic() + 0.5
    assert follower.step() == again
    assert len(loads) == 1
    log = bench.log(first=12)
    log.append(message_batch(SPEC, [{"region": "asia", "amount": None, "day": None}]))
    bench.flush(run, log)
    clock.advance(0.5)
    assert follower.step() is None
    assert len(loads) == 2
    assert len(told) == 100
    news = told[0]
    assert isinstance(news, Followed)
    assert (news.snapshot_id != head, news.partitions[0].next) == (True, 13)
    # Without news the answer comes when the time is up.
    follower.wait(news.snapshot_id, clock.monotonic() + 0.2, told.append)
    follower.step()
    clock.advance(0.2)
    follower.step()
    assert told[-1] == news


def test_a_follower_outlives_a_catalog_that_is_away(run: TopicRun) -> None:
    clock = SteppedClock()
    away = Retryable("CatalogUnreachable", "away")
    answers: list[Callable[[], Any]] = []
    view = run.reader.view

    def failing(*args: Any, **kwargs: Any) -> Any:
        if len(answers) < 2:
            answers.append(lambda: None)
            raise away
        return view(*args, **kwargs)

    run.reader.view = failing  # type: ignore[method-assign]
    follower = Follower(run.reader, clock, 0.5)
    told: list[Followed | TidewaterError] = []
    follower.wait(None, clock.monotonic() + 0.1, told.append)
    follower.wait(None, clock.monotonic() + 60, told.append)
    follower.step()
    clock.advance(0.5)
    follower.step()
    assert told == [away], "whose time is up hears why"
    clock.advance(0.5)
    follower.step()
    assert isinstance(told[-1], Followed)
