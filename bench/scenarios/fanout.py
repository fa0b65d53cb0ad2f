"""What a hundred live readers of one topic cost the worker, beside one: CPU per delivered byte."""

import time
from typing import Any

from bench.lines import Line, Result, Target
from bench.processes import CpuMeter
from bench.samples import middle
from bench.servers import NAMESPACE
from bench.stage import Stage
from tidewater import wire

TOPIC = f"{NAMESPACE}/fanout"
ROWS = 100
SIZE = 200
RATE = 2_000
"""Messages per second, in batches of `ROWS`."""
MANY = 100
RATIO_MAX = 3.0


def run(stage: Stage) -> Result:
    """Produce the same for no reader, one and a hundred; what readers add is what they cost."""
    plan = stage.plan
    stage.producer.call("prepare", kind=wire.NDJSON, rows=ROWS, size=SIZE)
    found: dict[int, list[dict[str, Any]]] = {0: [], 1: [], MANY: []}
    for number in range(plan.fanout_rounds):
        stage.say(f"fan-out, round {number + 1} of {plan.fanout_rounds}")
        for readers, runs in found.items():
            runs.append(_run(stage, readers))
    idle_s = middle(one["edge_s"] for one in found[0])
    per_mb = {
        readers: middle((one["edge_s"] - idle_s) / (one["bytes"] / 1e6) for one in runs)
        for readers, runs in found.items()
        if readers
    }
    ratio = per_mb[MANY] / max(per_mb[1], 1e-9)
    group = f"fan-out: live readers of {RATE:,} msg/s of {SIZE} B (WebSocket, JSON)"
    return Result(
        lines=[
            Line(group, "edge CPU per delivered MB, 1 reader", "ms", per_mb[1] * 1e3),
            Line(group, f"edge CPU per delivered MB, {MANY} readers", "ms", per_mb[MANY] * 1e3),
            Line(
                group,
                f"{MANY} readers over 1 reader",
                "×",
                ratio,
                target=Target("value", at_most=RATIO_MAX),
            ),
            Line(
                group,
                f"share of a core, edge process, {MANY} readers",
                "%",
                middle(one["edge_s"] / one["elapsed_s"] for one in found[MANY]) * 100,
            ),
        ],
        raw={str(readers): runs for readers, runs in found.items()},
    )


def _run(stage: Stage, readers: int) -> dict[str, Any]:
    seconds = stage.plan.fanout_seconds
    expected = int(seconds * RATE // ROWS) * ROWS
    followers = stage.driver("followers", stage.tidewater.url)
    if readers:
        followers.call("join", topic=TOPIC, count=readers)
        followers.tell("count", messages=expected)
    began = time.perf_counter()
    with CpuMeter(stage.tidewater.pids["edge"]) as meter:
        stage.producer.call(
            "paced", topic=TOPIC, kind=wire.NDJSON, rows=ROWS, rate=RATE, seconds=seconds, threads=1
        )
        answer: dict[str, Any] = {"bytes": 0, "messages": []}
        if readers:
            answer = followers.answer()
    if any(messages != expected for messages in answer["messages"]):
        raise AssertionError(f"G3 One stream: {expected} messages were sent, {answer} came")
    return {
        "edge_s": meter.seconds,
        "bytes": answer["bytes"],
        "elapsed_s": time.perf_counter() - began,
        "client_s": answer.get("cpu_s", 0.0),
    }
