"""The other doors: single messages over WebSockets, batches over Arrow Flight."""

from bench.lines import Line, Result, Target
from bench.processes import CpuMeter
from bench.samples import middle
from bench.stage import Stage

ROWS = 1_000
SIZE = 100


def sockets(stage: Stage) -> Result:
    """Measure 64 single messages in flight on 8 WebSockets."""
    plan = stage.plan
    load = {"sockets": 8, "depth": 8, "size": SIZE, "seconds": plan.flight_seconds}
    found = []
    for number in range(plan.flight_rounds):
        stage.say(f"64 in flight on sockets, round {number + 1} of {plan.flight_rounds}")
        found.append(stage.sockets.call("produce", topic="bench/sockets", **load))
    group = "64 in flight on 8 WebSockets, 100 B"
    rates = [each["msg_per_s"] for each in found]
    target = Target("value", at_least=30_000)
    return Result(
        lines=[
            Line(group, "acknowledged", "msg/s", middle(rates), target=target),
            *(
                Line(
                    group, f"ack {share}", "µs", middle([e[f"ack_ms_{share}"] for e in found]) * 1e3
                )
                for share in ("p50", "p99")
            ),
        ],
        raw={"rounds": found},
    )


def arrow_flight(stage: Stage) -> Result:
    """Measure DoPut beside a Flight server that keeps nothing, then read all of it back."""
    plan, topic = stage.plan, "bench/doput"
    client, void = stage.arrow_flight("client"), stage.arrow_flight("void")
    where = {"void": void.call("void")["address"], "tidewater": stage.tidewater.flight}
    rates: dict[str, list[float]] = {name: [] for name in where}
    meters = {role: CpuMeter(stage.tidewater.pids[role]) for role in ("edge", "table")}
    for number in range(plan.bulk_rounds):
        stage.say(f"Flight DoPut, round {number + 1} of {plan.bulk_rounds}")
        for name, address in where.items():
            put = {"address": address, "topic": topic, "rows": ROWS, "size": SIZE}
            if name == "void":
                found = client.call("put", **put, seconds=plan.bulk_seconds)
            else:
                with meters["edge"], meters["table"]:
                    found = client.call("put", **put, seconds=plan.bulk_seconds)
            rates[name].append(found["rows_per_s"])
        stage.tidewater.settle(topic)
    back = client.call("get", address=stage.tidewater.flight, topic=topic)
    millions = back["rows"] / 1e6
    group = f"Arrow Flight, batches of {ROWS:,} x {SIZE} B, an ack a batch"
    spent = {role: meter.seconds / millions for role, meter in meters.items()}
    return Result(
        lines=[
            Line(
                group,
                "DoPut, durable (floor: a server that keeps nothing)",
                "msg/s",
                middle(rates["tidewater"]),
                floor=middle(rates["void"]),
                target=Target("value", at_least=3_000_000),
            ),
            *(
                Line(group, f"DoPut, {role} process, per million rows", "CPU s", seconds)
                for role, seconds in spent.items()
            ),
            Line(
                group,
                f"DoGet of {millions:.1f} million rows",
                "rows/s",
                back["rows_per_s"],
                target=Target("value", at_least=1_000_000),
            ),
        ],
        raw={"rates": rates, "cpu_s_per_million": spent, "get": back},
    )
