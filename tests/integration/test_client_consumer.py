"""The blocking consumer against a real worker: what it gets, keeps, gives back and survives."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater import Client, Conflict, ConsumerOptions, Delivery, Invalid, Message, NotFound
from tidewater.consumer import Consumer
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import subscription_manifest

TOPIC = "shop/jobs"
FAST = {"ackDeadline": "800ms", "backoff": {"initial": "20ms", "max": "50ms"}}
PATIENT = {**FAST, "ackDeadline": "2500ms"}
"""For tests in which nobody may be late: a busy machine may stand still for half a second."""
NAMES = ("plain", "slow", "close", "arrow", "threads", "lone", "auto", "nacks", "few")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One worker; each test has a topic and a subscription of its own."""
    manifests = [topic_manifest(f"shop/{name}", {"partitions": 2}) for name in NAMES]
    manifests += [
        subscription_manifest(
            f"shop/{name}",
            name,
            type="Exclusive" if name == "lone" else "Shared",
            **(PATIENT if name in ("lone", "slow") else FAST),
        )
        for name in NAMES
    ]
    with Worker(tmp_path_factory.mktemp("client"), manifests) as part:
        yield part


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    with Client(f"http://{worker.address}", timeout_s=10) as found:
        yield found


def fill(client: Client, name: str, count: int, start: int = 0) -> None:
    messages = [Message(b"%d" % i, key=b"%d" % i) for i in range(start, start + count)]
    client.producer(f"shop/{name}").send_many(messages)


def consumer(client: Client, topic: str, **options: object) -> Consumer:
    return client.consumer(f"shop/{topic}", topic, ConsumerOptions(**options))  # type: ignore[arg-type]


def numbers(messages: list[Delivery]) -> list[int]:
    return sorted(int(message.value) for message in messages)


def test_messages_come_once_and_not_again_after_their_ack(client: Client) -> None:
    fill(client, "plain", 500)
    seen = []
    with consumer(client, "plain") as mine:
        for message in mine:
            assert message.attempt == 1
            assert message.key == message.value
            seen.append(message)
            message.ack()
            if len(seen) == 500:
                break
        mine.flush()
        assert mine.tally.acked == 500
    assert numbers(seen) == list(range(500))
    with consumer(client, "plain") as again:
        assert again.receive(1.5) is None, "G4: nothing acknowledged comes again"


def test_a_message_that_takes_longer_than_the_deadline_is_extended(client: Client) -> None:
    fill(client, "slow", 20)
    with consumer(client, "slow", name="a") as slow, consumer(client, "slow", name="b") as other:
        first = slow.receive_many(20, timeout_s=5)
        while len(first) < 20:
            first += slow.receive_many(20, timeout_s=5)
        # More than a deadline of work, with nothing but the consumer's own thread to extend it.
        assert other.receive(6.0) is None, "G4: what is worked on is not given to another"
        slow.ack(*first)
        slow.flush()
        assert (slow.tally.acked, slow.tally.late, slow.tally.lost) == (20, 0, 0)
        assert other.receive(1.0) is None


def test_work_past_its_limit_goes_to_another(client: Client) -> None:
    fill(client, "few", 1)
    with (
        consumer(client, "few", name="a", extend_s_max=0.1, prefetch=0) as stuck,
        consumer(client, "few", name="b") as other,
    ):
        held = stuck.receive(5)
        assert held is not None
        again = other.receive(5)
        assert again is not None
        assert (again.value, again.attempt) == (held.value, 2)
        again.ack()
        other.flush()
        held.ack()
        stuck.flush()


def test_closing_gives_back_at_once_what_was_not_done(client: Client) -> None:
    fill(client, "close", 100)
    first = consumer(client, "close", prefetch=100)
    done = [m for m in (first.receive(5), first.receive(5)) if m is not None]
    held = first.receive(5)
    assert held is not None
    first.ack(*done)
    began = time.monotonic()
    first.close()
    with consumer(client, "close") as second:
        rest: list[Delivery] = []
        while len(rest) < 98:
            message = second.receive(5)
            assert message is not None, f"G4: only {len(rest)} of 98 came back"
            rest.append(message)
        took_s = time.monotonic() - began
        second.ack(*rest)
    assert took_s < 0.8, "before any deadline"
    assert {m.attempt for m in rest} == {1}, "giving back is no failed delivery"
    assert numbers([*done, *rest]) == list(range(100))
    with pytest.raises(Invalid, match="closed"):
        held.ack()


def test_closing_waits_for_work_under_way(client: Client) -> None:
    fill(client, "threads", 40)
    mine = consumer(client, "threads", prefetch=4)
    done: list[int] = []
    lock = threading.Lock()

    def work(message: Delivery) -> None:
        time.sleep(0.02)
        with lock:
            done.append(int(message.value))
            if len(done) == 20:
                mine.stop()

    mine.run(work, threads=4)
    mine.close(drain_s=5)
    assert 20 <= len(done) <= 24
    assert mine.tally.acked == len(done), "every handler that ran to its end is acknowledged"
    with consumer(client, "threads") as other:
        while len(done) < 40:
            message = other.receive(5)
            assert message is not None
            done.append(int(message.value))
            message.ack()
    assert sorted(done) == list(range(40)), "G4: none lost, none twice"


def test_a_handler_that_fails_gives_its_message_back(client: Client) -> None:
    fill(client, "nacks", 3)
    mine = consumer(client, "nacks")
    attempts: dict[int, int] = {}

    def work(message: Delivery) -> None:
        number = int(message.value)
        attempts[number] = message.attempt
        if number == 1 and attempts[number] == 1:
            raise ValueError("once")
        if len(attempts) == 3 and attempts[1] == 2:
            mine.stop()

    mine.run(work, nack_delay_s=0.0)
    mine.close()
    assert attempts == {0: 1, 1: 2, 2: 1}


def test_arrow_comes_in_and_goes_out(client: Client) -> None:
    fill(client, "arrow", 300)
    rows = 0
    with consumer(client, "arrow", auto_ack=True) as mine:
        for batch in mine.arrow():
            assert batch.to_arrow().schema.names[:2] == ["tw_partition", "tw_offset"]
            assert "tw_ack_id" not in batch.batch.schema.names
            rows += len(batch)
            if rows == 300:
                batch.ack()
                break
        with pytest.raises(Invalid, match="MixedFormats"):
            mine.receive(0.1)
    with consumer(client, "arrow") as again:
        assert again.receive(1.2) is None


def test_an_exclusive_subscription_is_refused_or_waited_for(client: Client) -> None:
    fill(client, "lone", 2)
    with consumer(client, "lone", name="first", prefetch=1) as first:
        assert first.receive(5) is not None
        second = consumer(client, "lone", name="second")
        with pytest.raises(Conflict, match="ExclusiveTaken"):
            second.receive(5)
        second.close()
        third = consumer(client, "lone", name="third", standby=True)
        assert third.receive(0.5) is None
        wait_until(lambda: third.trouble is not None, 10, "the third to be told why", 0.05)
    assert third.receive(5) is not None, "its turn"
    third.close()


def test_auto_ack_acknowledges_when_the_loop_goes_on(client: Client) -> None:
    fill(client, "auto", 5)
    with consumer(client, "auto", auto_ack=True) as mine:
        for seen, _ in enumerate(mine, 1):
            if seen == 5:
                break  # the last one is not acknowledged
    with consumer(client, "auto") as again:
        assert len(again.receive_many(10, timeout_s=2)) == 1


def test_what_does_not_exist_is_told_at_once(client: Client) -> None:
    began = time.monotonic()
    with pytest.raises(NotFound), client.consumer("shop/plain", "nobody"):
        pass
    with pytest.raises(NotFound), client.consumer("shop/nothing", "nobody"):
        pass
    assert time.monotonic() - began < 5
    with pytest.raises(Invalid):
        client.consumer("shop/plain", "a/b").receive(0)


def test_a_worker_that_restarts_is_waited_for(tmp_path: Path) -> None:
    """Messages taken before count when they are acknowledged after; none is lost or doubled."""
    manifests = [
        topic_manifest(TOPIC, {"partitions": 2}),
        subscription_manifest("shop/all", "jobs", ackDeadline="5s"),
    ]
    with Worker(tmp_path, manifests) as part, Client(f"http://{part.address}") as client:
        client.producer(TOPIC).send_many([Message(b"%d" % i) for i in range(200)])
        options = ConsumerOptions(prefetch=20)
        acked: list[int] = []
        with client.consumer(TOPIC, "all", options) as mine:
            for _ in range(50):
                message = mine.receive(10)
                assert message is not None
                message.ack()
                acked.append(int(message.value))
            mine.flush()
            held = mine.receive(10)
            assert held is not None, "in work while the worker is away"
            assert part.stop() == 0
            part.start()
            while len(acked) < 199:
                message = mine.receive(20)
                assert message is not None, f"only {len(acked)} came: {mine.trouble}"
                message.ack()
                acked.append(int(message.value))
            assert mine.receive(0.5) is None, "what is in work does not come a second time"
            held.ack()
            acked.append(int(held.value))
            mine.flush()
            assert mine.tally.errors > 0, "it was seen to be away"
            assert (mine.tally.acked, mine.tally.late) == (200, 0)
        with client.consumer(TOPIC, "all") as again:
            assert again.receive(0.5) is None, "G4: what was acknowledged does not come again"
        assert sorted(acked) == list(range(200)), "G4: all came; none twice to this consumer"


def test_a_killed_consumer_loses_nothing(client: Client) -> None:
    """Its process is gone without a word: what it held comes to others after the deadline."""
    fill(client, "plain", 50, start=1000)
    program = (
        "import sys, time\n"
        "from tidewater import Client\n"
        "consumer = Client(sys.argv[1]).consumer('shop/plain', 'plain')\n"
        "for n in range(10):\n"
        "    consumer.receive(5).ack()\n"
        "consumer.flush()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(client.transport.origin)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.kill()
        child.wait()
    seen: set[int] = set()
    with consumer(client, "plain") as mine:

        def all_came() -> bool:
            for message in mine.receive_many(100, timeout_s=0.2):
                seen.add(int(message.value))
                message.ack()
            return len(seen) >= 40

        wait_until(all_came, 10, "what the killed one held")
        assert mine.receive(1.2) is None
    assert len(seen) == 40, "G4: the ten acknowledged ones do not come again"
