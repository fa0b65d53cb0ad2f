"""What a worker tells the operator and Prometheus."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
WAIT_S = 30.0
FAST = {"writer": {"flushInterval": "200ms"}}


def subscription_manifest(name: str, spec: dict[str, Any]) -> str:
    return json.dumps(
        {
            "apiVersion": "tidewater.dev/v1alpha1",
            "kind": "Subscription",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": spec,
        }
    )


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    manifests = [
        topic_manifest(TOPIC, {"partitions": 2, **FAST}),
        topic_manifest("shop/dead", {"partitions": 1, **FAST}),
        topic_manifest("bank/secret", {"partitions": 1, **FAST}),
        subscription_manifest(
            "billing",
            {
                "topic": "orders",
                "startFrom": {"position": "earliest"},
                "maxDeliveries": 2,
                "backoff": {"initial": "1ms", "max": "1ms"},
                "deadLetter": {"topic": "dead"},
            },
        ),
    ]
    with Worker(tmp_path_factory.mktemp("report"), manifests) as part:
        yield part


def report(worker: Worker, namespace: str = "shop") -> dict[str, Any]:
    answer = worker.get(f"/v1/{namespace}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def topic_in(said: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [topic for topic in said["topics"] if topic["name"] == name]
    return dict(found)


def test_the_report(worker: Worker) -> None:
    body = json.dumps({"messages": [{"value": "x" * 100} for _ in range(50)]})
    assert worker.post(f"/v1/{TOPIC}/messages?partition=1", body).status == 200
    orders: dict[str, Any] = {}

    def has_rate() -> bool:
        orders.update(topic_in(report(worker), "orders"))
        return bool(orders["rate"] > 0)

    wait_until(has_rate, WAIT_S, "a rate", 0.02)
    assert orders["bytes_per_s"] > orders["rate"] * 100
    assert orders["ack_ms"]["p99"] >= orders["ack_ms"]["p50"] > 0
    worker.flush(TOPIC)
    said = report(worker)
    assert (said["worker"], said["ready"], said["leftovers"]) == ("worker-0", True, [])
    assert said["volume"]
    assert said["session_left_ms"] > 0
    assert 0 < said["disk"]["free"] <= said["disk"]["bytes"]
    assert {topic["name"] for topic in said["topics"]} == {"orders", "dead"}, "G9: one namespace"
    orders = topic_in(said, "orders")
    assert (orders["phase"], orders["sync"]) == ("active", "Always")
    one = orders["partitions"][1]
    assert (one["partition"], one["epoch"], one["state"], one["open"]) == (1, 1, "running", True)
    assert (one["end"], one["durable_end"], one["committed"], one["lag"]) == (50, 50, 50, 0)
    assert one["oldest_uncommitted_ms"] == 0
    assert 0 < orders["freshness_ms"] < 60_000
    assert orders["committed_at_ms"] > 0

    def has_health() -> bool:
        table = topic_in(report(worker), "orders")["table"]
        return bool(table) and table["table_rows"] == 50

    wait_until(has_health, WAIT_S, "the table's health to be reported", 0.2)
    assert report(worker, "nowhere")["topics"] == []


def test_subscriptions_are_counted(worker: Worker) -> None:
    produced = json.dumps({"messages": [{"value": "once"}, {"value": "twice"}]})
    assert worker.post("/v1/shop/orders/messages?partition=0", produced).status == 200
    path = "/v1/shop/orders/subscriptions/billing"
    pull = json.dumps({"max": 1000, "wait_ms": 2000, "consumer": "c1"})

    def pulled() -> list[dict[str, Any]]:
        answer = worker.post(f"{path}/pull", pull)
        assert answer.status == 200, answer.body
        return list(answer.json()["messages"])

    def counted() -> dict[str, Any]:
        (found,) = report(worker)["subscriptions"]
        return dict(found)

    wait_until(lambda: counted()["backlog"] >= 2, WAIT_S, "the backlog to be counted", 0.05)
    got: list[dict[str, Any]] = []

    def has_all() -> bool:
        got.extend(pulled())
        return len(got) >= 2

    wait_until(has_all, WAIT_S, "all messages", 0.05)
    said = counted()
    assert (said["namespace"], said["name"], said["topic"]) == ("shop", "billing", "orders")
    assert said["consumers"] == 1
    assert said["unacked"] == len(got)
    assert said["backlog"] >= said["unacked"]
    assert said["oldest_unacked_ms"] >= 0
    bad = [m for m in got if m["value"] == "twice"]
    good = [m["ack_id"] for m in got if m["value"] != "twice"]
    assert worker.post(f"{path}/ack", json.dumps({"ack_ids": good})).status == 200
    for _ in range(2):
        nack = json.dumps({"ack_ids": [m["ack_id"] for m in bad], "delay_ms": 0})
        assert worker.post(f"{path}/nack", nack).status == 200
        bad = [m for m in pulled() if m["value"] == "twice"]

    wait_until(lambda: counted()["dead_lettered"] == 1, WAIT_S, "one dead letter", 0.1)
    said = counted()
    assert said["redeliveries"] == 1
    assert said["backlog"] == said["oldest_unacked_ms"] == 0
    metrics = worker.get("/metrics").body.decode()
    labels = '{namespace="shop",topic="orders",subscription="billing"}'
    for line in (
        f"tidewater_subscription_backlog{labels} 0",
        f"tidewater_subscription_redeliveries_total{labels} 1",
        f"tidewater_subscription_dead_letters_total{labels} 1",
        "tidewater_sessions_opened_total 1",
        "tidewater_session_renewals_failed_total 0",
        "tidewater_partitions_owned 4",
        "tidewater_partitions_taken_total 4",
        "tidewater_ready 1",
        'tidewater_partition_epoch{namespace="shop",topic="orders",partition="1"} 1',
    ):
        assert line in metrics.splitlines(), line


def test_metrics_of_a_tables_health(worker: Worker) -> None:
    """Whoever reads the metrics makes the worker ask; no operator is needed for it."""
    assert worker.post("/v1/bank/secret/messages", '{"messages": [{"value": "x"}]}').status == 200
    assert worker.post("/v1/bank/secret/flush").status == 200
    labels = '{namespace="bank",topic="secret"}'
    expected = {f"tidewater_table_{name}{labels} 1" for name in ("files", "small_files", "rows")}
    wait_until(
        lambda: expected <= set(worker.get("/metrics").body.decode().splitlines()),
        WAIT_S,
        f"{expected} among the metrics",
        0.2,
    )
