"""Messages without a key go to partitions that are there, and no batch is stored twice for it."""

import asyncio
import itertools
import json
import uuid
import zlib
from collections.abc import Callable

import pytest

from scripted_http import RESET, Handler, Request, Server, answer
from tidewater.producer import Producer
from tidewater.producer_async import AsyncProducer
from tidewater.retry import RetryPolicy
from tidewater.transport import Transport
from tidewater.ways import Ways
from tidewater.wire import Message
from tidewater_core.clock import SystemIds
from tidewater_core.errors import OutcomeUnknown, Retryable

Serve = Callable[[Handler], Server]
FAST = RetryPolicy(attempts_max=6, wait_ms_min=1, wait_ms_max=2)
PARTITIONS = 4


class Ids(SystemIds):
    """Draws names whose partitions are 3, 3 again, 2, and so on: a bad draw is among them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1, 2)

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=next(self._numbers))


class Cluster:
    """Answers as the workers of a topic do; partitions of `away` have no owner."""

    def __init__(self, away: set[int], *, reason: str = "OwnerAway") -> None:
        self.away, self._reason = away, reason
        self.stored: dict[int, list[bytes]] = {n: [] for n in range(PARTITIONS)}
        self.asked: list[tuple[str, int]] = []
        self.lost: list[int] = []
        """Answers of these requests are lost; what they brought is stored before."""
        self._seen: dict[tuple[int, str, int], int] = {}

    def __call__(self, request: Request) -> bytes:
        if request.method == "GET":
            parts = [
                {"partition": n, "url": "" if n in self.away else f"http://127.0.0.1:{n + 1}"}
                for n in range(PARTITIONS)
            ]
            return answer(json.dumps({"partitions": parts}).encode())
        producer, sequence = self._label(request)
        number = self._partition(request, producer)
        if len(self.asked) - 1 not in self.lost and number in self.away:
            error = {"kind": "Retryable", "reason": self._reason, "message": "m"}
            return answer(json.dumps({"error": error}).encode(), 503)
        offset = self._seen.setdefault((number, producer, sequence), len(self.stored[number]))
        if offset == len(self.stored[number]):
            self.stored[number].append(request.body)
        if len(self.asked) - 1 in self.lost:
            return RESET
        ack = {"partition": number, "offset": offset, "count": 1}
        return answer(json.dumps({"acks": [ack]}).encode())

    def _label(self, request: Request) -> tuple[str, int]:
        producer = request.headers["tidewater-producer"]
        self.asked.append((producer, int(request.headers["tidewater-sequence"])))
        return self.asked[-1]

    def _partition(self, request: Request, producer: str) -> int:
        _, _, asked = request.target.partition("partition=")
        if asked:
            return int(asked)
        key = producer
        if request.headers["content-type"] == "application/json":
            key = json.loads(request.body)["messages"][0].get("key", producer)
        return zlib.crc32(key.encode()) % PARTITIONS

    @property
    def bodies(self) -> list[bytes]:
        return sorted(body for bodies in self.stored.values() for body in bodies)


def home(cluster: Cluster) -> int:
    return zlib.crc32(cluster.asked[0][0].encode()) % PARTITIONS


@pytest.mark.parametrize("reason", ["OwnerAway", "OwnerUnreachable"])
@pytest.mark.parametrize("direct", [True, False])
def test_unkeyed_batches_go_where_somebody_is(serve: Serve, reason: str, direct: bool) -> None:
    cluster = Cluster(set(), reason=reason)
    with Transport(serve(cluster).origin) as transport:
        ways = Ways(transport) if direct else None
        producer = Producer(transport, "a/b", retry=FAST, ways=ways, ids=Ids())
        producer.send(b"before")
        cluster.away = {home(cluster)}
        for number in range(3):
            assert producer.send(b"%d" % number).partition != home(cluster)
        if ways is not None:
            ways.close()
    assert cluster.bodies == [b"0", b"1", b"2", b"before"]
    assert len({label for label in cluster.asked if label[0] != cluster.asked[0][0]}) >= 3
    assert len({name for name, _ in cluster.asked}) <= 5, "it goes on under the new id"


def test_a_batch_that_may_be_stored_stays_what_it_is(serve: Serve) -> None:
    """G8: its first copy is with the owner that is away."""
    cluster = Cluster(set())
    with Transport(serve(cluster).origin) as transport:
        producer = Producer(transport, "a/b", retry=FAST, ids=Ids())
        producer.send(b"before")
        cluster.away, cluster.lost = {home(cluster)}, [1]
        with pytest.raises(OutcomeUnknown, match="OwnerAway"):
            producer.send(b"perhaps")
        assert set(cluster.asked[1:]) == {(cluster.asked[0][0], 1)}, "the same every time"
        assert producer.send(b"next").partition != home(cluster)
    assert cluster.bodies == [b"before", b"next", b"perhaps"]


@pytest.mark.parametrize("pinned", [True, False])
def test_keys_and_chosen_partitions_wait(serve: Serve, pinned: bool) -> None:
    cluster = Cluster(set(range(PARTITIONS)))
    with Transport(serve(cluster).origin) as transport:
        producer = Producer(transport, "a/b", retry=FAST, partition=1 if pinned else None)
        with pytest.raises(Retryable):
            producer.send(b"x", key=None if pinned else "k")
        with pytest.raises(Retryable):
            producer.send_many([Message(b"y", key=None if pinned else "k"), Message(b"y")])
    assert len({name for name, _ in cluster.asked}) == 1
    assert cluster.bodies == []


async def test_so_does_the_asyncio_producer(serve: Serve) -> None:
    cluster = Cluster(set())
    server = serve(cluster)
    producer = AsyncProducer(server.origin, "a/b", retry=FAST, in_flight_max=8, ids=Ids())
    await producer.send(b"before")
    cluster.away = {home(cluster)}
    await asyncio.gather(*(producer.send(b"%d" % i) for i in range(30)))
    key = next(str(i) for i in range(99) if zlib.crc32(b"%d" % i) % PARTITIONS == home(cluster))
    posted = await producer.post(b"posted")
    waits = await producer.post(b"waits", key=key)
    assert (await posted).partition != home(cluster), "a key that waits is not in its way"
    with pytest.raises(Retryable):
        await waits
    with pytest.raises(Retryable):
        await producer.close()
    sent = [b"before", *(b"%d" % i for i in range(30))]
    stored = [body for body in cluster.bodies if not body.startswith(b"{")]
    assert stored == sorted(sent), "G8: each once"
