"""The client and several workers: straight to owners, after them when they move, around them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tidewater import AsyncClient, Client, ConsumerOptions, Message
from tidewater.routing import Owners
from tidewater_testing.parts.pair import move, two_workers
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.subscriptions import subscription_manifest

TOPIC = "shop/orders"
SPEC = {"partitions": 2, "writer": {"flushInterval": "200ms"}}
KEYS = {0: b"k4", 1: b"k0"}
"""A key of each partition."""
TRIES_MAX = 100
"""Sends until a producer knows the owners; one is nearly always enough."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """Two workers of one topic; each has one of its partitions."""
    directory = tmp_path_factory.mktemp("cluster")
    manifests = [
        topic_manifest(TOPIC, SPEC),
        *(
            subscription_manifest(f"shop/{name}", "orders", ackDeadline="4s")
            for name in ("all", "follow")
        ),
    ]
    with two_workers(directory, manifests, [TOPIC]) as found:
        yield found


def requests(worker: Worker) -> int:
    count: int = worker.get(f"/v1/{TOPIC}/stats").json()["counters"].get("requests", 0)
    return count


def test_keys_go_where_the_client_thinks() -> None:
    owners = Owners(("http://a", "http://b"))
    assert {number: owners.partition_of(key) for number, key in KEYS.items()} == {0: 0, 1: 1}


def test_producers_go_to_owners_and_follow_them(workers: dict[str, Worker]) -> None:
    with Client(f"http://{workers['a'].address}") as client:
        producer = client.producer(TOPIC)
        before = {name: requests(worker) for name, worker in workers.items()}
        for _ in range(5):
            assert producer.send(b"x", key=KEYS[0]).partition == 0
            assert producer.send(b"x", key=KEYS[1]).partition == 1
        after = {name: requests(worker) for name, worker in workers.items()}
        assert {n: after[n] - before[n] for n in after} == {"a": 5, "b": 5}, "each asked its owner"
        move(workers["a"], TOPIC, 1, "a")
        assert producer.send(b"moved", key=KEYS[1]).partition == 1, "b passes it on, or refuses"
        move(workers["a"], TOPIC, 1, "b")
        assert producer.send(b"back", key=KEYS[1]).partition == 1
        mixed = [Message(b"m", key=KEYS[0]), Message(b"m", key=KEYS[1])]
        assert {ack.partition for ack in producer.send_many(mixed).acks} == {0, 1}


async def test_the_asyncio_producer_does_so_too(workers: dict[str, Worker]) -> None:
    async with (
        AsyncClient(f"http://{workers['b'].address}") as client,
        client.producer(TOPIC) as producer,
    ):
        for number, key in KEYS.items():
            assert (await producer.send(b"first", key=key)).partition == number
        # It asks for the owners beside its first sends, which go on meanwhile by way of b.
        for _ in range(TRIES_MAX):
            passed_on = requests(workers["b"])
            await producer.send(b"straight?", key=KEYS[0])
            if requests(workers["b"]) == passed_on:
                break
        before = {name: requests(worker) for name, worker in workers.items()}
        for number, key in KEYS.items():
            for _ in range(5):
                assert (await producer.send(b"y", key=key)).partition == number
        after = {name: requests(worker) for name, worker in workers.items()}
        assert {n: after[n] - before[n] for n in after} == {"a": 5, "b": 5}


def test_owners_that_cannot_be_reached_are_gone_around(
    workers: dict[str, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from outside the cluster: addresses that mean nothing here."""

    def unreachable(metadata: dict[str, Any]) -> Owners:
        return Owners(("http://127.0.0.1:1", "http://tidewater-0.nowhere.invalid:8080"))

    monkeypatch.setattr(Owners, "of", unreachable)
    with Client(f"http://{workers['a'].address}") as client:
        producer = client.producer(TOPIC)
        for number, key in KEYS.items():
            assert producer.send(b"z", key=key).partition == number
        values: list[bytes] = []
        with client.consumer(TOPIC, "all") as consumer:
            while b"z" not in values or values.count(b"z") < 2:
                message = consumer.receive(10)
                assert message is not None, (values, consumer.trouble)
                values.append(message.value)
                message.ack()


def test_a_consumer_follows_a_partition_that_moves(workers: dict[str, Worker]) -> None:
    with Client(f"http://{workers['b'].address}") as client:
        producer = client.producer(TOPIC)
        with client.consumer(TOPIC, "follow", ConsumerOptions(prefetch=50)) as consumer:
            taken: set[tuple[int, int]] = set()

            def take(expected: set[bytes]) -> None:
                left = set(expected)  # what other tests have sent comes, too, and late perhaps
                while left:
                    message = consumer.receive(15)
                    assert message is not None, (len(left), len(taken), consumer.trouble)
                    place = (message.partition, message.offset)
                    assert place not in taken, f"G4: {place} twice"
                    taken.add(place)
                    left.discard(message.value)
                    message.ack()

            producer.send(b"end-0", key=KEYS[0])
            producer.send(b"end-1", key=KEYS[1])
            take({b"end-0", b"end-1"})
            consumer.flush()
            for step, to in enumerate(("a", "b"), 1):
                batch = [b"%d-%d" % (step, i) for i in range(60)]
                producer.send_many([Message(v, key=KEYS[i % 2]) for i, v in enumerate(batch)])
                move(workers["a"], TOPIC, 1, to)
                take(set(batch))
            consumer.flush()
            assert consumer.receive(1.0) is None
            assert consumer.tally.late == 0
