"""A worker may have as many files open as the system lets it, not only those it began with (G6)."""

from pathlib import Path

import pytest

from tidewater_testing.parts.worker import Victim, Worker, topic_manifest

PARTITIONS = 120
SOFT = 150
"""Of open files: less than two for each partition, the lock and the segment. Container runtimes
give 1024, where a worker's limits are ten thousand partitions and connections."""


@pytest.mark.timeout(120)
def test_partitions_are_not_stopped_by_the_soft_limit(tmp_path: Path) -> None:
    spec = {"partitions": PARTITIONS, "writer": {"flushInterval": "1h"}, "freshness": "1h"}
    manifest = topic_manifest("shop/orders", spec)
    prefix = ("prlimit", f"--nofile={SOFT}:4096")
    with Worker(tmp_path / "w", [manifest], command_prefix=prefix) as worker:
        for number in range(PARTITIONS):
            path = f"/v1/shop/orders/messages?partition={number}"
            answer = worker.post(path, b'{"messages": [{"value": "v"}]}')
            assert answer.status == 200, f"G6: partition {number}: {answer}"
        for victim in (Victim.EDGE, Victim.TABLE):
            limits = Path(f"/proc/{worker.pid(victim)}/limits").read_text()
            (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
            assert line.split()[3:5] == ["4096", "4096"]
