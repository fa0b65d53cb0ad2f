"""Partitions move while workers are killed and stopped: nothing acknowledged is lost or doubled.

Producers send keyed, idempotent batches through every worker; a drawn script of hand-overs, kills
of either process and pauses longer than the lease runs meanwhile. Afterwards the streams are read
through any worker and compared with what was acknowledged (G1, G3, G5, G8).
"""

import json
import random
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

import pytest

from tidewater_testing.parts.cluster import NAMES, TOPIC, Cluster, running_cluster
from tidewater_testing.parts.worker import Victim
from tidewater_testing.process import wait_until

TROUBLE_S = 12.0
PARTITIONS = 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Producer(threading.Thread):
    """Sends batches of three keyed messages, each until it is taken."""

    def __init__(self, cluster: Cluster, via: str) -> None:
        super().__init__(daemon=True)
        self._cluster, self._via = cluster, via
        self.acked: dict[tuple[int, int], str] = {}
        self.strange: list[bytes] = []
        self.batches = 0
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            keys = [f"{self._via}{self.batches % 7}{i}" for i in range(3)]
            values = [f"{self._via}-{self.batches}-{i}" for i in range(3)]
            while not self._send(keys, values) and not self.stopping:
                time.sleep(0.1)
            self.batches += 1

    def _send(self, keys: list[str], values: list[str]) -> bool:
        pairs = [{"key": key, "value": value} for key, value in zip(keys, values, strict=True)]
        headers = {"Tidewater-Producer": self._via, "Tidewater-Sequence": str(self.batches)}
        try:
            answer = self._cluster.workers[self._via].post(
                f"/v1/{TOPIC}/messages", json.dumps({"messages": pairs}), headers=headers,
                timeout_s=20,
            )  # fmt: skip
        except OSError:
            return False
        if answer.status != 200:
            if answer.status not in (409, 429, 503):
                self.strange.append(answer.body)
            return False
        offsets = {ack["partition"]: ack["offset"] for ack in answer.json()["acks"]}
        for key, value in zip(keys, values, strict=True):
            number = zlib.crc32(key.encode()) % PARTITIONS
            self.acked[number, offsets[number]] = value
            offsets[number] += 1
        return True


def _trouble(cluster: Cluster, chance: random.Random) -> None:
    worker = cluster.workers[chance.choice(NAMES)]
    match chance.choice(["move", "move", "edge", "table", "pause"]):
        case "move":
            path = f"/v1/{TOPIC}/partitions/{chance.randrange(PARTITIONS)}/move"
            with suppress(OSError):
                worker.post(path, json.dumps({"to": chance.choice(NAMES)}), timeout_s=10)
        case "edge":
            worker.kill(Victim.EDGE)
        case "table":
            worker.kill(Victim.TABLE)
        case "pause":
            pid = worker.freeze(Victim.EDGE)
            time.sleep(chance.uniform(1, 4))
            worker.thaw(pid)


def _stream(cluster: Cluster, number: int, chance: random.Random) -> dict[int, str]:
    rows: dict[int, str] = {}
    while True:
        page = cluster.read(chance.choice(NAMES), number, len(rows))
        if not page:
            return rows
        for offset, value in page:
            assert offset == len(rows), f"G3 One stream: partition {number}"
            rows[offset] = value


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    chance = random.Random(11)
    with running_cluster(tmp_path, "etcd") as cluster:
        producers = [Producer(cluster, name) for name in NAMES]
        for producer in producers:
            producer.start()
        end = time.monotonic() + TROUBLE_S
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.5, 2))
            _trouble(cluster, chance)
        before = [producer.batches for producer in producers]
        wait_until(
            lambda: all(p.batches > b + 5 for p, b in zip(producers, before, strict=True)),
            90,
            "all producers to go on when it is calm again",
        )
        for producer in producers:
            producer.stopping = True
        for producer in producers:
            producer.join()
            assert producer.strange == []
        for number in range(PARTITIONS):
            rows = _stream(cluster, number, chance)
            values = list(rows.values())
            assert len(values) == len(set(values)), "G8 Idempotent producers: a message twice"
            for producer in producers:
                for (partition, offset), value in producer.acked.items():
                    if partition == number:
                        assert rows.get(offset) == value, (
                            f"G1 Durable: partition {number} offset {offset}"
                        )
