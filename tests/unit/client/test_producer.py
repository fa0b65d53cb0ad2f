import asyncio
import json
import threading
import uuid
from collections.abc import Callable

import pytest

from scripted_http import HANG_UP, RESET, Handler, Request, Server, answer
from tidewater import producer_async
from tidewater.batching import Batches, BatchOptions
from tidewater.origin import parse_url
from tidewater.producer import Producer
from tidewater.producer_async import AsyncProducer
from tidewater.retry import NO_RETRY, RetryPolicy
from tidewater.transport import Transport
from tidewater.wire import Ack, Message
from tidewater_core.errors import (
    Conflict,
    Invalid,
    OutcomeUnknown,
    Overloaded,
    Retryable,
    TidewaterError,
)

Serve = Callable[[Handler], Server]
FAST = RetryPolicy(attempts_max=5, wait_ms_min=1, wait_ms_max=2)


class Ids:
    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=7)

    def snapshot_id(self) -> int:
        return 1

    def jitter(self) -> float:
        return 0.0


class Topic:
    """A server that stores batches as the worker does: once per producer and sequence."""

    def __init__(self, faults: dict[int, bytes] | None = None, *, after: bool = True) -> None:
        self.bodies: list[bytes] = []
        self._seen: dict[tuple[str, str], int] = {}
        self._faults = faults or {}
        self._after = after
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self, request: Request) -> bytes:
        with self._lock:
            fault = self._faults.get(self._count)
            self._count += 1
            if fault is not None and not self._after:
                return fault
            name = (
                request.headers.get("tidewater-producer", ""),
                request.headers.get("tidewater-sequence", ""),
            )
            duplicate = name in self._seen and name[0] != ""
            if not duplicate:
                self._seen[name] = len(self.bodies)
                self.bodies.append(request.body)
            if fault is not None:
                return fault
            ack = {"partition": 0, "offset": self._seen[name], "count": 1, "duplicate": duplicate}
            return answer(json.dumps({"acks": [ack]}).encode())


def unavailable(status: int, reason: str) -> bytes:
    return answer(json.dumps({"error": {"reason": reason, "message": "m"}}).encode(), status)


def test_a_single_message_travels_as_bare_bytes(serve: Serve) -> None:
    server = serve(Topic())
    with Transport(server.origin) as transport:
        producer = Producer(transport, "a/b", ids=Ids())
        assert [producer.send(b"x"), producer.send("y")] == [Ack(0, 0, 1), Ack(0, 1, 1)]
    first, second = server.requests
    assert (first.method, first.target, first.body) == ("POST", "/v1/a/b/messages", b"x")
    assert first.headers["content-type"] == "application/octet-stream"
    assert first.headers["tidewater-producer"] == str(uuid.UUID(int=7))
    assert [r.headers["tidewater-sequence"] for r in (first, second)] == ["0", "1"]


def test_keys_headers_batches_and_options(serve: Serve) -> None:
    server = serve(Topic())
    with Transport(server.origin) as transport:
        producer = Producer(transport, "a/b", ack="table", partition=2, idempotent=False)
        producer.send(b"x", key="k", headers={"h": "1"})
        producer.send_many([Message(b"1"), Message(b"2")])
    first, second = server.requests
    assert first.target == "/v1/a/b/messages?ack=table&partition=2"
    message = {"value": "x", "key": "k", "headers": {"h": "1"}}
    assert json.loads(first.body) == {"messages": [message]}
    assert json.loads(second.body) == {"messages": [{"value": "1"}, {"value": "2"}]}
    assert "tidewater-producer" not in first.headers
    assert "tidewater-sequence" not in first.headers


@pytest.mark.parametrize("fault", [HANG_UP, RESET, unavailable(503, "R"), unavailable(429, "O")])
@pytest.mark.parametrize("after", [True, False])
def test_a_batch_is_stored_once_however_often_it_is_sent(
    serve: Serve, fault: bytes, after: bool
) -> None:
    topic = Topic({1: fault, 2: fault, 5: fault}, after=after)
    server = serve(topic)
    with Transport(server.origin) as transport:
        producer = Producer(transport, "a/b", retry=FAST)
        acks = [producer.send(b"%d" % i) for i in range(5)]
    assert topic.bodies == [b"0", b"1", b"2", b"3", b"4"], "G8: stored once, in order"
    assert [ack.offset for ack in acks] == [0, 1, 2, 3, 4]
    assert acks[1].duplicate is after


def test_without_idempotence_only_what_was_not_processed_is_sent_again(serve: Serve) -> None:
    topic = Topic({0: unavailable(503, "Busy"), 2: HANG_UP}, after=False)
    server = serve(topic)
    with Transport(server.origin) as transport:
        producer = Producer(transport, "a/b", idempotent=False, retry=FAST)
        producer.send(b"0")
        with pytest.raises(OutcomeUnknown):
            producer.send(b"1")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("reply", "kind"), [(unavailable(400, "Bad"), Invalid), (unavailable(409, "C"), Conflict)]
)
def test_what_a_person_must_change_is_not_sent_again(
    serve: Serve, reply: bytes, kind: type[TidewaterError]
) -> None:
    server = serve(lambda _: reply)
    with Transport(server.origin) as transport, pytest.raises(kind):
        Producer(transport, "a/b", retry=FAST).send(b"x")
    assert len(server.requests) == 1


REFUSALS = [
    unavailable(401, "TokenExpired"), unavailable(404, "Http404"), unavailable(409, "C"),
    unavailable(413, "TooLarge"), unavailable(500, "Corrupt"),
]  # fmt: skip
"""What a proxy, or a token that has run out, may say of a batch that was stored unheard."""


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_does_not_speak_for_an_attempt_without_an_answer(
    serve: Serve, refusal: bytes
) -> None:
    """G8: whoever takes it for not stored sends it again, as another one."""
    said = json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["reason"]
    topic = Topic({0: HANG_UP, 1: refusal})
    with (
        Transport(serve(topic).origin) as transport,
        pytest.raises(OutcomeUnknown, match=f"{said}: m; an attempt before got no answer"),
    ):
        Producer(transport, "a/b", retry=FAST).send(b"x")
    assert topic.bodies == [b"x"]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_nor_with_asyncio_where_no_batch_is_divided_for_it(
    serve: Serve, refusal: bytes
) -> None:
    topic = Topic({0: HANG_UP, 1: refusal})
    server = serve(topic)
    producer = AsyncProducer(server.origin, "a/b", retry=FAST)
    producer._batches = Batches(producer, BatchOptions(linger_s=0.05))
    producer._batches._has_asked = True
    sent = [await producer.post(b"%d" % i) for i in range(4)]
    with pytest.raises(OutcomeUnknown, match="an attempt before got no answer"):
        await producer.flush()
    assert {type(each.exception()) for each in sent} == {OutcomeUnknown}
    stored = [json.loads(body)["messages"] for body in topic.bodies]
    assert len(stored) == 1, "G8: halves of a batch that may be stored are stored again"
    await producer.close()


def test_retries_end(serve: Serve) -> None:
    server = serve(lambda _: unavailable(429, "Full"))
    with Transport(server.origin) as transport:
        with pytest.raises(Overloaded):
            Producer(transport, "a/b", retry=FAST).send(b"x")
        assert len(server.requests) == FAST.attempts_max
        with pytest.raises(Overloaded):
            Producer(transport, "a/b", retry=NO_RETRY).send(b"x")
    assert len(server.requests) == FAST.attempts_max + 1


def test_threads_that_share_a_producer_do_not_mix(serve: Serve) -> None:
    topic = Topic({3: HANG_UP, 11: RESET, 20: unavailable(503, "R")})
    server = serve(topic)
    with Transport(server.origin) as transport:
        producer = Producer(transport, "a/b", retry=FAST)

        def send(name: int) -> None:
            for i in range(10):
                producer.send(b"%d:%d" % (name, i))

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for name in range(4):
        mine = [b for b in topic.bodies if b.startswith(b"%d:" % name)]
        assert mine == [b"%d:%d" % (name, i) for i in range(10)]


async def test_async_batches_in_flight_are_stored_once(serve: Serve) -> None:
    topic = Topic({5: HANG_UP, 20: RESET, 31: unavailable(503, "R"), 40: unavailable(429, "O")})
    server = serve(topic)
    producer = AsyncProducer(server.origin, "a/b", retry=FAST, in_flight_max=16)
    acks = await asyncio.gather(*(producer.send(b"%d" % i) for i in range(100)))
    await producer.close()
    assert sorted(topic.bodies, key=int) == [b"%d" % i for i in range(100)], "G8: stored once"
    assert [topic.bodies[ack.offset] for ack in acks] == [b"%d" % i for i in range(100)]


async def test_async_order_is_the_order_of_sends(serve: Serve) -> None:
    topic = Topic()
    server = serve(topic)
    producer = AsyncProducer(server.origin, "a/b")
    await asyncio.gather(*(producer.send(b"%d" % i) for i in range(300)))
    await producer.close()
    assert topic.bodies == [b"%d" % i for i in range(300)]
    assert server.connections == 1


async def test_async_new_batches_wait_for_one_that_is_sent_again(serve: Serve) -> None:
    """A server knows the last 256 numbers of a producer: a retry must stay among them."""
    refused = 3
    seen: list[int] = []

    def handler(request: Request) -> bytes:
        nonlocal refused
        sequence = int(request.headers["tidewater-sequence"])
        seen.append(sequence)
        if sequence == 10 and refused:
            refused -= 1
            return unavailable(503, "Busy")
        return answer(b'{"acks":[{"partition":0,"offset":%d,"count":1}]}' % sequence)

    server = serve(handler)
    producer = AsyncProducer(server.origin, "a/b", retry=FAST, in_flight_max=8)
    await asyncio.gather(*(producer.send(b"x") for _ in range(200)))
    await producer.close()
    assert max(seen[: len(seen) - seen[::-1].index(10)]) < 10 + 2 * 8


async def test_async_errors_reach_their_sender(serve: Serve) -> None:
    def handler(request: Request) -> bytes:
        if request.body == b"bad":
            return unavailable(400, "Bad")
        return answer(b'{"acks":[{"partition":0,"offset":0,"count":1}]}')

    server = serve(handler)
    producer = AsyncProducer(server.origin, "a/b", retry=FAST)
    sends = [producer.send(b) for b in (b"good", b"bad", b"good")]
    results = await asyncio.gather(*sends, return_exceptions=True)
    await producer.close()
    assert isinstance(results[1], Invalid)
    assert [results[0], results[2]] == [Ack(0, 0, 1)] * 2


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_async_whoever_waits_for_a_connection_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """Whatever it fails by: nobody else would answer."""
    begun = asyncio.Event()

    async def connect(*_: object) -> None:
        begun.set()
        if is_interrupted:
            await asyncio.Event().wait()
        raise ValueError("a fault")

    monkeypatch.setattr(producer_async, "connect", connect)
    producer = AsyncProducer(parse_url("http://127.0.0.1:1"), "a/b", retry=NO_RETRY)
    async with asyncio.timeout(5):
        sending = asyncio.create_task(producer.send(b"x"))
        await begun.wait()
        if is_interrupted:
            closing = asyncio.create_task(producer.close())
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(Retryable, match="NotSent"):
            await sending


def test_waits_grow_stay_bounded_and_heed_the_server() -> None:
    policy = RetryPolicy(attempts_max=20, wait_ms_min=10, wait_ms_max=100)
    error = Retryable("R", "m")
    waits = [policy.wait_s(error, n, 0.0, repeatable=True) for n in (1, 2, 3, 10, 19)]
    assert waits == [0.005, 0.01, 0.02, 0.05, 0.05]
    assert policy.wait_s(error, 20, 0.0, repeatable=True) is None
    assert policy.wait_s(Overloaded("O", "m", 700), 1, 0.5, repeatable=False) == 0.7
    assert policy.wait_s(OutcomeUnknown("U", "m"), 1, 0.5, repeatable=False) is None
    assert policy.wait_s(Invalid("I", "m"), 1, 0.5, repeatable=True) is None
