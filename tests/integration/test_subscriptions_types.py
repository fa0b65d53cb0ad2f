"""The four types while consumers come, go and die, and the worker is killed (G4)."""

import http.client
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tidewater_testing import web
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import Consumer, subscription_manifest, values

TYPES = ("Exclusive", "Failover", "Shared", "KeyShared")
FAST = {"ackDeadline": "800ms", "backoff": {"initial": "20ms", "max": "50ms"}}
SEED = 4_711


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    manifests = [topic_manifest(f"shop/{kind.lower()}", {"partitions": 2}) for kind in TYPES]
    manifests += [
        subscription_manifest(f"shop/{kind.lower()}", kind.lower(), type=kind, **FAST)
        for kind in TYPES
    ]
    with Worker(tmp_path_factory.mktemp("types"), manifests) as started:
        yield started


def produce(worker: Worker, topic: str, partition: int, *texts: str, key: str = "") -> None:
    messages = [{"value": text, "key": key} if key else {"value": text} for text in texts]
    query = "" if key else f"?partition={partition}"
    answer = worker.post(f"/v1/shop/{topic}/messages{query}", json.dumps({"messages": messages}))
    assert answer.status == 200, answer.body


def consumers(worker: Worker, topic: str, *names: str) -> list[Consumer]:
    return [Consumer(worker.address, f"shop/{topic}", topic, name) for name in names]


def _names(consumer: Consumer) -> list[str]:
    return [each["name"] for each in consumer.status()["consumers"]]


def test_exclusive(worker: Worker) -> None:
    """One at a time, in order; a silent one is replaced after the deadline and skips nothing."""
    first, second = consumers(worker, "exclusive", "c1", "c2")
    produce(worker, "exclusive", 0, *"abcdef")
    got = first.pull(3)
    assert values(got) == ["a", "b", "c"]
    first.ack(got[:1])
    assert second.call("pull", consumer="c2").status == 409
    wait_until(lambda: "c1" not in _names(first), 10, "c1 to be given up")
    (b,) = second.pull(1, wait_ms=3000)
    assert b["value"] == "b"
    second.nack([b], delay_ms=0)
    assert first.call("pull", consumer="c1").status == 409
    taken: list[str] = []
    while second.status()["lag"]:
        messages = second.pull(10, wait_ms=3000)
        assert messages, "G4: stuck after a change of consumers"
        taken += values(messages)
        second.ack(messages)
    assert taken == ["b", "c", "d", "e", "f"]


def test_nack_keeps_the_order(worker: Worker) -> None:
    """What came after a message that went back comes after it again."""
    (mine,) = consumers(worker, "exclusive", "c2")
    produce(worker, "exclusive", 1, *"12345")
    got = mine.pull(4)
    assert values(got) == ["1", "2", "3", "4"]
    mine.ack(got[:1])
    mine.nack(got[1:2])
    again = mine.pull(10, wait_ms=3000)
    assert values(again) == ["2", "3", "4", "5"]
    assert [m["delivery"] for m in again] == [2, 1, 1, 1], "only the one that failed is counted"
    mine.ack(again)


def test_failover(worker: Worker) -> None:
    """Partitions are dealt out; one moves only when its consumer has nothing of it any more."""
    first, second = consumers(worker, "failover", "c1", "c2")
    for partition in (0, 1):
        produce(worker, "failover", partition, *(f"{partition}{i}" for i in range(4)))
    held = first.pull(100)
    assert sorted(values(held)) == ["00", "01", "02", "03", "10", "11", "12", "13"]
    assert second.pull() == [], "c2 has partition 1 from now on, but c1 still holds some of it"
    produce(worker, "failover", 1, "14")
    assert second.pull() == []
    first.ack(held)
    assert values(second.pull()) == ["14"]
    produce(worker, "failover", 0, "04")
    assert second.pull() == []
    assert values(first.pull()) == ["04"]
    # c1 dies: c2 gets its partition, and what it held.
    produce(worker, "failover", 0, "05")
    got: list[str] = []
    for _ in range(40):
        messages = second.pull(10, wait_ms=300)
        got += [value for value in values(messages) if value.startswith("0")]
        second.ack(messages)
        if second.status()["lag"] == 0:
            break
    assert got == ["04", "05"]


def test_shared(worker: Worker) -> None:
    """Any consumer gets any message; those of one that died come back to the others."""
    first, second = consumers(worker, "shared", "c1", "c2")
    produce(worker, "shared", 0, *"abcd")
    held, got = first.pull(2), second.pull(2)
    assert sorted(values(held) + values(got)) == ["a", "b", "c", "d"]
    second.ack(got)
    rest: list[dict[str, Any]] = []
    while len(rest) < 2:
        more = second.pull(10, wait_ms=3000)
        assert more, "G4: messages of a dead consumer did not come back"
        rest += more
    assert sorted(values(rest)) == sorted(values(held))
    assert {m["delivery"] for m in rest} == {2}
    second.ack(rest)
    assert second.status()["lag"] == 0


def test_key_shared(worker: Worker) -> None:
    """Keys are divided; a key waits for the consumer that still holds some of it."""
    first, second = consumers(worker, "keyshared", "c1", "c2")
    keys = [f"k{i}" for i in range(12)]
    for key in keys:
        produce(worker, "keyshared", 0, f"{key}-0", key=key)
    held = first.pull(100)
    assert sorted(values(held)) == sorted(f"{key}-0" for key in keys)
    assert second.pull() == [], "all keys are still with c1"
    for key in keys:
        produce(worker, "keyshared", 0, f"{key}-1", key=key)
    assert second.pull() == []
    first.ack(held)
    mine, yours = first.pull(100), second.pull(100)
    assert mine
    assert yours
    assert sorted(values(mine) + values(yours)) == sorted(f"{key}-1" for key in keys)
    first.ack(mine)
    second.ack(yours)
    first.ok("leave", consumer="c1")
    for key in keys:
        produce(worker, "keyshared", 0, f"{key}-2", key=key)
    last = second.pull(100)
    assert sorted(values(last)) == sorted(f"{key}-2" for key in keys)
    second.ack(last)


# ---- all of it at once


@dataclass
class Story:
    """What consumers of one subscription saw, to be judged at the end."""

    kind: str
    acked: dict[tuple[int, int], float] = field(default_factory=dict)
    """(partition, offset) → when the ack was answered."""
    maybe: set[tuple[int, int]] = field(default_factory=set)
    """Acknowledged, but no answer came."""
    order: dict[Any, dict[int, tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Group → offset → when its first ack was sent, and when it was answered."""
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def group(self, message: dict[str, Any]) -> Any:
        if self.kind == "KeyShared":
            return message["key"]
        return message["partition"] if self.kind != "Shared" else None

    def delivered(self, message: dict[str, Any], asked_at: float) -> None:
        at = self.acked.get((message["partition"], message["offset"]))
        if at is not None and at < asked_at:
            self.faults.append(f"G4: {self.kind} {message} came {asked_at - at} s after its ack")

    def done(self, message: dict[str, Any], sent_at: float) -> None:
        """Note an ack. A late one, of a message that somebody else has done since, is the second.

        Threads may be slow to come here: acks are out of order only if the later message's was
        answered before the earlier one's was sent.
        """
        with self.lock:
            answered_at = time.monotonic()
            self.acked[message["partition"], message["offset"]] = answered_at
            if self.kind != "Shared":
                times = self.order[self.group(message)]
                known = times.get(message["offset"], (sent_at, answered_at))
                times[message["offset"]] = (min(sent_at, known[0]), min(answered_at, known[1]))

    def out_of_order(self) -> list[str]:
        """Return which messages were done after ones that come behind them."""
        found = []
        for group, times in self.order.items():
            soonest = float("inf")
            for offset in sorted(times, reverse=True):
                sent_at, answered_at = times[offset]
                if soonest < sent_at:
                    found.append(f"G4: {self.kind} {group}: offset {offset} is out of order")
                soonest = min(soonest, answered_at)
        return found


class Life(threading.Thread):
    """A consumer that lives, dies without a word and comes back as somebody else."""

    def __init__(self, story: Story, address: str, seed: int, steady: threading.Event) -> None:
        super().__init__(daemon=True)
        self.story, self.address, self.steady = story, address, steady
        self.draw = random.Random(seed)
        self.over = threading.Event()
        self.seed, self.lives = seed, 0

    def run(self) -> None:
        while not self.over.is_set():
            self.lives += 1
            name = f"c{self.seed}-{self.lives}"
            consumer = Consumer(self.address, "shop/all", self.story.kind.lower(), name)
            try:
                while not self.over.is_set() and self.one(consumer):
                    pass
            except (OSError, http.client.HTTPException, AssertionError):
                time.sleep(0.05)  # the worker is down, or another has the subscription

    def one(self, consumer: Consumer) -> bool:
        """Pull and work once; False: this life is over."""
        asked_at = time.monotonic()
        messages = consumer.pull(self.draw.randint(1, 20), wait_ms=200)
        for message in messages:
            self.story.delivered(message, asked_at)
        spoilt: set[Any] = set()
        for message in messages:
            group = self.story.group(message)
            if group is not None and group in spoilt:
                continue  # it comes again, after the one that failed
            chance = self.draw.random() if not self.steady.is_set() else 1.0
            if chance < 0.02:
                return False  # dies with messages in hand
            if chance < 0.04:
                consumer.ok("leave", consumer=consumer.name)
                return False
            if chance < 0.09:
                consumer.nack([message])
                spoilt.add(group)
            elif not self.ack(consumer, message):
                spoilt.add(group)
        return True

    def ack(self, consumer: Consumer, message: dict[str, Any]) -> bool:
        sent_at = time.monotonic()
        try:
            if not consumer.ack([message])["acked"]:
                return False
        except (OSError, http.client.HTTPException, AssertionError):
            # It may have been stored: then nobody gets the message again.
            self.story.maybe.add((message["partition"], message["offset"]))
            raise
        self.story.done(message, sent_at)
        return True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_churn_and_kills(tmp_path: Path) -> None:
    """Twelve consumers of four types, dying at random; the worker is killed three times."""
    manifests = [
        topic_manifest("shop/all", {"partitions": 3, "writer": {"flushInterval": "200ms"}})
    ]
    manifests += [
        subscription_manifest(f"shop/{kind.lower()}", "all", type=kind, **FAST) for kind in TYPES
    ]
    draw = random.Random(SEED)
    steady = threading.Event()
    stored: set[tuple[int, int]] = set()
    with Worker(tmp_path / "w", manifests) as worker:
        stories = [Story(kind) for kind in TYPES]
        lives = [
            Life(story, worker.address, 10 * number + i, steady)
            for number, story in enumerate(stories)
            for i in range(3)
        ]
        for life in lives:
            life.start()
        for number in range(60):
            messages = [
                {"key": f"k{draw.randint(0, 9)}", "value": f"{number}-{i}"} for i in range(8)
            ]
            stored |= _produce(worker, messages, f"batch-{number}")
            if number % 20 == 10:
                worker.kill(Victim.EDGE)
        steady.set()
        wait_until(
            lambda: all(stored <= story.acked.keys() | story.maybe for story in stories),
            60,
            "every message to be acknowledged by every subscription",
        )
        for kind in TYPES:
            last = Consumer(worker.address, "shop/all", kind.lower(), "last")
            wait_until(lambda last=last: last.status()["lag"] == 0, 20, f"{kind} to be done")  # type: ignore[misc]
        for life in lives:
            life.over.set()
        for life in lives:
            life.join(10)
        for story in stories:
            assert not story.faults, story.faults[:3]
            assert not story.out_of_order(), story.out_of_order()[:3]


def _produce(worker: Worker, messages: list[dict[str, str]], name: str) -> set[tuple[int, int]]:
    """Store a batch exactly once, whatever happens meanwhile."""
    deadline = time.monotonic() + 60
    headers = {"Content-Type": "application/json", "Tidewater-Producer": name,
               "Tidewater-Sequence": "1"}  # fmt: skip
    while True:
        try:
            answer = web.request(
                worker.address, "POST", "/v1/shop/all/messages",
                json.dumps({"messages": messages}), headers,
            )  # fmt: skip
        except (OSError, http.client.HTTPException):
            answer = None
        if answer is not None and answer.status == 200:
            return {
                (ack["partition"], ack["offset"] + i)
                for ack in answer.json()["acks"]
                for i in range(ack["count"])
            }
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
