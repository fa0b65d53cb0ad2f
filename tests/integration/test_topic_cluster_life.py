"""Two workers and what an operator does: all of it through the registry, below a prefix of its own.

Assigned, moved, deleted with its table, made again on a table that was kept and on other workers.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tidewater_coordination import connect_as
from tidewater_coordination.port import Coordination, TopicPhase
from tidewater_coordination.rules import undrained
from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.parts.worker import Worker
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
WAIT_S = 60.0
KEPT = {"partitions": 3, "writer": {"flushInterval": "200ms"}}
GONE = {**KEPT, "deletionPolicy": "Delete"}
PREFIX = "tidewater/shop"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class OperatedWorker(Worker):
    """A worker with settings as an operator writes them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings = replace(self.settings, coordination_prefix=PREFIX, assigned_only=True)
        (self.directory / "settings.json").write_text(self.settings.to_json())


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[dict[str, Worker]]:
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    with Etcd(tmp_path / "etcd") as etcd, ExitStack() as stack:
        made: dict[str, Worker] = {}
        for name in ("a", "b"):
            made[name] = OperatedWorker(
                tmp_path / name,
                catalog=catalog,
                coordination=etcd.coordination,
                worker_id=name,
                session_ttl="5s",
            )
            stack.push(made[name])
            made[name].start(wait=False)
        for worker in made.values():
            worker.wait_ready()
        yield made


def partitions(worker: Worker) -> dict[int, dict[str, Any]]:
    """Return the partitions of the topic that a worker reports as open."""
    topics = worker.get("/v1/shop").json()["topics"]
    found = [part for topic in topics for part in topic["partitions"]]
    return {part["partition"]: part for part in found if part["open"]}


def placed(workers: dict[str, Worker]) -> dict[int, str]:
    return {number: name for name, worker in workers.items() for number in partitions(worker)}


def send(worker: Worker, number: int, value: str) -> int:
    """Send until it is taken; return the offset."""
    taken: list[int] = []

    def done() -> bool:
        body = json.dumps({"messages": [{"value": value}]})
        answer = worker.post(f"/v1/{TOPIC}/messages?partition={number}", body)
        assert answer.status in (200, 404, 503), answer.body
        if answer.status == 200:
            taken.append(answer.json()["acks"][0]["offset"])
        return bool(taken)

    wait_until(done, WAIT_S, f"{value} to be taken", 0.1)
    return taken[0]


async def make(
    store: Coordination, workers: dict[str, Worker], spec: dict[str, Any], where: dict[int, str]
) -> None:
    await store.register_topic(TOPIC, json.dumps(spec), str(uuid4()))
    await asyncio.sleep(0.3)
    assert placed(workers) == {}, "what is assigned to nobody is nobody's"
    await store.set_assignment(TOPIC, where)
    wait_until(lambda: placed(workers) == where, WAIT_S, f"partitions at {where}", 0.1)


async def delete(store: Coordination, phase: TopicPhase) -> None:
    found = (await store.registry()).topics[TOPIC]
    assert await store.set_topic_phase(TOPIC, found.uuid, TopicPhase.DELETING)
    deadline = time.monotonic() + WAIT_S
    while True:
        registry = await store.registry()
        left = undrained(registry.owners.get(TOPIC, {}))
        if not left and registry.topics[TOPIC].phase is phase:
            break
        assert time.monotonic() < deadline, f"{registry.topics[TOPIC].phase}, not drained: {left}"
        await asyncio.sleep(0.05)
    await store.unregister_topic(TOPIC)


async def test_a_topic_on_two_workers_is_deleted_and_made_again(
    workers: dict[str, Worker], tmp_path: Path
) -> None:
    a, b = workers["a"], workers["b"]
    store = connect_as(a.settings)
    await store.start()
    await make(store, workers, KEPT, {0: "a", 1: "a", 2: "b"})
    for number in range(3):
        assert send(b, number, f"first {number}") == 0
    await store.set_assignment(TOPIC, {0: "a", 1: "b", 2: "b"})
    wait_until(lambda: placed(workers).get(1) == "b", WAIT_S, "partition 1 on b", 0.1)
    assert send(a, 1, "second 1") == 1
    await delete(store, TopicPhase.DELETING)
    for worker in (a, b):
        wait_until(
            lambda w=worker: not (w.settings.log_root / TOPIC).exists(),  # type: ignore[misc]
            WAIT_S, f"the drained logs on {worker.worker_id} to be deleted", 0.1,
        )  # fmt: skip
    # Made again elsewhere, on the table that was kept: offsets go on, epochs too.
    await make(store, workers, GONE, {0: "b", 1: "a", 2: "a"})
    assert [send(a, number, f"third {number}") for number in range(3)] == [1, 2, 1]
    epochs = {n: part["epoch"] for worker in (a, b) for n, part in partitions(worker).items()}
    assert epochs[1] > 2, "above those that the table had seen"
    flushed = a.post(f"/v1/{TOPIC}/flush")
    assert (flushed.status, flushed.json()["frontier"]) == (200, {"0": 2, "1": 3, "2": 2})
    answer = b.get(f"/v1/{TOPIC}/messages?partition=1&offset=0&limit=10")
    values = [message["value"] for message in answer.json()["messages"]]
    assert values == ["first 1", "second 1", "third 1"], "G3: one stream over both lives"
    await delete(store, TopicPhase.DROPPED)
    assert not list((tmp_path / "warehouse").rglob("*.parquet")), "the table went with its files"
    assert b.get("/v1/shop").json()["leftovers"] == []
    await store.close()
