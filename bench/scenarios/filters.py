"""What a subscription's filter saves over a long history that is in the table alone."""

import json
import time
from typing import Any

from bench.lines import Line, Result
from bench.processes import cpu_seconds
from bench.servers import NAMESPACE, Tidewater
from bench.stage import NO_LOG, Stage

TOPIC = "filters"
SHOP = 17
ARROW_LIMIT = 1_000_000
MB = 1e6
FIELDS = [
    {"name": "number", "type": "long"},
    {"name": "shop", "type": "int"},
    {"name": "note", "type": "string"},
]
SPEC: dict[str, object] = {
    "partitions": 1,
    "log": {**NO_LOG, "segmentSize": "4Mi"},
    "schema": {"fields": FIELDS},
}
LOG_SHARE_MAX = 0.1
"""What may still come from the log: its newest segment."""
GONE_WAIT_S = 60.0


def run(stage: Stage) -> Result:
    """Go over the same history twice with a filter for 0.1 % of it, and once without.

    `number` rises with the offset, so that its wanted rows are together and statistics find them;
    the wanted `shop` is in every row group, so that its column is read everywhere.
    """
    rows = stage.plan.filter_rows
    middle, share = rows // 2, rows // 1_000
    wheres = {
        "together": f"number >= {middle} AND number < {middle + share}",
        "scattered": f"shop = {SHOP}",
    }
    server = stage.another_tidewater(
        "filters",
        topics={TOPIC: SPEC},
        subscriptions={
            name: {"topic": TOPIC, "maxUnacked": 100_000, "filter": {"where": where}}
            for name, where in wheres.items()
        },
    )
    driver = stage.driver("tidewater_filter", server.url)
    topic = f"{NAMESPACE}/{TOPIC}"
    stage.say(f"producing {rows:,} rows for filters")
    driver.call("fill", topic=topic, rows=rows)
    server.settle(topic)
    wait_for_table(server, topic, rows)
    group = f"0.1 % of {rows / 1e6:.0f} million rows in the table"
    result = Result()
    stage.say("reading all of it")
    whole, cpu = _measured(server, lambda: driver.call(
        "read_all", topic=topic, rows=rows, shop=SHOP, limit=ARROW_LIMIT
    ))  # fmt: skip
    result.raw["read_all"] = {**whole, "cpu_s": cpu}
    whole_s = whole["elapsed_s"]
    result.lines += [
        Line(group, "all read as Arrow, filtered by the reader", "s", whole_s),
        Line(group, "worker CPU of that", "s", cpu),
    ]
    expected = {"together": share, "scattered": whole["found"]}
    before = _counts(server, topic)
    for name in wheres:
        stage.say(f"a subscription whose messages are {name}")
        answer, cpu = _measured(
            server, lambda name=name: driver.call("pull", topic=topic, subscription=name)
        )
        if answer["rows"] != expected[name]:
            raise AssertionError(f"G4 At least once: {expected[name]} are wanted, {answer}")
        after = _counts(server, topic)
        saved = {key: after[key] - before[key] for key in after}
        before = after
        result.raw[name] = {**answer, "cpu_s": cpu, **saved}
        touched = saved["bytes_read"] + saved["bytes_skipped"]
        result.lines += [
            Line(group, f"filtered subscription, {name}", "s", answer["elapsed_s"]),
            Line(group, f"all read / filtered, {name}", "×", whole_s / answer["elapsed_s"]),
            Line(group, f"worker CPU, {name}", "s", cpu),
            Line(group, f"files not opened, {name}", "", saved["files_skipped"]),
            Line(group, f"row groups not read, {name}", "", saved["row_groups_skipped"]),
            Line(group, f"bytes read, {name}", "MB", saved["bytes_read"] / MB),
            Line(group, f"bytes not read, {name}", "%", 100 * saved["bytes_skipped"] / touched),
        ]
    server.end()
    return result


def wait_for_table(server: Tidewater, topic: str, rows: int) -> None:
    """Wait until the log has let go of nearly everything, so that reads come from the table."""
    deadline = time.monotonic() + GONE_WAIT_S
    with server.client() as client:
        while time.monotonic() < deadline:
            found = json.loads(client.transport.request("GET", f"/v1/{topic}").body)
            if found["partitions"][0]["log_start"] >= (1 - LOG_SHARE_MAX) * rows:
                return
            time.sleep(0.1)
    raise AssertionError(f"the log still has most of {rows:,} rows")


def _measured(server: Tidewater, work: Any) -> tuple[dict[str, Any], float]:
    """Return an answer, and the worker's CPU seconds meanwhile."""
    pids = [server.pids[role] for role in ("edge", "table")]
    began = sum(cpu_seconds(pid) for pid in pids)
    answer: dict[str, Any] = work()
    return answer, sum(cpu_seconds(pid) for pid in pids) - began


def _counts(server: Tidewater, topic: str) -> dict[str, int]:
    with server.client() as client:
        stats = json.loads(client.transport.request("GET", f"/v1/{topic}/stats").body)
    found: dict[str, int] = stats["table"]["filters"]
    return found
