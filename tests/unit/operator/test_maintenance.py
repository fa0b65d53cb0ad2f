"""When a Spark job is due, what it is, and what becomes of its result."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_operator.maintenance.cron import next_after
from tidewater_operator.maintenance.decide import (
    Table,
    Trigger,
    after_end,
    due,
    ended,
    maintained,
)
from tidewater_operator.maintenance.job import job, job_name
from tidewater_operator.report import TableReport
from tidewater_operator.settings import MaintenanceSettings
from tidewater_operator.times import format_time
from tidewater_testing.namespace import SETTINGS, manifest

NOW = datetime(2026, 3, 5, 12, 20, 30, tzinfo=UTC)
SET = MaintenanceSettings()


@pytest.mark.parametrize(
    ("schedule", "after", "found"),
    [
        ("*/30 * * * *", "2026-03-05T12:00", "2026-03-05T12:30"),
        ("*/30 * * * *", "2026-03-05T23:45", "2026-03-06T00:00"),
        ("15 3 * * *", "2026-03-05T03:15", "2026-03-06T03:15"),
        ("0 0 1 * *", "2026-01-31T10:00", "2026-02-01T00:00"),
        ("0 0 29 2 *", "2026-03-01T00:00", "2028-02-29T00:00"),
        ("0 9-17/4 * * 1-5", "2026-03-06T17:00", "2026-03-09T09:00"),
        ("0 0 13 * 5", "2026-03-07T00:00", "2026-03-13T00:00"),
        ("0 0 * * 7", "2026-03-05T00:00", "2026-03-08T00:00"),
        ("5/20 * * * *", "2026-03-05T12:06", "2026-03-05T12:25"),
    ],
)
def test_schedules(schedule: str, after: str, found: str) -> None:
    time = datetime.fromisoformat(after).replace(tzinfo=UTC)
    assert next_after(schedule, time) == datetime.fromisoformat(found).replace(tzinfo=UTC)


def test_a_day_that_never_comes() -> None:
    assert next_after("0 0 31 2 *", NOW) is None


def table(
    files: int = 0,
    *,
    created_h: float = 2,
    word: str = "",
    snapshots: int = 10,
    manifests: int = 5,
    deletes: int = 0,
    debt: int | None = None,
    **before: Any,
) -> Table:
    return Table(
        spec=TopicSpec(),
        created=NOW - timedelta(hours=created_h),
        report=TableReport(
            table="shop.orders",
            snapshot_id=1,
            files=files,
            snapshots=snapshots,
            manifests=manifests,
            delete_files=deletes,
            debt_files=debt,
        ),
        annotations={"tidewater.dev/maintain": word} if word else {},
        before=before,
    )


def ran(minutes_ago: int, files_after: int = 0) -> dict[str, Any]:
    time = NOW - timedelta(minutes=minutes_ago)
    return {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ"), "filesAfter": files_after}


LATER = (NOW + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (table(0), None),
        (table(4), None),
        (table(5), Trigger.SCHEDULE),
        (table(5, created_h=0.001), None),
        (table(50, last=ran(40, 48)), None),
        (table(50, last=ran(40, 45)), Trigger.SCHEDULE),
        (table(50, last=ran(0, 0)), None),
        (table(100, created_h=0.001), Trigger.HEALTH),
        (table(500, last=ran(14)), None),
        (table(500, last=ran(16)), Trigger.HEALTH),
        (table(500, last=ran(16, 450)), None),
        (table(0, snapshots=200, created_h=0.001), Trigger.HEALTH),
        (table(0, manifests=200, created_h=0.001), Trigger.HEALTH),
        (table(0, deletes=1, created_h=0.001), Trigger.HEALTH),
        (table(0, deletes=1, last=ran(14)), None),
        (table(500, debt=0), None),
        (table(500, debt=6), Trigger.SCHEDULE),
        (table(500, debt=100, last=ran(16, 500)), Trigger.HEALTH),
        (table(500, notBefore=LATER), None),
        (table(0, word="now", notBefore=LATER), Trigger.MANUAL),
        (table(0, word="now", manual="now"), None),
        (table(0, word="again", manual="now"), Trigger.MANUAL),
        (table(0, created_h=25), Trigger.SCHEDULE),
        (table(3, created_h=50, lastSuccess=LATER, last=ran(60)), None),
    ],
)
def test_when_a_job_is_due(found: Table, why: Trigger | None) -> None:
    assert due(found, SET, NOW) == why


@pytest.mark.parametrize(
    ("retention", "rows", "idle_h", "why"),
    [
        ("1h", 100, 1.5, Trigger.SCHEDULE),
        ("1h", 0, 1.5, None),
        ("16h", 100, 1.5, None),
        ("16h", 100, 2.5, Trigger.SCHEDULE),
        ("30d", 100, 20, None),
        ("30d", 100, 25, Trigger.SCHEDULE),
    ],
)
def test_rows_past_their_retention_are_worth_a_job(
    retention: str, rows: int, idle_h: float, why: Trigger | None
) -> None:
    before = format_time(NOW - timedelta(hours=idle_h))
    spec = TopicSpec.model_validate({"retention": {"time": retention}})
    report = TableReport(snapshot_id=1, table_rows=rows, files=1, debt_files=0)
    created = NOW - timedelta(days=9)
    kept = Table(spec, created, report, {}, {"lastSuccess": before, "last": {"started": before}})
    assert due(kept, SET, NOW) == why


@pytest.mark.parametrize(
    ("steps", "unit", "idle_h", "why"),
    [
        ("retention: refused", "hour", 23, None),
        ("retention: refused", "hour", 25, Trigger.SCHEDULE),
        ("retention: nothing-to-do", "hour", 1.5, None),
        ("retention: nothing-to-do", "hour", 2.5, Trigger.SCHEDULE),
        ("retention: nothing-to-do", "day", 20, None),
    ],
)
def test_rows_that_cannot_go_yet_are_not(
    steps: str, unit: str, idle_h: float, why: Trigger | None
) -> None:
    """A subscription needs them, or their whole hour or day is not over by so much."""
    before = format_time(NOW - timedelta(hours=idle_h))
    partitioning = {"partitionBy": [f"{unit}(tw_time)"]}
    spec = TopicSpec.model_validate({"retention": {"time": "1h"}, "table": partitioning})
    report = TableReport(snapshot_id=1, table_rows=9, files=1, debt_files=0)
    last = {"started": before, "steps": f"{steps}, compact: nothing-to-do"}
    kept = Table(spec, NOW - timedelta(days=9), report, {}, {"lastSuccess": before, "last": last})
    assert due(kept, SET, NOW) == why


def test_no_table_no_job() -> None:
    empty = Table(TopicSpec(), NOW, None, {"tidewater.dev/maintain": "now"}, {})
    assert due(empty, SET, NOW) is None


WORDS = {
    "version": 1,
    "ok": True,
    "retry": False,
    "seconds": 31.4,
    "core_seconds": 62.8,
    "topics": [
        {
            "topic": "shop/orders",
            "before": {"files": 412},
            "after": {"files": 9},
            "removed": {"rewritten_files": 410, "orphans": 3, "expired_snapshots": 47},
            "steps": [{"job": "compact", "outcome": "done"}],
        }
    ],
}


def made(condition: str | None, **annotations: str) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True", "message": "too long"}] if condition else []
    return {
        "metadata": {
            "uid": "j1",
            "creationTimestamp": "2026-03-05T11:59:00Z",
            "annotations": {"tidewater.dev/trigger": "Health", **annotations},
        },
        "status": {"conditions": conditions},
    }


def pod(words: str, finished: str = "2026-03-05T12:00:00Z") -> dict[str, Any]:
    over = {"message": words, "finishedAt": finished}
    return {"status": {"containerStatuses": [{"state": {"terminated": over}}]}}


def test_a_job_that_runs_has_not_ended() -> None:
    assert ended(made(None), [], "shop/orders") is None


def test_a_good_end() -> None:
    end = ended(made("Complete"), [pod(json.dumps(WORDS))], "shop/orders")
    assert end is not None
    assert end.ok
    assert end.run["filesBefore"] == 412
    assert end.run["filesAfter"] == 9
    assert (end.run["filesRemoved"], end.run["snapshotsExpired"]) == (413, 47)
    assert end.run["steps"] == "compact: done"
    status = after_end({"failures": 3, "notBefore": LATER, "running": "x"}, end, NOW)
    assert status["failures"] == 0
    assert status["notBefore"] is None
    assert status["lastSuccess"] == "2026-03-05T12:20:30Z"
    assert maintained(table(9, last=end.run), status, SET).status == "True"


def words_of(*steps: dict[str, str]) -> str:
    return json.dumps({"ok": True, "topics": [{"topic": "shop/orders", "steps": list(steps)}]})


def test_what_health_asked_for_and_changed_nothing_is_not_repeated_at_once() -> None:
    words = words_of({"job": "compact", "outcome": "nothing-to-do"})
    end = ended(made("Complete"), [pod(words)], "shop/orders")
    assert end is not None
    status = after_end({}, end, NOW)
    unwell = table(500, debt=500, **status)
    assert due(unwell, SET, NOW + timedelta(minutes=50)) is None
    assert due(unwell, SET, NOW + timedelta(minutes=70)) is Trigger.HEALTH


@pytest.mark.parametrize(("left", "why"), [(0, Trigger.HEALTH), (3, None)])
def test_deletes_that_a_job_could_not_apply_are_not_tried_again_at_once(
    left: int, why: Trigger | None
) -> None:
    """Something else of each run is done on a table that is written to."""
    step = {"job": "expire", "outcome": "done"}
    found = {"topic": "shop/orders", "steps": [step], "after": {"delete_files": left}}
    words = json.dumps({"ok": True, "topics": [found]})
    end = ended(made("Complete"), [pod(words)], "shop/orders")
    assert end is not None
    unwell = table(0, deletes=3, **after_end({}, end, NOW))
    assert due(unwell, SET, NOW + timedelta(minutes=50)) is why
    assert due(unwell, SET, NOW + timedelta(minutes=70)) is Trigger.HEALTH
    piled_up = table(500, deletes=3, debt=500, **after_end({}, end, NOW))
    assert due(piled_up, SET, NOW + timedelta(minutes=20)) is Trigger.HEALTH, "for other reasons"


@pytest.mark.parametrize(("outcome", "hours"), [("done", 1.0), ("nothing-to-do", 24.0)])
@pytest.mark.parametrize("retry", [False, True])
def test_a_failure_of_one_part_does_not_keep_the_others_waiting(
    outcome: str, hours: float, retry: bool
) -> None:
    """One damaged file held up a table's whole upkeep for a day."""
    steps = [{"job": "compact", "outcome": "failed"}, {"job": "expire", "outcome": outcome}]
    topic = {"topic": "shop/orders", "steps": steps}
    words = json.dumps({"ok": False, "retry": retry, "topics": [topic]})
    end = ended(made("Failed"), [pod(words)], "shop/orders")
    assert end is not None
    status = after_end({"failures": 9}, end, NOW)
    wait = datetime.fromisoformat(status["notBefore"]) - NOW.replace(microsecond=0)
    assert wait == timedelta(hours=min(hours, 6.0 if retry else 24.0))
    assert status["failures"] == 10


def test_retention_that_a_subscription_holds_up_is_told() -> None:
    refused = {"job": "retention", "outcome": "refused", "message": "billing needs offset 7"}
    words = words_of(refused, {"job": "compact", "outcome": "done"})
    end = ended(made("Complete"), [pod(words)], "shop/orders")
    assert end is not None
    assert end.ok
    told = maintained(table(9, last=end.run), after_end({}, end, NOW), SET)
    assert (told.status, told.reason) == ("False", "RetentionRefused")
    assert told.message == "billing needs offset 7"


@pytest.mark.parametrize(
    ("retry", "failures", "hours"),
    [(False, 0, 1.0), (False, 1, 2.0), (False, 9, 24.0), (True, 0, 1 / 12), (True, 20, 6.0)],
)
def test_failures_wait_longer_each_time(retry: bool, failures: int, hours: float) -> None:
    words = json.dumps({"ok": False, "retry": retry, "message": "no such table", "topics": []})
    end = ended(made("Failed"), [pod(words)], "shop/orders")
    assert end is not None
    status = after_end({"failures": failures}, end, NOW)
    wait = datetime.fromisoformat(status["notBefore"]) - NOW.replace(microsecond=0)
    assert wait == timedelta(hours=hours)
    told = maintained(table(0), status, SET)
    assert (told.status, told.reason, told.message) == ("False", "JobFailed", "no such table")


@pytest.mark.parametrize(
    "words",
    [
        "", "not json", "[1]", '"text"', '{"seconds": "x"}', '{"seconds": NaN}',
        '{"seconds": Infinity}', '{"topics": ["x"]}', '{"topics": 1}',
        '{"topics": [{"topic": "shop/orders", "before": {"files": "x"}}]}',
        '{"topics": [{"topic": "shop/orders", "steps": [1]}]}',
        '{"topics": [{"topic": "shop/orders", "after": [1]}]}',
    ],
)  # fmt: skip
def test_words_that_make_no_sense(words: str) -> None:
    """One pod that says so kept every pass over its namespace from its end."""
    end = ended(made("Failed"), [pod(words)], "shop/orders")
    assert end is not None
    assert not end.ok
    assert end.retry


def test_the_last_driver_counts() -> None:
    pods = [pod(json.dumps(WORDS), "2026-03-05T12:00:02Z"), pod("{}", "2026-03-05T12:00:01Z")]
    end = ended(made("Complete"), pods, "shop/orders")
    assert end is not None
    assert end.run["filesAfter"] == 9


def test_small_tables_need_no_executors_and_no_rights() -> None:
    topic = manifest("Topic", "orders", "u1", {})
    small = job(topic, TopicSpec(), "default", Trigger.HEALTH, SETTINGS, work_bytes=1000)
    pod_spec = small["spec"]["template"]["spec"]
    assert not pod_spec["automountServiceAccountToken"]
    assert "--executors" not in pod_spec["containers"][0]["args"]
    assert pod_spec["containers"][0]["args"][-2:] == ["--budget", "30m"], "half of the deadline"
    large = job(topic, TopicSpec(), "default", Trigger.HEALTH, SETTINGS, work_bytes=2 << 30)
    pod_spec = large["spec"]["template"]["spec"]
    assert pod_spec["automountServiceAccountToken"]
    assert pod_spec["containers"][0]["args"][-6:] == [
        "--executors", "2", "--executor-cores", "1", "--executor-memory", "1Gi",
    ]  # fmt: skip


def test_one_name_per_topic() -> None:
    assert job_name("orders") == "tidewater-maintain-orders"
    first, second = job_name("z" * 60 + "a"), job_name("z" * 60 + "b")
    assert first != second
    assert len(first) <= 63
