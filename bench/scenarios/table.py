"""How fast rows reach the table, what that costs, and how old they are when they are visible."""

from bisect import bisect_left
from typing import Any

from bench.lines import Line, Result, Target
from bench.processes import cpu_seconds
from bench.samples import summarise
from bench.servers import NAMESPACE
from bench.stage import Stage
from tidewater import wire

ROWS = 1000
SIZE = 100
FLUSH_INTERVAL_MS = 1000
"""The default of a topic, which the measured ones keep."""
RATES = (100_000, 1_000_000)
THREADS = 4
VISIBLE_WAIT_S = 180.0


def run(stage: Stage) -> Result:
    """First at a steady rate, for freshness; then as fast as it goes, for throughput."""
    stage.producer.call("prepare", kind=wire.ARROW, rows=ROWS, size=SIZE)
    result = Result()
    for rate in RATES:
        stage.say(f"into the table at {rate:,} rows/s for {stage.plan.paced_seconds:.0f} s")
        _paced(stage, rate, result)
    stage.say(f"into the table as fast as it goes, {stage.plan.flood_rows:,} rows")
    _flood(stage, "flood", result)
    return result


def freshness_ms(acks: list[tuple[float, int, int]], seen: list[tuple[float, int]]) -> list[float]:
    """Return, per acknowledged batch, how long until all of it was visible. Pure."""
    ends = [upto for _, upto in seen]
    ages = []
    for acked_at, _, end in acks:
        at = bisect_left(ends, end)
        if at == len(seen):
            raise AssertionError(f"offset {end} never became visible")
        ages.append(max(0.0, (seen[at][0] - acked_at) * 1000))
    return ages


def _paced(stage: Stage, rate: int, result: Result) -> None:
    name = "paced"
    table_pid = stage.tidewater.pids["table"]
    began_cpu = cpu_seconds(table_pid)
    stage.table.call("watch", namespace=NAMESPACE, name=name)
    sent = stage.producer.call(
        "paced",
        topic=f"{NAMESPACE}/{name}",
        kind=wire.ARROW,
        rows=ROWS,
        rate=rate,
        seconds=stage.plan.paced_seconds,
        threads=THREADS,
    )
    acks = [(at, partition, end) for at, partition, end in sent["acks"]]
    upto = max(end for _, _, end in acks)
    seen = stage.table.call("wait", upto=upto, timeout_s=VISIBLE_WAIT_S)["seen"]
    cpu = (cpu_seconds(table_pid) - began_cpu) / (sent["rows"] / 1e6)
    ages = summarise(freshness_ms(acks, [(at, end) for at, end in seen]))
    took = sent["rows"] / sent["elapsed_s"]
    result.raw[f"paced {rate}"] = {
        "freshness_ms": ages.to_json(),
        "commits": len(seen),
        "accepted_per_s": took,
        "late_s": sent["late_s"],
        "cpu_s_per_million": cpu,
        "seen": seen,
    }
    group = f"into the table at {rate:,} rows/s"
    limit_ms = 2 * FLUSH_INTERVAL_MS + 500
    result.lines += [
        Line(group, "accepted", "rows/s", took),
        Line(group, "freshness p50", "ms", ages.p50),
        Line(group, "freshness p99", "ms", ages.p99, target=Target("value", at_most=limit_ms)),
        Line(group, "table process CPU per million rows", "s", cpu),
    ]


def _flood(stage: Stage, name: str, result: Result) -> None:
    rows = stage.plan.flood_rows
    seen, sent, cpu = flood(stage, name, rows)
    visible_s = seen[-1][0] - sent["began_at"]
    checked = stage.table.call("count", namespace=NAMESPACE, name=name)
    if not checked["once"] or checked["rows"] != rows:
        raise AssertionError(f"G2 Once in the table: {rows} rows were acknowledged, {checked}")
    result.raw["flood"] = {
        "rows": rows,
        "accepted_per_s": rows / sent["elapsed_s"],
        "visible_per_s": rows / visible_s,
        "cpu_s_per_million": cpu,
        "commits": len(seen),
        "began_at": sent["began_at"],
        "ended_at": sent["ended_at"],
        "seen": seen,
    }
    group = f"into the table, {rows / 1e6:.0f} million rows as fast as they are taken"
    result.lines += [
        Line(group, "accepted", "rows/s", rows / sent["elapsed_s"]),
        Line(
            group,
            "visible: first send to last row",
            "rows/s",
            rows / visible_s,
            target=Target("value", at_least=1_000_000),
        ),
        Line(
            group,
            "table process CPU per million rows",
            "s",
            cpu,
            target=Target("value", at_most=1.5),
        ),
    ]


def flood(
    stage: Stage, name: str, rows: int
) -> tuple[list[tuple[float, int]], dict[str, Any], float]:
    """Produce rows as fast as they are taken; return what was seen, the answer, CPU per million."""
    table_pid = stage.tidewater.pids["table"]
    began_cpu = cpu_seconds(table_pid)
    stage.table.call("watch", namespace=NAMESPACE, name=name)
    sent = stage.producer.call(
        "bulk",
        topic=f"{NAMESPACE}/{name}",
        kind=wire.ARROW,
        connections=THREADS,
        depth=4,
        batches=rows // ROWS,
    )
    assert sent["rows"] == rows, f"{sent['rows']} of {rows} rows were taken"
    seen = stage.table.call("wait", upto=rows, timeout_s=VISIBLE_WAIT_S)["seen"]
    if not seen or seen[-1][1] < rows:
        raise AssertionError(f"{rows} rows were acknowledged, {seen[-1:]} are visible")
    return seen, sent, (cpu_seconds(table_pid) - began_cpu) / (rows / 1e6)
