"""A topic's life on running workers: deleted, made again, grown, changed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyiceberg.catalog import load_catalog

from tidewater_coordination import connect_as
from tidewater_coordination.port import Coordination, TopicPhase
from tidewater_coordination.rules import undrained
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
WAIT_S = 30.0
FAST = {"writer": {"flushInterval": "200ms"}}
ONCE = {"Tidewater-Producer": "p1", "Tidewater-Sequence": "0"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    spec = {"partitions": 2, **FAST}
    with Worker(tmp_path, [topic_manifest(TOPIC, spec)]) as part:
        yield part


@asynccontextmanager
async def registry_of(worker: Worker) -> AsyncIterator[Coordination]:
    store = connect_as(worker.settings)
    await store.start()
    yield store
    await store.close()


def send(worker: Worker, number: int, *values: str, **headers: str) -> tuple[int, Any]:
    body = json.dumps({"messages": [{"value": value} for value in values]})
    path = f"/v1/{TOPIC}/messages?partition={number}"
    answer = worker.post(path, body, headers=headers)
    return answer.status, answer.json()


def values_of(worker: Worker, number: int) -> list[tuple[int, str]]:
    answer = worker.get(f"/v1/{TOPIC}/messages?partition={number}&offset=0&limit=1000")
    assert answer.status == 200, answer.body
    return [(m["offset"], m["value"]) for m in answer.json()["messages"]]


async def until_phase(store: Coordination, phase: TopicPhase) -> None:
    deadline = time.monotonic() + WAIT_S
    while (found := (await store.registry()).topics[TOPIC].phase) is not phase:
        assert time.monotonic() < deadline, f"{TOPIC} is {found}, not {phase}"
        await asyncio.sleep(0.05)


async def until_drained(store: Coordination) -> None:
    deadline = time.monotonic() + WAIT_S
    while left := undrained((await store.registry()).owners.get(TOPIC, {})):
        assert time.monotonic() < deadline, f"not drained: {left}"
        await asyncio.sleep(0.05)


def is_gone(worker: Worker) -> bool:
    return worker.get(f"/v1/{TOPIC}").status == 404


def is_open(worker: Worker) -> bool:
    topics = [t for t in worker.get("/v1/shop").json()["topics"] if t["name"] == "orders"]
    return bool(topics) and all(part["open"] for part in topics[0]["partitions"])


def log_of(worker: Worker) -> Path:
    return worker.settings.log_root / TOPIC


def tables(worker: Worker) -> list[tuple[str, ...]]:
    catalog = load_catalog("tidewater", **worker.catalog_properties)
    try:
        return catalog.list_tables("shop")
    finally:
        catalog.close()


async def delete(worker: Worker, store: Coordination, until: TopicPhase) -> None:
    uuid = (await store.registry()).topics[TOPIC].uuid
    assert await store.set_topic_phase(TOPIC, uuid, TopicPhase.DELETING)
    await until_drained(store)
    await until_phase(store, until)
    await store.unregister_topic(TOPIC, keep_cursors=until is TopicPhase.DELETING)
    wait_until(lambda: is_gone(worker), WAIT_S, "the topic to be gone", 0.05)
    wait_until(lambda: not log_of(worker).exists(), WAIT_S, "its drained log to be deleted", 0.05)


async def test_a_deleted_topic_is_drained_and_one_made_again_goes_on(worker: Worker) -> None:
    assert send(worker, 0, "a", "b", **ONCE)[0] == 200
    assert send(worker, 1, "c")[0] == 200
    async with registry_of(worker) as store:
        first = (await store.registry()).topics[TOPIC]
        assert await store.set_topic_phase(TOPIC, first.uuid, TopicPhase.DELETING)
        await until_drained(store)
        status, body = send(worker, 0, "late")
        assert (status, body["error"]["reason"]) == (404, "TopicDeleting")
        assert values_of(worker, 0) == [(0, "a"), (1, "b")], "readable until it is gone"
        owners = (await store.registry()).owners[TOPIC]
        assert {n: owner.drained_at for n, owner in owners.items()} == {0: 2, 1: 1}
        await store.unregister_topic(TOPIC)
        wait_until(lambda: is_gone(worker), WAIT_S, "the topic to be gone", 0.05)
        wait_until(lambda: not log_of(worker).exists(), WAIT_S, "its log to be deleted", 0.05)
        assert worker.get("/readyz").status == 200, "what is gone is not waited for"
        # Made again on the table that was kept: offsets go on, epochs are above the table's.
        await store.register_topic(TOPIC, first.spec, str(uuid4()))
        wait_until(lambda: is_open(worker), WAIT_S, "the topic to be open", 0.05)
        status, body = send(worker, 0, "new", **ONCE)
        assert (status, body["acks"]) == (200, [{"partition": 0, "offset": 2, "count": 1}]), (
            "a producer of the earlier life is not known to this one (G8)"
        )
        worker.flush(TOPIC)
        assert values_of(worker, 0) == [(0, "a"), (1, "b"), (2, "new")]
        assert values_of(worker, 1) == [(0, "c")]
        assert (await store.registry()).owners[TOPIC][0].epoch > owners[0].epoch


async def test_a_table_goes_with_its_topic_if_asked_for(tmp_path: Path) -> None:
    spec = {"partitions": 2, "deletionPolicy": "Delete", **FAST}
    with Worker(tmp_path, [topic_manifest(TOPIC, spec)]) as worker:
        assert send(worker, 0, "a")[0] == 200
        worker.flush(TOPIC)
        assert tables(worker) == [("shop", "orders")]
        async with registry_of(worker) as store:
            first = (await store.registry()).topics[TOPIC]
            await delete(worker, store, TopicPhase.DROPPED)
            assert tables(worker) == []
            assert not list((tmp_path / "warehouse").rglob("*.parquet")), "its files went, too"
            await store.register_topic(TOPIC, first.spec, str(uuid4()))
            wait_until(lambda: is_open(worker), WAIT_S, "the topic to be open", 0.05)
            status, body = send(worker, 0, "anew")
            assert (status, body["acks"][0]["offset"]) == (200, 0)


async def test_what_is_not_drained_stays_as_evidence(worker: Worker) -> None:
    pid = worker.freeze(Victim.TABLE)
    try:
        assert send(worker, 0, "only here")[0] == 200
        async with registry_of(worker) as store:
            first = (await store.registry()).topics[TOPIC]
            await store.unregister_topic(TOPIC)
            wait_until(lambda: is_gone(worker), WAIT_S, "the topic to be gone", 0.05)
            empty = log_of(worker) / "1"
            wait_until(lambda: not empty.exists(), WAIT_S, "the empty log to be deleted", 0.05)
            assert list((log_of(worker) / "0").glob("*.wal")), "G7: evidence is kept"
            left = worker.get("/v1/shop").json()["leftovers"]
            assert [(one["topic"], one["partition"]) for one in left] == [(TOPIC, 0)]
            # Another topic of that name does not take it for its own, nor does it delete it.
            worker.thaw(pid)
            await store.register_topic(TOPIC, first.spec, str(uuid4()))

            def refused() -> bool:
                status, body = send(worker, 0, "new")
                return status == 500 and body["error"]["reason"] == "ForeignLog"

            wait_until(refused, WAIT_S, "partition 0 to say why it stays closed", 0.1)
            assert list((log_of(worker) / "0").glob("*.wal"))
    finally:
        worker.thaw(pid)


@pytest.mark.parametrize("position", ["earliest", "latest"])
async def test_a_subscription_outlives_its_topic(worker: Worker, position: str) -> None:
    """G4: a Topic deleted by mistake and applied again; then one whose table somebody dropped."""
    path = f"/v1/{TOPIC}/subscriptions/billing"
    pull = json.dumps({"max": 1, "wait_ms": 1000, "consumer": "c1"})

    def pulled() -> tuple[int, str]:
        """Pull one message and acknowledge it."""
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = worker.post(f"{path}/pull", pull)
            messages = answer.json()["messages"] if answer.status == 200 else []
            if messages:
                ids = json.dumps({"ack_ids": [message["ack_id"] for message in messages]})
                assert worker.post(f"{path}/ack", ids).status == 200
                return messages[0]["offset"], messages[0]["value"]
            assert time.monotonic() < deadline, f"no message: {answer.body!r}"
            time.sleep(0.1)

    async def again() -> None:
        first = (await store.registry()).topics[TOPIC]
        await delete(worker, store, TopicPhase.DELETING)
        assert worker.post(f"{path}/pull", pull).status == 404
        if drops:
            catalog = load_catalog("tidewater", **worker.catalog_properties)
            catalog.drop_table(TOPIC.replace("/", "."))
            catalog.close()
        await store.register_topic(TOPIC, first.spec, str(uuid4()))
        wait_until(lambda: is_open(worker), WAIT_S, "the topic to be open", 0.05)

    drops = False
    async with registry_of(worker) as store:
        spec = json.dumps({"topic": "orders", "startFrom": {"position": position}})
        await store.register_subscription("shop/billing", spec, str(uuid4()))
        wait_until(
            lambda: len(worker.get(path).json().get("partitions", ())) == 2, WAIT_S, "its begin"
        )
        assert send(worker, 0, "a", "b", "c")[0] == 200
        assert pulled() == (0, "a")
        await again()
        assert send(worker, 0, "d")[1]["acks"][0]["offset"] == 3
        assert [pulled() for _ in range(3)] == [(1, "b"), (2, "c"), (3, "d")]
        drops = True
        await again()
        if position == "earliest":
            assert send(worker, 0, "e")[1]["acks"][0]["offset"] == 0
            assert pulled() == (0, "e"), "progress of the table that is gone hides nothing"


async def test_a_topic_that_went_while_the_worker_was_away(worker: Worker) -> None:
    assert send(worker, 0, "a")[0] == 200
    async with registry_of(worker) as store:
        await store.register_topic("shop/other", '{"partitions": 1}', str(uuid4()))
        uuid = (await store.registry()).topics[TOPIC].uuid
        await store.set_topic_phase(TOPIC, uuid, TopicPhase.DELETING)
        await until_drained(store)
        worker.stop()
        assert log_of(worker).exists()
        await store.unregister_topic(TOPIC)
        manifest = worker.directory / "manifest-0.yaml"
        manifest.write_text(topic_manifest("shop/third", FAST))
        worker.start()
        assert not log_of(worker).exists(), "its log is deleted at the next start"


async def test_partitions_grow_and_settings_change_under_load(worker: Worker) -> None:
    stored: list[tuple[int, int]] = []

    def load(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            body = json.dumps({"messages": [{"key": f"k{i}", "value": "x"} for i in range(20)]})
            answer = worker.post(f"/v1/{TOPIC}/messages", body)
            if answer.status == 503:
                continue  # a partition is opening: nothing of it was stored, or it says so
            assert answer.status == 200, answer.body
            stored.extend((ack["partition"], ack["count"]) for ack in answer.json()["acks"])

    async with registry_of(worker) as store:
        loading = asyncio.create_task(asyncio.to_thread(load, 3.0))
        await asyncio.sleep(0.5)
        found = (await store.registry()).topics[TOPIC]
        spec = {"partitions": 5, "log": {"sync": "Periodic", "segmentSize": "1Mi"}, **FAST}
        await store.register_topic(TOPIC, json.dumps(spec), found.uuid)
        await loading
    assert {number for number, _ in stored} == {0, 1, 2, 3, 4}
    worker.flush(TOPIC)
    described = worker.get(f"/v1/{TOPIC}").json()["partitions"]
    for part in described:
        count = sum(count for number, count in stored if number == part["partition"])
        assert part["end"] == part["frontier"] == count, "G2 Exactly once, while it grew"
    log = worker.get(f"/v1/{TOPIC}/stats").json()["log"]
    assert {one["sync"] for one in log.values()} == {"Periodic"}, "without a restart"
