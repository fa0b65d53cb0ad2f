"""A worker is lost: messages without a key go on, each stored once; those of its keys wait."""

import asyncio
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest

from tidewater import AsyncClient, Client, RetryPolicy
from tidewater.producer import Producer
from tidewater.transport import TRUST_IDLE_S
from tidewater_core.errors import OutcomeUnknown, TidewaterError
from tidewater_testing.parts.cluster import NAMES, TOPIC, Cluster, running_cluster
from tidewater_testing.parts.worker import Victim
from tidewater_testing.process import wait_until

PRODUCERS = 9
SENDS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _spread(cluster: Cluster) -> None:
    for number, name in enumerate(NAMES):
        cluster.move(number, name)


def _values(cluster: Cluster) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(len(NAMES)):
        found.update(value for _, value in cluster.read("a", number))
    return found


def test_unkeyed_messages_go_elsewhere(tmp_path: Path) -> None:
    with running_cluster(tmp_path, "sqlite") as cluster:
        _spread(cluster)
        url = f"http://{cluster.workers['a'].address}"
        with Client(url) as client:
            # Their partitions are chance: some must be on the worker that goes.
            producers: list[Producer] = []
            homes: list[int] = []
            while len(producers) < PRODUCERS or 2 not in homes:
                producers.append(client.producer(TOPIC))
                homes.append(producers[-1].send(f"first {len(homes)}".encode()).partition)
            cluster.workers["c"].kill(Victim.SUPERVISOR, Victim.EDGE, Victim.TABLE)
            sent = [f"first {i}" for i in range(len(producers))]
            unknown: list[str] = []
            time.sleep(1.5 * TRUST_IDLE_S)  # connections to the lost one are looked at before use
            for turn in range(SENDS):
                for i, producer in enumerate(producers):
                    value = f"{turn} {i}"
                    try:
                        assert producer.send(value.encode()).partition != 2
                        sent.append(value)
                    except OutcomeUnknown:
                        unknown.append(value)
            assert len(unknown) <= 1, "what was sent after the loss was not sent to the lost one"
            key = next(str(i) for i in range(99) if zlib.crc32(b"%d" % i) % 3 == 2)
            with pytest.raises(TidewaterError):
                client.producer(TOPIC, retry=RetryPolicy(attempts_max=2)).send(b"x", key=key)
            asyncio.run(_posted(url, sent))
            cluster.workers["c"].start()
            wait_until(lambda: cluster.describe(2)["state"] == "running", 60, "c to be back", 0.2)
        values = _values(cluster)
        assert {v: values[v] for v in sent} == dict.fromkeys(sent, 1), "G8: stored once"
        assert set(values) <= {*sent, *unknown}


async def _posted(url: str, sent: list[str]) -> None:
    async with AsyncClient(url) as client:
        for number in range(PRODUCERS):
            async with client.producer(TOPIC) as producer:
                acks = [await producer.post(f"post {number} {i}".encode()) for i in range(SENDS)]
                assert {(await ack).partition for ack in acks} <= {0, 1}
                sent += [f"post {number} {i}" for i in range(SENDS)]
