"""The store is away for longer than the sessions: what docs/coordination.md says goes on, does."""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
SPEC = {"partitions": 2, "writer": {"flushInterval": "100ms"}}
TTL_S = 3
WAIT_S = 60.0
SUBSCRIPTION = json.dumps(
    {
        "apiVersion": "tidewater.dev/v1alpha1",
        "kind": "Subscription",
        "metadata": {"name": "billing", "namespace": "shop"},
        "spec": {"topic": "orders", "ackDeadline": "60s", "startFrom": {"position": "earliest"}},
    }
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def make_worker(directory: Path, name: str, etcd: Etcd) -> Worker:
    return Worker(
        directory / name,
        [topic_manifest(TOPIC, SPEC), SUBSCRIPTION],
        catalog={
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        },
        coordination=etcd.coordination,
        worker_id=name,
        session_ttl=f"{TTL_S}s",
    )


def send(worker: Worker, number: int, value: str) -> tuple[int, Any]:
    path = f"/v1/{TOPIC}/messages?partition={number}"
    answer = worker.post(path, json.dumps({"messages": [{"value": value}]}))
    return answer.status, answer.json()


def read(worker: Worker, number: int) -> list[tuple[int, str]]:
    answer = worker.get(f"/v1/{TOPIC}/messages?partition={number}&offset=0&limit=10000")
    assert answer.status == 200, answer.body
    return [(m["offset"], m["value"]) for m in answer.json()["messages"]]


def owner(worker: Worker, number: int) -> str | None:
    found = worker.get(f"/v1/{TOPIC}")
    if found.status != 200:
        return None
    part = found.json()["partitions"][number]
    return str(part["owner"]) if part["state"] == "running" else None


def call(worker: Worker, path: str, **body: Any) -> tuple[int, Any]:
    answer = worker.post(f"/v1/{TOPIC}/{path}", json.dumps(body))
    return answer.status, answer.json()


def pull_one_of_each(worker: Worker) -> dict[int, str]:
    """Hold a message of a partition that is here and one of a partition that is elsewhere."""
    found: dict[int, str] = {}

    def pull() -> bool:
        answer = call(worker, "subscriptions/billing/pull", max=1, wait_ms=1000, consumer="c")[1]
        found.update({m["partition"]: m["ack_id"] for m in answer["messages"]})
        return len(found) == 2

    wait_until(pull, WAIT_S, "a message of each partition", 0.1)
    return found


def metric(worker: Worker, name: str) -> float:
    lines = worker.get("/metrics").body.decode().splitlines()
    (found,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(found.split()[1])


def is_away(worker: Worker, stored: list[str]) -> bool:
    status, body = send(worker, 0, value := f"v{len(stored)}")
    if status == 200:
        stored.append(value)
        return False
    error = body["error"]
    assert (status, error["reason"]) == (503, "SessionLost"), body
    assert error["retry_after_ms"] > 0
    if error["kind"] == "OutcomeUnknown":
        # The session ran out between the append and its answer: in the log, but never promised.
        stored.append(value)
    else:
        assert error["kind"] == "Retryable", body
    return True


def check_while_away(a: Worker, b: Worker, stored: list[str]) -> None:
    assert send(b, 0, "routed")[1]["error"]["reason"] == "SessionLost", "routing goes on"
    status, flushed = call(a, "flush")
    assert status == 200, f"commits go on: {flushed}"
    assert flushed["frontier"] == {"0": len(stored), "1": 1}
    for worker in (a, b):
        assert read(worker, 0) == list(enumerate(stored)), "G3: reads go on, through others too"
        assert read(worker, 1) == [(0, "other")]
        assert worker.get("/readyz").status == 200, "what goes on must stay reachable"
    assert metric(a, "tidewater_session_left_seconds") == 0
    assert metric(a, "tidewater_session_renewals_failed_total") > 0
    status, body = call(a, "partitions/0/move", to="b")
    assert (status, body["error"]["reason"]) == (503, "StoreAway"), body


def test_etcd_is_away_for_longer_than_the_session(tmp_path: Path) -> None:
    with Etcd(tmp_path / "etcd") as etcd, ExitStack() as stack:
        a = stack.enter_context(make_worker(tmp_path, "a", etcd))
        b = stack.enter_context(make_worker(tmp_path, "b", etcd))
        assert call(a, "partitions/1/move", to="b")[0] == 202
        wait_until(lambda: owner(a, 1) == "b", WAIT_S, "partition 1 on b", 0.1)
        stored = ["v0"]
        wait_until(lambda: send(a, 0, "v0")[0] == 200, WAIT_S, "a message to be taken", 0.1)
        wait_until(lambda: send(a, 1, "other")[0] == 200, WAIT_S, "a message to be taken", 0.1)
        ack_ids = pull_one_of_each(a)
        etcd.servers[0].kill()
        killed_at = time.monotonic()
        assert not is_away(a, stored), "produce goes on while the session is certainly live"
        wait_until(lambda: is_away(a, stored), WAIT_S, "appends to be refused", 0.1)
        for number, ack_id in ack_ids.items():
            status, body = call(a, "subscriptions/billing/ack", ack_ids=[ack_id])
            assert status == 503, f"an ack of partition {number} is not stored: {body}"
            assert body["error"]["kind"] == "Retryable", f"wherever its owner is: {body}"
        check_while_away(a, b, stored)
        c = make_worker(tmp_path, "c", etcd)
        stack.push(c)
        c.start(wait=False)
        time.sleep(max(3 * TTL_S - (time.monotonic() - killed_at), 0))
        assert not c.answers(), "a worker that starts waits for the store"
        etcd.servers[0].start()
        etcd.wait()
        wait_until(lambda: not is_away(a, stored), WAIT_S, "appends to be taken again", 0.1)
        assert read(b, 0) == list(enumerate(stored)), "G1: nothing lost, nothing doubled"
        assert call(a, "flush")[1]["frontier"] == {"0": len(stored), "1": 1}
        wait_until(
            lambda: call(a, "subscriptions/billing/ack", ack_ids=list(ack_ids.values()))
            == (200, {"acked": 2, "refused": []}),
            WAIT_S, "the same acks to be stored now that it is back", 0.1,
        )  # fmt: skip
        c.wait_ready()
        assert metric(a, "tidewater_session_left_seconds") > 0
