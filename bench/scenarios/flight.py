"""How many single messages are acknowledged per second with 64 in flight on 8 connections."""

from typing import Any

from bench.lines import Line, Result, Target
from bench.processes import CpuMeter
from bench.samples import middle, summarise
from bench.stage import Stage

LOAD = {"size": 100, "connections": 8, "depth": 8}


def run(stage: Stage) -> Result:
    """Alternate between the systems."""
    plan = stage.plan
    common = {**LOAD, "seconds": plan.flight_seconds}
    rates: dict[str, list[float]] = {"nats": [], "tidewater": []}
    samples: dict[str, list[float]] = {"nats": [], "tidewater": []}
    cpu: dict[str, list[float]] = {"nats": [], "tidewater": []}
    meters = {
        "nats": CpuMeter(stage.nats.process.pid),
        "tidewater": CpuMeter(stage.tidewater.pids["edge"]),
    }
    for number in range(plan.flight_rounds):
        stage.say(f"64 in flight, round {number + 1} of {plan.flight_rounds}")
        answers: dict[str, dict[str, Any]] = {}
        with meters["nats"]:
            answers["nats"] = stage.nats_producer.call("in_flight", **common)
        with meters["tidewater"]:
            answers["tidewater"] = stage.producer.call("in_flight", topic="bench/flight", **common)
        for name, answer in answers.items():
            rates[name].append(answer["count"] / answer["elapsed_s"])
            samples[name] += answer["us"]
            cpu[name].append(answer["cpu_s"] / answer["count"] * 1e6)
    latency = {name: summarise(us) for name, us in samples.items()}
    server = {name: meter.seconds / len(samples[name]) * 1e6 for name, meter in meters.items()}
    group = "64 in flight on 8 connections, 100 B"
    return Result(
        lines=[
            Line(
                group,
                "acknowledged",
                "msg/s",
                middle(rates["tidewater"]),
                nats=middle(rates["nats"]),
                target=Target("ratio", at_least=3.0),
            ),
            *(
                Line(
                    group,
                    f"ack {share}",
                    "µs",
                    getattr(latency["tidewater"], share),
                    nats=getattr(latency["nats"], share),
                )
                for share in ("p50", "p99")
            ),
            Line(
                group,
                "client CPU per message",
                "µs",
                middle(cpu["tidewater"]),
                nats=middle(cpu["nats"]),
            ),
            Line(
                group,
                "server CPU per message (Tidewater: the edge)",
                "µs",
                server["tidewater"],
                nats=server["nats"],
            ),
        ],
        raw={
            "rates": rates,
            "latency_us": {name: summary.to_json() for name, summary in latency.items()},
            "client_cpu_us": cpu,
            "server_cpu_us": server,
        },
    )
