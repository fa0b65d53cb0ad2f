"""Real workers share a table while the committing one is killed, paused and woken again.

Producers send through every worker; afterwards everything is flushed, and the table and the logs
alone are looked at (G1, G2, G5).
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tidewater_testing.checker import AckedBatch, Range, make_payload, violations
from tidewater_testing.evidence import Evidence, gather
from tidewater_testing.parts.cluster import NAMES, TOPIC, Cluster, running_cluster
from tidewater_testing.parts.worker import Victim
from tidewater_testing.process import wait_until

PARTITIONS = {0: "a", 1: "b", 2: "c"}
INTERVAL_S = 0.2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Producer(threading.Thread):
    """Sends batches to one partition, each until it is taken."""

    def __init__(self, cluster: Cluster, partition: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._partition = cluster, partition
        self.acked: list[AckedBatch] = []
        self.stopping = False

    def run(self) -> None:
        sequence = 0
        name = f"producer-{self._partition}"
        via = self._cluster.workers[PARTITIONS[self._partition]]
        while not self.stopping:
            values = [make_payload(name, sequence * 3 + i).decode() for i in range(3)]
            body = json.dumps({"messages": [{"value": value} for value in values]})
            headers = {"Tidewater-Producer": name, "Tidewater-Sequence": str(sequence)}
            path = f"/v1/{TOPIC}/messages?partition={self._partition}"
            with suppress(OSError):
                answer = via.post(path, body, headers=headers, timeout_s=20)
                if answer.status == 200:
                    (ack,) = answer.json()["acks"]
                    place = Range(ack["partition"], ack["offset"], ack["count"])
                    self.acked.append(AckedBatch(tuple(v.encode() for v in values), (place,)))
                    sequence += 1
            time.sleep(0.02)


def spread(cluster: Cluster) -> None:
    for number, owner in PARTITIONS.items():
        if cluster.owners()[number] != owner:
            cluster.move(number, owner)


def stats(cluster: Cluster, name: str) -> dict[str, object]:
    with suppress(OSError):
        answer = cluster.workers[name].get(f"/v1/{TOPIC}/stats")
        if answer.status == 200:
            found: dict[str, object] = answer.json()["table"]
            return found
    return {}


def committer(cluster: Cluster) -> str:
    """Wait until one worker commits for the others, and return it."""
    found: list[str] = []

    def one() -> bool:
        found[:] = [name for name in NAMES if stats(cluster, name).get("commits_by") == "here"]
        return len(found) == 1

    wait_until(one, 60, "one worker to commit for all", 0.2)
    return found[0]


def check(cluster: Cluster, producers: list[Producer], tmp_path: Path) -> Evidence:
    """Flush, stop everybody and judge from the table and the logs alone."""
    for producer in producers:
        producer.stopping = True
    for producer in producers:
        producer.join()

    def flushed() -> bool:
        try:
            for worker in cluster.workers.values():
                worker.flush(TOPIC)
        except (AssertionError, OSError):
            return False
        return True

    wait_until(flushed, 90, "a flush through every worker", 0.5)
    logs: dict[int, object] = {}
    table = None
    for worker in cluster.workers.values():
        worker.stop()
    for number, owner in PARTITIONS.items():
        worker = cluster.workers[owner]
        found = gather(worker.catalog_properties, worker.settings.log_root, TOPIC, "value")
        logs[number] = found.log[number]
        table = found
    assert table is not None
    evidence = Evidence(table.table, logs, table.commit_ids)  # type: ignore[arg-type]
    acked = [batch for producer in producers for batch in producer.acked]
    problems = violations(evidence, acked, flushed=True)
    assert problems == [], "\n".join(problems[:20])
    return evidence


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, "sqlite") as made:
        spread(made)
        yield made


def begin(cluster: Cluster) -> list[Producer]:
    producers = [Producer(cluster, number) for number in PARTITIONS]
    for producer in producers:
        producer.start()
    return producers


def wait_all_land(cluster: Cluster, producers: list[Producer]) -> None:
    """Wait until rows that are acknowledged from now on are in the table."""
    wait_until(lambda: all(each.acked for each in producers), 90, "everybody to have sent", 0.1)
    ends = {p: producer.acked[-1].ranges[0] for p, producer in enumerate(producers)}

    def landed() -> bool:
        return all(
            cluster.describe(p, PARTITIONS[p])["frontier"] > place.offset
            for p, place in ends.items()
        )

    wait_until(landed, 90, "everybody's rows to land", 0.1)


def test_quiet_workers_share_commits(cluster: Cluster, tmp_path: Path) -> None:
    producers = begin(cluster)
    committer(cluster)
    before = {name: stats(cluster, name) for name in NAMES}
    began = time.monotonic()
    time.sleep(4)
    after = {name: stats(cluster, name) for name in NAMES}
    intervals = (time.monotonic() - began) / INTERVAL_S

    def grown(what: str) -> int:
        return sum(int(after[n][what]) - int(before[n][what]) for n in NAMES)  # type: ignore[call-overload]

    commits, conflicts, handed = grown("commits"), grown("conflicts"), grown("handed_over")
    print(f"{intervals:.0f} intervals, {commits} commits, {conflicts} conflicts, {handed} handed")
    check(cluster, producers, tmp_path)
    assert commits <= intervals + 2, "one commit per interval serves all workers"
    assert conflicts <= 0.05 * commits + 1, f"{conflicts} conflicts at {commits} commits"
    assert handed >= commits / 2, "the others hand their files over"


def test_the_committing_worker_is_killed_again_and_again(cluster: Cluster, tmp_path: Path) -> None:
    producers = begin(cluster)
    for round_ in range(4):
        victim = committer(cluster)
        time.sleep(0.5)
        if round_ % 2:
            cluster.workers[victim].kill(Victim.TABLE)
        else:
            cluster.workers[victim].kill(Victim.EDGE)
        time.sleep(1)
        cluster.workers[victim].wait_ready()
        wait_all_land(cluster, producers)
    check(cluster, producers, tmp_path)


@pytest.mark.parametrize("victim", [Victim.EDGE, Victim.TABLE])
def test_the_committing_worker_sleeps_and_wakes(
    cluster: Cluster, tmp_path: Path, victim: Victim
) -> None:
    producers = begin(cluster)
    name = committer(cluster)
    others = [p for p, owner in PARTITIONS.items() if owner != name]
    via = PARTITIONS[others[0]]
    pid = cluster.workers[name].freeze(victim)
    try:
        before = {p: cluster.describe(p, PARTITIONS[p])["frontier"] for p in others}

        def others_go_on() -> bool:
            return all(
                cluster.describe(p, PARTITIONS[p]).get("frontier", 0) > before[p] + 10
                for p in others
            )

        wait_until(others_go_on, 60, f"the others' rows to land without {name}, via {via}", 0.2)
        time.sleep(4)  # longer than its session
    finally:
        cluster.workers[name].thaw(pid)
    cluster.workers[name].wait_ready()
    wait_all_land(cluster, producers)
    committer(cluster)
    check(cluster, producers, tmp_path)
