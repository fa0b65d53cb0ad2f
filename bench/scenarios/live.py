"""How long a message takes from its producer to a consumer that follows, at a steady rate."""

import contextlib
import time
from typing import Any

from bench.driver import Driver
from bench.lines import Line, Result, Target
from bench.processes import CpuMeter
from bench.samples import Summary, summarise
from bench.servers import NAMESPACE
from bench.stage import Stage

RATE = 1_000
SIZE = 100
BEGIN_S = 1.0
"""Consumers have this long to be there before the first message."""
WARM_UP = 0.1
"""Share of a round's messages that is not counted: connections open, owners are asked for."""
TOPIC = f"{NAMESPACE}/live"
SUBSCRIPTION = "live"
NATS, TIDEWATER, READER = "nats", "tidewater", "tidewater, no subscription"


def run(stage: Stage) -> Result:
    """Let every system take its turn in every round."""
    plan = stage.plan
    seconds, count = plan.live_seconds, int(RATE * plan.live_seconds)
    load = {"rate": RATE, "seconds": seconds, "size": SIZE}
    found: dict[str, list[float]] = {NATS: [], TIDEWATER: [], READER: []}
    late: dict[str, float] = dict.fromkeys(found, 0.0)
    edge = CpuMeter(stage.tidewater.pids["edge"])
    for number in range(plan.live_rounds):
        stage.say(f"live delivery, round {number + 1} of {plan.live_rounds}")
        for name in _turn(number):
            take, send = _clients(stage, name)
            topic = TOPIC if name == TIDEWATER else f"{TOPIC}-read"
            for client in (take, send):
                client.call("ready")
            if name == NATS:
                take.tell("consume", count=count)
            elif name == TIDEWATER:
                take.tell("consume", topic=topic, subscription=SUBSCRIPTION, count=count)
            else:
                take.tell("follow", topic=topic, count=count)
            time.sleep(BEGIN_S)
            where = {} if name == NATS else {"topic": topic}
            with edge if name == TIDEWATER else contextlib.nullcontext():
                sent = send.call("produce", **where, **load)
            answer = take.answer()
            if len(answer["us"]) != count:
                raise AssertionError(f"{name}: {len(answer['us'])} of {count} messages came")
            found[name] += answer["us"][int(count * WARM_UP) :]
            late[name] = max(late[name], sent["late_s"])
    return _result(found, late, edge.seconds / (plan.live_rounds * seconds))


def _clients(stage: Stage, name: str) -> tuple[Driver, Driver]:
    get = stage.nats_live if name == NATS else stage.live
    return get("consumer"), get("producer")


def _turn(number: int) -> list[str]:
    names = [NATS, TIDEWATER, READER]
    shift = number % len(names)
    return names[shift:] + names[:shift]


def _result(found: dict[str, list[float]], late: dict[str, float], share: float) -> Result:
    by_name = {name: summarise(samples) for name, samples in found.items()}
    group = f"live delivery, {SIZE} B at {RATE:,} msg/s, fsync before the ack"
    targets = {"p50": 3_000.0, "p99": 20_000.0}
    lines = [
        Line(
            group,
            f"produced to consumed {share_name}",
            "µs",
            getattr(by_name[TIDEWATER], share_name),
            nats=getattr(by_name[NATS], share_name),
            target=Target("value", at_most=targets[share_name]) if share_name in targets else None,
        )
        for share_name in ("p50", "p99", "p999")
    ]
    lines += [
        Line(group, "p50, without a subscription", "µs", by_name[READER].p50),
        Line(group, "p99, without a subscription", "µs", by_name[READER].p99),
        Line(group, "share of a core, edge process", "%", share * 100),
    ]
    return Result(lines=lines, raw={"late_s": late, **{n: _raw(s) for n, s in by_name.items()}})


def _raw(summary: Summary) -> dict[str, Any]:
    return dict(summary.to_json())
