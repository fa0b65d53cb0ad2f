"""How fast a reader catches up with millions of rows, and what memory that takes."""

from typing import Any

from bench.lines import Line, Result, Target
from bench.processes import RssWatch
from bench.scenarios.table import flood
from bench.servers import NAMESPACE
from bench.stage import Stage

ARROW_LIMIT = 1_000_000
NDJSON_LIMIT = 50_000
MB = 1e6
RISE_MB_MAX = 300


def run(stage: Stage) -> Result:
    """Read from the log what `flood` left there, and from the table what only that still has."""
    rows = stage.plan.flood_rows
    stage.say(f"producing {rows:,} rows whose log goes away")
    flood(stage, "history", rows)
    stage.tidewater.settle(f"{NAMESPACE}/history")
    result = Result()
    for topic, where in (("flood", "log"), ("history", "table")):
        stage.say(f"catching up from the {where}")
        answer, rise = _read(stage, topic, rows)
        group = f"catch-up of {rows / 1e6:.0f} million rows, from the {where}"
        result.raw[where] = {**answer, "rss_rise_bytes": rise}
        result.lines += [
            Line(
                group,
                "Arrow over HTTP",
                "rows/s",
                answer["rows"] / answer["elapsed_s"],
                target=Target("value", at_least=1_000_000),
            ),
            Line(
                group,
                "rise of the worker's RSS",
                "MB",
                rise / MB,
                target=Target("value", at_most=RISE_MB_MAX),
            ),
            Line(group, "client CPU per million rows", "s", answer["cpu_s"] / answer["rows"] * 1e6),
        ]
        lines = stage.reader.call(
            "ndjson",
            topic=f"{NAMESPACE}/{topic}",
            start=0,
            stop=stage.plan.read_ndjson_rows,
            limit=NDJSON_LIMIT,
        )
        result.raw[f"{where} ndjson"] = lines
        result.lines.append(
            Line(
                group,
                "NDJSON over HTTP",
                "rows/s",
                lines["rows"] / lines["elapsed_s"],
                target=Target("value", at_least=100_000),
            )
        )
    return result


def _read(stage: Stage, topic: str, rows: int) -> tuple[dict[str, Any], int]:
    pids = stage.tidewater.pids
    with RssWatch([pids["edge"], pids["table"]]) as watch:
        answer = stage.reader.call(
            "arrow", topic=f"{NAMESPACE}/{topic}", start=0, stop=rows, limit=ARROW_LIMIT
        )
    if answer["rows"] != rows:
        raise AssertionError(f"G3 One stream: {rows} rows were acknowledged, {answer} were read")
    return answer, watch.most - watch.before
