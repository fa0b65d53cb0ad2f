"""Who still reads a topic: what stored cursors mean, without a store; and once with a real one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tidewater_coordination.port import CursorKey, RegisteredSubscription, Registry
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Conflict, Corrupt, Invalid
from tidewater_core.names import TopicName
from tidewater_core.settings import CatalogSettings
from tidewater_pipeline.cli.arguments import build_parser
from tidewater_pipeline.cli.main import run_jobs
from tidewater_pipeline.cli.run import Run
from tidewater_pipeline.places import StoreSettings
from tidewater_pipeline.report import Outcome
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.state import TableState
from tidewater_pipeline.subscribers import (
    Cursor,
    Store,
    Subscribers,
    cursors_of,
    pins,
    subscriptions_of,
)


def subscription(name: str = "shop/billing", **spec: Any) -> RegisteredSubscription:
    return RegisteredSubscription(name, "sub-1", json.dumps({"topic": "orders", **spec}))


def progress(next_offset: int, **other: Any) -> bytes:
    whole = {"subscription": "sub-1", "topic": "topic-1", "next": next_offset, "beyond": [2, 1]}
    return json.dumps({**whole, "v": 1, **other}).encode()


def test_stored_progress_is_the_cursor() -> None:
    stored = {0: progress(7, snapshot=99), 1: progress(0)}
    assert cursors_of(subscription(), "topic-1", 2, stored) == [
        Cursor("shop/billing", 0, 7, 99),
        Cursor("shop/billing", 1, 0),
    ]


@pytest.mark.parametrize(
    "stale",
    [
        {"subscription": "an earlier one"},
        {"topic": "an earlier one"},
        {"reset_token": "before"},
    ],
)
def test_progress_of_something_else_counts_as_none(stale: dict[str, str]) -> None:
    chosen = subscription(resetToken="now")
    current = progress(7, reset_token="now")
    assert cursors_of(chosen, "topic-1", 1, {0: current}) == [Cursor("shop/billing", 0, 7)]
    found = cursors_of(chosen, "topic-1", 1, {0: progress(7, **{"reset_token": "now", **stale})})
    assert found == [Cursor("shop/billing", 0, 0)], "it begins anew, from the earliest"


@pytest.mark.parametrize(
    ("start", "needed"),
    [
        ({"position": "earliest"}, 0),
        ({"position": "latest"}, None),
        ({"offset": 12}, 12),
        ({"tag": "month-close"}, 0),
        ({"snapshotId": 77}, 0),
        ({"timestamp": "2026-01-31T12:00:00Z"}, 0),
    ],
)
def test_a_subscription_that_has_yet_to_begin_needs_what_it_asks_for(
    start: dict[str, Any], needed: int | None
) -> None:
    found = cursors_of(subscription(startFrom=start), "topic-1", 1, {})
    assert [each.offset for each in found] == ([] if needed is None else [needed])


def test_latest_needs_what_it_had_not_read_of_an_earlier_topic() -> None:
    """G4: it goes on there if the table is the same, which its worker knows."""
    latest = subscription(startFrom={"position": "latest"})
    found = cursors_of(latest, "topic-2", 1, {0: progress(7, snapshot=3)})
    assert found == [Cursor("shop/billing", 0, 7, 3)]
    other = progress(7, subscription="another")
    assert cursors_of(latest, "topic-2", 1, {0: other}) == []


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", progress(-1), progress(1, v=2)])
def test_a_cursor_that_cannot_be_read_stops_the_job(data: bytes) -> None:
    with pytest.raises(Corrupt, match="shop/billing in partition 0"):
        cursors_of(subscription(), "topic-1", 1, {0: data})


def test_only_subscriptions_of_this_topic_and_namespace_count() -> None:
    other = RegisteredSubscription("shop/other", "u", json.dumps({"topic": "web"}))
    names = {each.name: each for each in (subscription(), subscription("bank/billing"), other)}
    found = subscriptions_of(Registry(subscriptions=names), "shop/orders")
    assert [each.name for each in found] == ["shop/billing"]


def test_who_lies_behind_pins_its_snapshot() -> None:
    cursors = [Cursor("a", 0, 5, 77), Cursor("b", 0, 9, 78), Cursor("c", 1, 0, 79)]
    assert pins(cursors, {0: 9}) == {77}


def test_the_store_is_asked(tmp_path: Path) -> None:
    place = tmp_path / "coordination.db"

    async def fill() -> None:
        store = SqliteCoordination(place)
        await store.start()
        await store.register_topic("shop/orders", TopicSpec(partitions=2).to_json(), "topic-1")
        await store.register_subscription("shop/billing", subscription().spec, "sub-1")
        key = CursorKey("shop/billing", "shop/orders", 1)
        await store.store_cursors({key: progress(40, snapshot=3)})
        await store.close()

    asyncio.run(fill())
    store = Store(StoreSettings(place=str(place)))
    known = store.subscribers("shop/orders")
    assert known.spec is not None
    assert known.spec.partitions == 2
    assert known.cursors == (Cursor("shop/billing", 0, 0), Cursor("shop/billing", 1, 40, 3))
    assert store.subscribers("shop/unknown") == Subscribers()
    store.check("shop/orders")
    with pytest.raises(Invalid, match=r"UnknownTopic.*shop/unknown"):
        store.check("shop/unknown")


def test_the_snapshot_to_begin_from_is_pinned() -> None:
    """It could expire before the subscription had its first consumer."""
    found = cursors_of(subscription(startFrom={"snapshotId": 77}), "topic-1", 2, {})
    assert pins(found, {0: 5, 1: 0}) == {77}


@pytest.mark.parametrize("job", ["retention", "compact", "expire"])
def test_upkeep_with_the_wrong_store_is_refused(tmp_path: Path, job: str) -> None:
    """No cursor was found there, so that rows which subscriptions had not read were removed."""
    words = [job, "--topic", "shop/orders", "--data", "x", "--keep", "1h"]
    run = Run(
        Session(CatalogSettings(name="tidewater", properties={})),
        build_parser().parse_args(words),
        StoreSettings(place=str(tmp_path / "another.db")),
    )
    (report,) = run_jobs(run, [job], [TopicName("shop", "orders")])
    assert report.outcome is Outcome.FAILED
    assert "UnknownTopic" in report.message
    assert not report.retry
    forced = Run(run.session, build_parser().parse_args([*words, "--force"]), run.store)
    with forced.turn("shop/orders", job):
        pass


def test_every_job_works_on_the_table_that_the_topic_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only maintain asked the spec: the others took NAMESPACE.TOPIC, whosever table that was."""
    place = tmp_path / "coordination.db"

    async def fill() -> None:
        store = SqliteCoordination(place)
        await store.start()
        spec = TopicSpec.model_validate({"table": {"name": "lake.orders_2"}})
        await store.register_topic("shop/orders", spec.to_json(), "topic-1")
        await store.close()

    asyncio.run(fill())
    owner = {"tidewater.topic": "shop/orders"}

    def load(table: TopicTable) -> TableState:
        return TableState(table.identifier, "file:/x", 1, owner, "hour")

    monkeypatch.setattr(TopicTable, "load", load)
    topic = TopicName("shop", "orders")

    def run(*words: str, store: StoreSettings | None) -> Run:
        args = build_parser().parse_args(["compact", "--topic", str(topic), *words])
        return Run(Session(CatalogSettings(name="tidewater", properties={})), args, store)

    known = StoreSettings(place=str(place))
    assert run(store=known).table(topic).identifier == ("lake", "orders_2")
    assert run(store=None).table(topic).identifier == ("shop", "orders")
    assert run("--table", "a.b", store=known).table(topic).identifier == ("a", "b")
    for owner in ({"tidewater.topic": "shop/other"}, {}):  # noqa: B007  (read by `load`)
        with pytest.raises(Conflict, match=r"TableNotOurs.*a\.b"):
            run("--table", "a.b", store=known).table(topic)
        assert run("--table", "a.b", "--force", store=known).table(topic)
        (report,) = run_jobs(run(store=None), ["audit"], [topic])
        assert (report.outcome, report.retry) == (Outcome.FAILED, False)
