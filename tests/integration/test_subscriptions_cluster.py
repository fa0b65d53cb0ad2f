"""Subscriptions over several workers, and while the registry changes under them (G4)."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import Consumer, subscription_manifest, values
from tidewater_worker.coordination import connect
from tidewater_worker.coordination.port import Coordination

TOPIC = "shop/orders"
SPEC = {"partitions": 2, "writer": {"flushInterval": "200ms"}}
FAST = {"ackDeadline": "1500ms", "backoff": {"initial": "20ms", "max": "50ms"}}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """Two workers of one topic; each has one of its partitions."""
    directory = tmp_path_factory.mktemp("cluster")
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }
    manifests = [
        topic_manifest(TOPIC, SPEC),
        subscription_manifest("shop/all", "orders", **FAST),
        subscription_manifest("shop/one", "orders", type="Exclusive", **FAST),
        subscription_manifest("shop/reset", "orders", **FAST),
    ]
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(
                Worker(
                    directory / name,
                    manifests if name == "a" else [],
                    catalog=catalog,
                    coordination=str(directory / "coordination.db"),
                    worker_id=name,
                )
            )
            for name in ("a", "b")
        }
        _move(found["a"], 1, "b")
        yield found


def _move(worker: Worker, number: int, to: str) -> None:
    path = f"/v1/{TOPIC}/partitions/{number}/move"
    assert worker.post(path, json.dumps({"to": to})).status == 202

    def there() -> bool:
        part = worker.get(f"/v1/{TOPIC}").json()["partitions"][number]
        return bool(part["owner"] == to and part["state"] == "running")

    wait_until(there, 60, f"partition {number} on {to}", 0.1)


def _produce(worker: Worker, number: int, *texts: str) -> None:
    body = json.dumps({"messages": [{"value": text} for text in texts]})

    said = b""

    def done() -> bool:
        nonlocal said
        answer = worker.post(f"/v1/{TOPIC}/messages?partition={number}", body)
        assert answer.status in (200, 503), answer.body
        said = answer.body
        return answer.status == 200

    try:
        wait_until(done, 30, "messages to be taken", 0.1)
    except TimeoutError:
        raise AssertionError(said) from None


def _drain(consumer: Consumer, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count:
        messages = consumer.pull(10, wait_ms=10_000)
        assert messages, f"G4: {len(found)} of {count} came"
        found += messages
    return found


def test_any_worker_serves_all_partitions(workers: dict[str, Worker]) -> None:
    """Pull and ack through either; a partition that moves takes its progress along."""
    a, b = (Consumer(workers[name].address, TOPIC, "all", name) for name in "ab")
    _produce(workers["a"], 0, "a0", "a1")
    _produce(workers["a"], 1, "b0", "b1")
    got = _drain(a, 4)
    assert sorted(values(got)) == ["a0", "a1", "b0", "b1"]
    assert {m["partition"] for m in got} == {0, 1}
    kept = [m for m in got if m["value"] != "b1"]
    assert b.ack(kept) == {"acked": 3, "refused": []}, "b sends the acks of partition 0 to a"
    status = a.status()
    assert [part["partition"] for part in status["partitions"]] == [0, 1]
    assert (status["lag"], status["unacked"]) == (1, 1)
    assert b.status()["lag"] == 1
    late = [m for m in got if m["value"] == "b1"]
    _move(workers["a"], 1, "a")
    # Delivered by b, acknowledged at a.
    wait_until(lambda: a.ack(late) == {"acked": 1, "refused": []}, 10, "the moved ack", 0.05)
    _produce(workers["b"], 1, "b2")
    assert values(_drain(b, 1)) == ["b2"], "b asks a"
    assert a.ok("seek", offset=0) == {"offsets": {"0": 0, "1": 0}}
    assert len(_drain(b, 5)) == 5
    _move(workers["a"], 1, "b")


def test_exclusive_over_workers(workers: dict[str, Worker]) -> None:
    """One consumer has it, whichever worker the other one asks."""
    first = Consumer(workers["a"].address, TOPIC, "one", "first")
    second = Consumer(workers["b"].address, TOPIC, "one", "second")
    got = _drain(first, 2)
    refused = second.call("pull", consumer="second")
    assert (refused.status, refused.reason) == (409, "ExclusiveTaken")
    first.ack(got)
    first.ok("leave", consumer="first")
    wait_until(lambda: second.call("pull", consumer="second").status == 200, 20, "second's turn")


def _change(worker: Worker, name: str, spec: SubscriptionSpec | None) -> None:
    async def change() -> None:
        registry: Coordination = connect(worker.settings)
        await registry.start()
        try:
            if spec is None:
                await registry.unregister_subscription(name)
            else:
                await registry.register_subscription(name, spec.to_json(), "new-uuid")
        finally:
            await registry.close()

    asyncio.run(change())


def test_declarative_reset_and_deletion(workers: dict[str, Worker]) -> None:
    """A new resetToken moves it once; without one nothing moves; deleted it is gone."""
    mine = Consumer(workers["a"].address, TOPIC, "reset", "c")
    count = mine.status()["lag"]
    assert count > 0
    mine.ack(_drain(mine, count))
    assert mine.status()["lag"] == 0

    def spec(**more: Any) -> SubscriptionSpec:
        return SubscriptionSpec.model_validate({"topic": "orders", **FAST, **more})

    _change(workers["a"], "shop/reset", spec(maxUnacked=500))
    _change(workers["a"], "shop/reset", spec(resetToken="again", maxUnacked=500))
    wait_until(lambda: mine.status()["lag"] == count, 20, "the reset", 0.1)
    mine.ack(_drain(mine, count))
    _change(workers["a"], "shop/reset", spec(resetToken="again", maxUnacked=400))
    wait_until(lambda: mine.status()["lag"] == 0, 5, "no other reset")
    _change(workers["a"], "shop/reset", None)
    wait_until(lambda: mine.call("pull").status == 404, 20, "the deletion", 0.1)
    _change(workers["a"], "shop/reset", spec(startFrom={"position": "latest"}))
    wait_until(lambda: mine.call("pull").status == 200, 20, "a new one of that name", 0.1)
    wait_until(lambda: mine.status()["lag"] == 0, 5, "it begins at the end")
