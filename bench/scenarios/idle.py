"""What topics and subscriptions cost a worker while nothing happens: memory and CPU."""

import time

from bench.lines import Line, Result, Target
from bench.processes import cpu_seconds, rss_bytes
from bench.stage import Stage

MB = 1e6
SETTLE_S = 5.0
CPU_PERCENT_MAX = 5.0


def run(stage: Stage) -> Result:
    """Start a worker with many topics, each with a subscription, and leave it alone."""
    plan = stage.plan
    count, seconds = plan.idle_topics, plan.idle_seconds
    stage.say(f"a worker with {count:,} idle topics and as many idle subscriptions")
    names = [f"idle-{number:04d}" for number in range(count)]
    began = time.monotonic()
    server = stage.another_tidewater(
        "many-idle",
        topics={name: {"partitions": 1} for name in names},
        subscriptions={name: {"topic": name} for name in names},
        # Each topic gets its table before the worker says that it is ready.
        ready_s=60.0 + 0.5 * count,
    )
    ready_s = time.monotonic() - began
    try:
        time.sleep(SETTLE_S)
        pids = server.pids
        before = {role: cpu_seconds(pid) for role, pid in pids.items()}
        since = time.monotonic()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - since
        share = {role: (cpu_seconds(pid) - before[role]) / elapsed_s for role, pid in pids.items()}
        memory = {role: rss_bytes([pid]) / MB for role, pid in pids.items()}
    finally:
        server.end()
    group = f"{count:,} idle topics and {count:,} idle subscriptions on one worker"
    lines = [Line(group, f"RSS, {role}", "MB", size) for role, size in memory.items()]
    lines += [
        Line(group, "RSS, all processes", "MB", sum(memory.values())),
        Line(
            group,
            f"CPU over {seconds:.0f} s, all processes",
            "% of a core",
            sum(share.values()) * 100,
            target=Target("value", at_most=CPU_PERCENT_MAX),
        ),
        Line(group, "start to ready, tables made", "s", ready_s),
    ]
    return Result(lines=lines, raw={"rss_mb": memory, "cpu_share": share, "ready_s": ready_s})
