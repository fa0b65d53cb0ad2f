"""What commits cost: to those who produce meanwhile, and as their number grows."""

import time

from bench.lines import Line, Result, Target
from bench.processes import cpu_seconds
from bench.samples import middle, summarise
from bench.servers import NAMESPACE
from bench.stage import Stage
from tidewater import wire

ROWS = 1000
SIZE = 100
BESIDE_RATE = 50_000
"""Rows per second of another topic that are produced beside the measured messages."""
WINDOW = 20
"""Commits whose mean cost is taken: around the 20th, and the last ones."""


def acks_while_committing(stage: Stage) -> Result:
    """Measure single messages beside a topic that commits, and beside one that does not.

    Both times the edge takes the same load, so that what differs is the table process alone.
    """
    plan = stage.plan
    stage.second_producer.call("prepare", kind=wire.ARROW, rows=ROWS, size=SIZE)
    samples: dict[str, list[float]] = {"beside-quiet": [], "beside-commits": []}
    for number in range(plan.quiet_rounds):
        stage.say(f"acks with and without commits, round {number + 1} of {plan.quiet_rounds}")
        for beside, found in samples.items():
            stage.second_producer.tell(
                "paced",
                topic=f"{NAMESPACE}/{beside}",
                kind=wire.ARROW,
                rows=ROWS,
                rate=BESIDE_RATE,
                seconds=plan.quiet_seconds,
            )
            time.sleep(0.3)
            answer = stage.producer.call(
                "latency_for",
                topic=f"{NAMESPACE}/ack-quiet",
                size=SIZE,
                seconds=plan.quiet_seconds - 0.6,
            )
            found += answer["us"]
            stage.second_producer.answer()
            stage.tidewater.settle(f"{NAMESPACE}/beside-commits")
    quiet, busy = (summarise(samples[name]) for name in ("beside-quiet", "beside-commits"))
    group = f"single acks beside {BESIDE_RATE:,} rows/s of another topic"
    return Result(
        lines=[
            Line(group, "p50 without commits", "µs", quiet.p50),
            Line(group, "p50 while the table process commits", "µs", busy.p50),
            Line(group, "p99 without commits", "µs", quiet.p99),
            Line(group, "p99 while the table process commits", "µs", busy.p99),
            Line(
                group,
                "p99 while it commits / without",
                "×",
                busy.p99 / quiet.p99,
                target=Target("value", at_most=2.0),
            ),
        ],
        raw={"quiet_us": quiet.to_json(), "committing_us": busy.to_json()},
    )


def cost_of_many(stage: Stage) -> Result:
    """Compare the cost of a commit at the 20th with that at the last."""
    count = max(stage.plan.commits, 4 * WINDOW)
    stage.say(f"{count:,} commits")
    table_pid = stage.tidewater.pids["table"]
    topic = f"{NAMESPACE}/commits"
    walls: list[float] = []
    cpus: list[float] = []

    def commit(number: int) -> float:
        began = cpu_seconds(table_pid)
        walls.extend(stage.producer.call("commit_each", topic=topic, count=number)["ms"])
        return (cpu_seconds(table_pid) - began) / number * 1000

    # Windows of a constant size keep the clock's 10 ms steps below the noise.
    while len(walls) < count:
        cpus.append(commit(WINDOW))
    early_cpu, late_cpu = cpus[1], middle(cpus[-3:])
    early_ms, late_ms = middle(walls[WINDOW // 2 : WINDOW * 3 // 2]), middle(walls[-WINDOW:])
    done = len(walls)
    group = f"cost of a commit, 20th and {done:,}th"
    return Result(
        lines=[
            Line(group, "CPU of the table process, 20th", "ms", early_cpu),
            Line(group, f"CPU of the table process, {done:,}th", "ms", late_cpu),
            Line(
                group,
                "CPU, last / 20th",
                "×",
                late_cpu / early_cpu,
                target=Target("value", at_most=1.5),
            ),
            Line(group, "time of a flush, 20th", "ms", early_ms),
            Line(group, f"time of a flush, {done:,}th", "ms", late_ms),
        ],
        raw={"cpu_ms": cpus, "window": WINDOW, "flush_ms": walls},
    )
