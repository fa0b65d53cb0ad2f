"""How many messages are acknowledged per second in batches of 1,000 × 100 B."""

from typing import Any

from bench.lines import Line, Result, Target
from bench.processes import CpuMeter
from bench.samples import middle, summarise
from bench.stage import Stage
from tidewater import wire

ROWS = 1000
SIZE = 100
CONNECTIONS = 4
DEPTH = 4
IN_FLIGHT = CONNECTIONS * DEPTH
KINDS = {"JSON": wire.JSON, "NDJSON": wire.NDJSON, "Arrow IPC": wire.ARROW}
PEERS = ("NATS async", "NATS atomic")
"""NATS publishes without waiting for each ack, or in atomic batches; the faster is its row."""
TARGETS = {
    "JSON": Target("value", at_least=400_000),
    "Arrow IPC": Target("value", at_least=2_000_000),
}


def run(stage: Stage) -> Result:
    """Alternate between the formats and NATS."""
    plan = stage.plan
    for kind in KINDS.values():
        stage.producer.call("prepare", kind=kind, rows=ROWS, size=SIZE)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in (*KINDS, *PEERS)}
    edge = stage.tidewater.pids["edge"]
    meters = {name: CpuMeter(edge) for name in KINDS}
    meters |= {name: CpuMeter(stage.nats.process.pid) for name in PEERS}
    for number in range(plan.bulk_rounds):
        stage.say(f"bulk, round {number + 1} of {plan.bulk_rounds}")
        for name, kind in KINDS.items():
            with meters[name]:
                answers[name].append(
                    stage.producer.call(
                        "bulk",
                        topic="bench/bulk",
                        kind=kind,
                        connections=CONNECTIONS,
                        depth=DEPTH,
                        seconds=plan.bulk_seconds,
                    )
                )
            # What waits for the table must not slow down the next one's turn.
            stage.tidewater.settle("bench/bulk")
        nats = stage.nats_producer
        with meters["NATS async"]:
            answers["NATS async"].append(nats.call("bulk", size=SIZE, seconds=plan.bulk_seconds))
        with meters["NATS atomic"]:
            answers["NATS atomic"].append(
                nats.call(
                    "bulk_atomic",
                    size=SIZE,
                    rows=ROWS,
                    writers=IN_FLIGHT,
                    seconds=plan.bulk_seconds,
                )
            )
    return _result(answers, {name: meter.seconds for name, meter in meters.items()})


def _result(answers: dict[str, list[dict[str, Any]]], server_s: dict[str, float]) -> Result:
    rates = {
        name: [answer["rows"] / answer["elapsed_s"] for answer in found]
        for name, found in answers.items()
    }
    cpu = {
        name: middle(answer["cpu_s"] / answer["rows"] * 1e6 for answer in found)
        for name, found in answers.items()
    }
    server = {
        name: server_s[name] / sum(answer["rows"] for answer in found) * 1e6
        for name, found in answers.items()
    }
    result = Result(
        raw={
            "rates": rates,
            "client_cpu_s_per_million": cpu,
            "server_cpu_s_per_million": server,
        }
    )
    peer = max(PEERS, key=lambda name: middle(rates[name]))
    group = f"bulk, {IN_FLIGHT} batches of {ROWS:,} × {SIZE} B in flight (peer: {peer})"
    for name in KINDS:
        result.lines.append(
            Line(
                group,
                name,
                "msg/s",
                middle(rates[name]),
                nats=middle(rates[peer]),
                target=TARGETS.get(name),
            )
        )
        latency = summarise(us for answer in answers[name] for us in answer["us"])
        result.raw[f"{name} batch ack us"] = latency.to_json()
    for who, seconds in (("client", cpu), ("server", server)):
        result.lines += [
            Line(group, f"{name}: {who} CPU per million", "s", seconds[name], nats=seconds[peer])
            for name in KINDS
        ]
    return result
