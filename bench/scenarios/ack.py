"""How long a single message takes to be acknowledged, one in flight, fsync before the ack."""

from typing import Any

from bench.lines import Line, Result, Target
from bench.samples import Summary, summarise
from bench.stage import Stage

SIZES = (100, 1000)
FLOOR, NATS, TIDEWATER = "floor", "nats", "tidewater"
FLOOR_RESERVED, NATS_SOCKET, TIDEWATER_ASYNC = (
    "floor, space reserved",
    "nats, bare socket",
    "tidewater, asyncio client",
)


def run(stage: Stage) -> Result:
    """Let every system take its turn in every round."""
    plan = stage.plan
    folder = stage.folder / "floor"
    folder.mkdir()
    floor = stage.driver("floor", str(folder))
    socket = stage.driver("nats_socket", stage.nats.url)
    tidewater = stage.producer
    # nats-py adds the stream that the bare socket publishes to: it comes first.
    nats = stage.nats_producer
    nats.call("latency", size=100, count=20)
    turns = {
        FLOOR: lambda size, count: floor.call("latency", size=size, count=count, into="append"),
        FLOOR_RESERVED: lambda size, count: floor.call(
            "latency", size=size, count=count, into="reserved"
        ),
        NATS: lambda size, count: nats.call("latency", size=size, count=count),
        NATS_SOCKET: lambda size, count: socket.call("latency", size=size, count=count),
        TIDEWATER: lambda size, count: tidewater.call(
            "latency", topic="bench/ack", size=size, count=count
        ),
        TIDEWATER_ASYNC: lambda size, count: tidewater.call(
            "latency_async", topic="bench/ack", size=size, count=count
        ),
    }
    names = list(turns)
    found: dict[int, dict[str, list[float]]] = {s: {n: [] for n in names} for s in SIZES}
    cpu_us: list[float] = []
    for number in range(plan.ack_rounds):
        stage.say(f"ack latency, round {number + 1} of {plan.ack_rounds}")
        for size in SIZES:
            # Each round begins with another system: none always runs after the same one.
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                answer = turns[name](size, plan.ack_count)
                found[size][name] += answer["us"]
                if name == TIDEWATER:
                    cpu_us.append(answer["us_cpu"])
    return _result(found, cpu_us)


def _result(found: dict[int, dict[str, list[float]]], cpu_us: list[float]) -> Result:
    result = Result()
    for size, by_name in found.items():
        summaries = {name: summarise(samples) for name, samples in by_name.items()}
        result.raw[f"{size} B"] = {
            name: {**summary.to_json(), "samples": [round(us, 1) for us in by_name[name]]}
            for name, summary in summaries.items()
        }
        result.lines += _lines(f"ack latency, {size} B, one in flight", summaries)
    cpu = sum(cpu_us) / len(cpu_us)
    result.raw["client_cpu_us"] = cpu
    result.lines.append(
        Line("ack latency", "client CPU per message", "µs", cpu, target=Target("value", 60))
    )
    return result


def _lines(group: str, by_name: dict[str, Summary]) -> list[Line]:
    lines = []
    for share in ("p50", "p99", "p999"):
        value: dict[str, Any] = {name: getattr(s, share) for name, s in by_name.items()}
        lines.append(
            Line(
                group,
                share,
                "µs",
                value[TIDEWATER],
                floor=value[FLOOR],
                nats=value[NATS],
                target=Target("ratio", at_most=1.0) if share == "p50" else None,
            )
        )
    lines += [
        Line(group, "p50, asyncio client", "µs", by_name[TIDEWATER_ASYNC].p50),
        Line(group, "p50, bare socket", "µs", nats=by_name[NATS_SOCKET].p50),
        Line(group, "p50, space reserved", "µs", floor=by_name[FLOOR_RESERVED].p50),
    ]
    return lines
