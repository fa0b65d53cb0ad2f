"""A consumer and a server that fails in every way: what is asked again, and what is told."""

import json
import threading
import time
from collections.abc import Callable

import pytest

from scripted_http import HANG_UP, RESET, Handler, Request, Server, answer
from tidewater import (
    Client,
    Conflict,
    ConsumerOptions,
    Invalid,
    NotFound,
    OutcomeUnknown,
    TidewaterError,
    Unauthenticated,
)
from tidewater.consumer import Consumer

Serve = Callable[[Handler], Server]
PATH = "/v1/a/b/subscriptions/s"


def error(status: int, reason: str, retry_after_ms: int | None = None, kind: str = "") -> bytes:
    parts = {"reason": reason, "message": "m", "kind": kind}
    if retry_after_ms is not None:
        parts["retry_after_ms"] = retry_after_ms  # type: ignore[assignment]
    return answer(json.dumps({"error": parts}).encode(), status)


class Subscription:
    """Delivers `count` messages once; faults stand in for answers, by call."""

    def __init__(self, count: int, faults: dict[tuple[str, int], bytes] | None = None) -> None:
        self.count = count
        self.acked: list[str] = []
        self.extended: list[str] = []
        self.left = 0
        self.dialled = 0
        self.limits: list[int] = []
        self.times: list[float] = []
        self._faults = faults or {}
        self._calls: dict[str, int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> bytes:
        with self._lock:
            if request.target == "/v1/a/b/socket":
                self.dialled += 1
                return answer(b"no", 426)
            verb = request.target.removeprefix(PATH).strip("/") or "status"
            if request.target == "/v1/a/b":
                verb = "topic"
            number = self._calls[verb] = self._calls.get(verb, -1) + 1
            if verb == "pull":
                self.times.append(time.monotonic())
            fault = self._faults.get((verb, number))
            if fault is not None and verb != "ack":
                return fault
            body = json.loads(request.body) if request.body else {}
            reply = getattr(self, f"_{verb}")(body)
            # An ack whose answer is lost has had its effect.
            return fault if fault is not None else answer(json.dumps(reply).encode())

    def _topic(self, body: object) -> object:
        return {"partitions": [{"partition": 0, "url": ""}]}

    def _status(self, body: object) -> object:
        return {"ack_deadline_ms": 400}

    def _pull(self, body: dict[str, int]) -> object:
        self.limits.append(body["max"])
        stop = min(self._next + body["max"], self.count)
        messages = [
            {"partition": 0, "offset": i, "value": str(i), "ack_id": f"i{i}", "delivery": 1}
            for i in range(self._next, stop)
        ]
        self._next = stop
        if not messages:
            time.sleep(0.02)
        return {"messages": messages}

    def _ack(self, body: dict[str, list[str]]) -> object:
        self.acked += body["ack_ids"]
        return {"acked": len(body["ack_ids"]), "refused": []}

    def _extend(self, body: dict[str, list[str]]) -> object:
        self.extended += body["ack_ids"]
        return {"extended": len(body["ack_ids"]), "refused": []}

    def _leave(self, body: object) -> object:
        self.left += 1
        return {}


def consumer(server: Server, **options: object) -> Consumer:
    chosen = ConsumerOptions(**{"timeout_s": 2.0, "socket": False, **options})  # type: ignore[arg-type]
    return Client(server.url).consumer("a/b", "s", chosen)


@pytest.mark.parametrize("fault", [HANG_UP, RESET, error(503, "Moving"), error(429, "Full")])
def test_pulls_and_acks_go_on_past_faults(serve: Serve, fault: bytes) -> None:
    faults = {("pull", 0): fault, ("pull", 2): fault, ("ack", 0): fault, ("status", 0): fault}
    topic = Subscription(50, faults)
    with consumer(serve(topic), prefetch=10) as mine:
        for number in range(50):
            message = mine.receive(5)
            assert message is not None
            assert message.value == b"%d" % number
            message.ack()
        mine.flush()
        assert mine.tally.acked == 50
        assert mine.tally.errors >= 2
    assert set(topic.acked) == {f"i{i}" for i in range(50)}
    assert topic.left == 1, "it said goodbye"
    assert max(topic.limits) <= 10, "no more than there is room for"


def test_the_server_says_how_long_to_wait(serve: Serve) -> None:
    topic = Subscription(1, {("pull", 0): error(503, "Opening", 300)})
    with consumer(serve(topic)) as mine:
        assert mine.receive(5) is not None
    assert topic.times[1] - topic.times[0] >= 0.3


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (error(410, "OffsetExpired"), Invalid),
        (error(409, "ExclusiveTaken"), Conflict),
        (error(403, "Forbidden"), Invalid),
        (error(500, "Broken", kind="Corrupt"), TidewaterError),
    ],
)
def test_what_does_not_pass_is_raised(
    serve: Serve, reply: bytes, kind: type[TidewaterError]
) -> None:
    topic = Subscription(1, {("pull", n): reply for n in range(99)})
    mine = consumer(serve(topic))
    with pytest.raises(kind):
        mine.receive(5)
    mine.close()
    assert len(topic.times) == 1


UNREADABLE = {"partition": 0, "offset": 0, "value_b64": "x", "ack_id": "i0", "delivery": 1}


def test_a_fault_of_ours_is_told_to_who_waits_for_a_message(serve: Serve) -> None:
    bad = answer(json.dumps({"messages": [UNREADABLE]}).encode())
    fault = pytest.raises(OutcomeUnknown, match="a fault of the client")
    with consumer(serve(Subscription(1, {("pull", 0): bad}))) as mine, fault:
        mine.receive(5)


def test_a_fault_of_ours_is_told_to_who_waits_for_acks(serve: Serve) -> None:
    bad = answer(b'{"acked":1,"refused":[7]}')
    with consumer(serve(Subscription(1, {("ack", 0): bad}))) as mine:
        message = mine.receive(5)
        assert message is not None
        message.ack()
        with pytest.raises(OutcomeUnknown, match="a fault of the client"):
            mine.flush()


def test_a_subscription_that_is_missing_for_a_moment_is_waited_for(serve: Serve) -> None:
    missing = error(404, "UnknownSubscription")
    topic = Subscription(1, {("pull", 0): missing, ("pull", 1): missing})
    with consumer(serve(topic)) as mine:
        assert mine.receive(10) is not None
    with pytest.raises(NotFound):
        consumer(serve(Subscription(1, {("status", 0): missing}))).receive(5)


def test_what_waits_and_what_is_worked_on_is_extended(serve: Serve) -> None:
    topic = Subscription(3)
    with consumer(serve(topic)) as mine:
        first = mine.receive(5)
        assert first is not None
        time.sleep(0.5)
        assert set(topic.extended) == {"i0", "i1", "i2"}
        first.ack()
        mine.flush()
        topic.extended.clear()
        time.sleep(0.4)
        assert set(topic.extended) == {"i1", "i2"}, "what is done is not"


def test_acks_share_requests(serve: Serve) -> None:
    topic = Subscription(200)
    server = serve(topic)
    with consumer(server, ack_wait_s=0.05, prefetch=200) as mine:
        for _ in range(200):
            message = mine.receive(5)
            assert message is not None
            message.ack()
        mine.flush()
    assert sum(r.target.endswith("/ack") for r in server.requests) <= 10


def test_a_token_that_ends_is_replaced_once(serve: Serve) -> None:
    ended = error(401, "TokenEnded", kind="Unauthenticated")
    with consumer(serve(Subscription(20, {("pull", 1): ended})), prefetch=10) as mine:
        seen = [mine.receive(5) for _ in range(20)]
        assert all(seen)
    mine = consumer(serve(Subscription(20, {("pull", 0): ended})))
    with pytest.raises(Unauthenticated):
        mine.receive(5)
    mine.close()


def test_without_a_socket_it_polls(serve: Serve) -> None:
    """A proxy on the way may not pass sockets on."""
    topic = Subscription(20)
    with consumer(serve(topic), socket=True) as mine:
        assert [int(m.value) for m in mine.receive_many(20, 5)] == list(range(20))
    assert topic.dialled == 1, "tried once"


def test_options_that_cannot_work() -> None:
    for options in ({"prefetch": -1}, {"prefetch_bytes": 0}, {"ack_wait_s": -1.0}):
        with pytest.raises(Invalid, match="BadOptions"):
            ConsumerOptions(**options)
