"""Subscriptions over several workers, and while the registry changes under them (G4)."""

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tidewater_coordination import connect
from tidewater_coordination.port import Coordination
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_testing.evidence import load_table
from tidewater_testing.parts.pair import move, two_workers
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import Consumer, subscription_manifest, values

TOPIC = "shop/orders"
SPEC = {"partitions": 2, "writer": {"flushInterval": "200ms"}}
FAST = {"ackDeadline": "1500ms", "backoff": {"initial": "20ms", "max": "50ms"}}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """Two workers of one topic; each has one of its partitions."""
    directory = tmp_path_factory.mktemp("cluster")
    manifests = [
        topic_manifest(TOPIC, SPEC),
        subscription_manifest("shop/all", "orders", **FAST),
        subscription_manifest("shop/one", "orders", type="Exclusive", **FAST),
        subscription_manifest("shop/reset", "orders", **FAST),
        topic_manifest(
            "shop/sql", {"partitions": 2, "writer": {"flushInterval": "10m"}, "freshness": "20m"}
        ),
        subscription_manifest("shop/sql", "sql", isolation="committed"),
        topic_manifest("shop/quick", {"partitions": 2}),
        subscription_manifest("shop/quick", "quick", ackDeadline="5m"),
        topic_manifest("shop/poison", {"partitions": 2}),
        topic_manifest("shop/graves", {"partitions": 2}),
        subscription_manifest(
            "shop/poison", "poison", **FAST, maxDeliveries=1, deadLetter={"topic": "graves"}
        ),
    ]
    topics = [TOPIC, "shop/quick", "shop/poison", "shop/graves", "shop/sql"]
    with two_workers(directory, manifests, topics) as found:
        yield found


def _produce(worker: Worker, number: int, *texts: str, topic: str = TOPIC) -> None:
    body = json.dumps({"messages": [{"value": text} for text in texts]})

    said = b""

    def done() -> bool:
        nonlocal said
        answer = worker.post(f"/v1/{topic}/messages?partition={number}", body)
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
    move(workers["a"], TOPIC, 1, "a")
    # Delivered by b, acknowledged at a.
    wait_until(lambda: a.ack(late) == {"acked": 1, "refused": []}, 10, "the moved ack", 0.05)
    _produce(workers["b"], 1, "b2")
    assert values(_drain(b, 1)) == ["b2"], "b asks a"
    assert a.ok("seek", offset=0) == {"offsets": {"0": 0, "1": 0}}
    assert len(_drain(b, 5)) == 5
    move(workers["a"], TOPIC, 1, "b")


def test_a_waiting_pull_hears_of_other_owners_at_once(workers: dict[str, Worker]) -> None:
    """It waits at all owners; what wakes it up may be anywhere."""
    mine = Consumer(workers["a"].address, "shop/quick", "quick", "c")
    with ThreadPoolExecutor(1) as pool:
        quickest = {0: 60.0, 1: 60.0}
        for number in (1, 0, 1, 0, 1):
            waiting = pool.submit(mine.pull, 10, 20_000)
            wait_until(lambda: any(_waits(workers[w], "quick") for w in "ab"), 5, "the pull", 0.02)
            time.sleep(0.1)
            begun = time.monotonic()
            _produce(workers["b"], number, "now", topic="shop/quick")
            got = waiting.result(timeout=15)
            assert [m["partition"] for m in got] == [number]
            quickest[number] = min(quickest[number], time.monotonic() - begun)
            mine.ack(got)
    assert max(quickest.values()) < 1.5, "no polling: less than one round of it"


def _waits(worker: Worker, name: str) -> bool:
    status = worker.get(f"/v1/shop/{name}/subscriptions/{name}").json()
    return bool(status["consumers"])


def test_nothing_is_lost_with_who_asked_elsewhere(workers: dict[str, Worker]) -> None:
    """A client that hung up takes no message along, also not one of another worker."""
    stays = Consumer(workers["a"].address, "shop/quick", "quick", "stays")
    for round_ in range(8):
        connection = http.client.HTTPConnection(workers["a"].address, timeout=10)
        body = json.dumps({"max": 10, "wait_ms": 20_000, "consumer": f"gone-{round_}"})
        connection.request("POST", "/v1/shop/quick/subscriptions/quick/pull", body)
        time.sleep(0.1)
        connection.close()
        _produce(workers["b"], 1, f"r{round_}", topic="shop/quick")
        (got,) = _drain(stays, 1)
        assert (got["value"], got["delivery"]) == (f"r{round_}", 1), "not after five minutes"
        stays.ack([got])


def test_dead_letters_are_replayed_over_workers(workers: dict[str, Worker]) -> None:
    """Dead letters and their originals lie on different workers; each is replayed once."""
    for number in (0, 1):
        _produce(workers["a"], number, f"p{number}-0", f"p{number}-1", topic="shop/poison")
    mine = Consumer(workers["b"].address, "shop/poison", "poison", "c")
    mine.nack(_drain(mine, 4))
    wait_until(lambda: (mine.pull(), mine.status()["lag"] == 0)[1], 20, "the funeral", 0.1)
    replayed = mine.ok("replay", max=3)["replayed"] + mine.ok("replay")["replayed"]
    assert replayed == 4
    got = _drain(mine, 4)
    assert sorted(values(got)) == ["p0-0", "p0-1", "p1-0", "p1-1"]
    assert {m["delivery"] for m in got} == {1}
    mine.ack(got)
    assert mine.ok("replay") == {"replayed": 0, "expired": 0}
    assert mine.status()["lag"] == 0


def test_committed_and_named_instants_over_workers(workers: dict[str, Worker]) -> None:
    """`isolation: committed` follows the one table, whoever commits; tags mean all partitions."""
    for number in (0, 1):
        _produce(workers["a"], number, f"s{number}-0", f"s{number}-1", topic="shop/sql")
    mine = Consumer(workers["b"].address, "shop/sql", "sql", "c")
    assert mine.pull(wait_ms=300) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_drain, mine, 4)
        flushed = workers["a"].flush("shop/sql")
        got = waiting.result(timeout=30)
    assert sorted(values(got)) == ["s0-0", "s0-1", "s1-0", "s1-1"]
    assert flushed["frontier"] == {"0": 2, "1": 2}
    mine.ack(got)
    table = load_table(workers["a"].catalog_properties, "shop/sql")
    instant = table.current_snapshot()
    assert instant is not None
    table.manage_snapshots().create_tag(instant.snapshot_id, "month-close").commit()
    for number in (0, 1):
        _produce(workers["b"], number, f"s{number}-2", topic="shop/sql")
    workers["b"].flush("shop/sql")
    late = _drain(mine, 2)
    mine.ack(late)
    for start in ({"tag": "month-close"}, {"snapshotId": instant.snapshot_id}):
        assert mine.ok("seek", **start) == {"offsets": {"0": 2, "1": 2}}
        again = _drain(mine, 2)
        assert sorted(values(again)) == ["s0-2", "s1-2"]
        mine.ack(again)


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
        registry: Coordination = connect(worker.settings.coordination)
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
