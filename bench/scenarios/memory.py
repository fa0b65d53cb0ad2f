"""What memory a worker takes: idle, and over a long run."""

import time

from bench.lines import Line, Result, Target
from bench.processes import RssWatch, rss_bytes
from bench.samples import middle
from bench.servers import NAMESPACE
from bench.stage import Stage
from tidewater import wire

MB = 1e6
ROWS = 1000
SIZE = 100
IDLE_WAIT_S = 6.0
GROWTH_MB_MAX = 64
"""A run counts as flat if its last quarter is no further above its second one."""


def idle(stage: Stage) -> Result:
    """Measure a worker that was just started and has nothing to do: as it is by default."""
    stage.say("memory of an idle worker")
    plain = _idle(stage, "idle", has_flight=False)
    flight = _idle(stage, "idle-flight", has_flight=True)
    group = "RSS of an idle worker"
    return Result(
        lines=[
            *(Line(group, role, "MB", size) for role, size in plain.items()),
            Line(
                group, "all processes", "MB", sum(plain.values()),
                target=Target("value", at_most=300),
            ),
            Line(group, "all processes, with Arrow Flight", "MB", sum(flight.values())),
        ],
        raw={"mb": plain, "mb_with_flight": flight},
    )  # fmt: skip


def _idle(stage: Stage, name: str, *, has_flight: bool) -> dict[str, float]:
    server = stage.another_tidewater(name, has_flight=has_flight)
    time.sleep(IDLE_WAIT_S)
    by_role = {role: rss_bytes([pid]) / MB for role, pid in server.pids.items()}
    server.end()
    return by_role


def long_run(stage: Stage) -> Result:
    """Watch the memory of the worker while it takes gigabytes."""
    size = stage.plan.long_bytes
    stage.say(f"memory while {size / 1e9:.1f} GB are produced")
    stage.producer.call("prepare", kind=wire.ARROW, rows=ROWS, size=SIZE)
    batches = size // (ROWS * SIZE)
    with RssWatch(list(stage.tidewater.pids.values()), period_s=0.25) as watch:
        sent = stage.producer.call(
            "bulk",
            topic=f"{NAMESPACE}/long",
            kind=wire.ARROW,
            connections=4,
            depth=4,
            batches=batches,
        )
    sizes = [found for _, found in watch.series]
    quarter = max(1, len(sizes) // 4)
    second, last = middle(sizes[quarter : 2 * quarter]), middle(sizes[-quarter:])
    growth = (last - second) / MB
    group = f"RSS while {size / 1e9:.1f} GB are produced, all processes"
    return Result(
        lines=[
            Line(group, "before", "MB", watch.before / MB),
            Line(group, "second quarter", "MB", second / MB),
            Line(group, "last quarter", "MB", last / MB),
            Line(group, "most", "MB", watch.most / MB),
            Line(group, "growth", "MB", growth, target=Target("value", at_most=GROWTH_MB_MAX)),
            Line(group, "accepted", "rows/s", sent["rows"] / sent["elapsed_s"]),
        ],
        raw={"series": watch.series, "elapsed_s": sent["elapsed_s"], "rows": sent["rows"]},
    )
