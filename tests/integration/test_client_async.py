"""The asyncio consumer and the command, against a real worker."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater import AsyncClient, Client, ConsumerOptions, Delivery, Message
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.subscriptions import subscription_manifest

FAST = {"ackDeadline": "800ms", "backoff": {"initial": "20ms", "max": "50ms"}}
NAMES = ("tasks", "batch", "none", "print", "follow", "look")
COMMAND = str(Path(sys.executable).with_name("tidewater"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    manifests = [topic_manifest(f"shop/{name}", {"partitions": 2}) for name in NAMES]
    manifests += [subscription_manifest(f"shop/{name}", name, **FAST) for name in NAMES]
    with Worker(tmp_path_factory.mktemp("client"), manifests) as part:
        yield part


def fill(worker: Worker, name: str, count: int) -> None:
    with Client(f"http://{worker.address}") as client:
        client.producer(f"shop/{name}").send_many(Message(b"%d" % i) for i in range(count))


async def test_handlers_run_together_and_end_gracefully(worker: Worker) -> None:
    fill(worker, "tasks", 60)
    done: list[int] = []
    async with AsyncClient(f"http://{worker.address}") as client:
        consumer = client.consumer("shop/tasks", "tasks", ConsumerOptions(prefetch=10))

        async def handle(message: Delivery) -> None:
            # Longer than a deadline for some: they are extended while the loop runs.
            await asyncio.sleep(1.2 if message.value == b"3" else 0.005)
            done.append(int(message.value))
            if len(done) == 40:
                consumer.stop()

        await consumer.run(handle, concurrency=8)
        await consumer.close(drain_s=5)
        assert consumer.tally.acked == len(done)
        async with client.consumer("shop/tasks", "tasks") as other:
            async for message in other:
                done.append(int(message.value))
                message.ack()
                if len(done) == 60:
                    break
    assert sorted(done) == list(range(60)), "G4: none lost, none twice"


async def test_batches_and_what_is_left_over(worker: Worker) -> None:
    fill(worker, "batch", 30)
    async with AsyncClient(f"http://{worker.address}") as client:
        seen: list[Delivery] = []
        async with client.consumer("shop/batch", "batch") as consumer:
            async for messages in consumer.batches(10):
                seen += messages
                consumer.ack(*messages[:-1])
                consumer.nack(messages[-1], delay_s=0)
                if len({m.offset for m in seen}) >= 30 and len(seen) > 33:
                    break
            await consumer.extend(*seen[-1:], deadline_s=2)
            await consumer.flush()
            assert consumer.tally.nacked > 0
        assert {int(m.value) for m in seen} == set(range(30))


async def test_nothing_is_fetched_before_it_is_wanted(worker: Worker) -> None:
    fill(worker, "none", 5)
    async with AsyncClient(f"http://{worker.address}") as client:
        options = ConsumerOptions(prefetch=0)
        async with (
            client.consumer("shop/none", "none", options) as one,
            client.consumer("shop/none", "none", options) as two,
        ):
            first = await one.receive(5)
            found = [await two.receive(5) for _ in range(4)]
            assert first is not None
            assert len({m.value for m in [first, *found] if m is not None}) == 5
            assert await two.receive(0.3) is None


def run(worker: Worker, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [COMMAND, *arguments, "--url", f"http://{worker.address}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_prints_and_acknowledges(worker: Worker) -> None:
    fill(worker, "print", 25)
    command = ("consume", "shop/print", "--subscription", "print")
    first = run(worker, *command, "--limit", "10")
    assert first.returncode == 0, first.stderr
    assert "10 acknowledged" in first.stderr
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert all(line["delivery"] == 1 for line in lines)
    rest = run(worker, *command, "--format", "raw")
    values = [line["value"] for line in lines] + rest.stdout.split()
    assert sorted(values, key=int) == [str(i) for i in range(25)]
    assert run(worker, *command, "--from", "latest").returncode == 1
    assert run(worker, "consume", "shop/print", "--no-ack").returncode == 1
    assert run(worker, "consume", "shop/print", "-s", "nobody").returncode == 1


def test_the_command_looks_without_taking(worker: Worker) -> None:
    fill(worker, "look", 3)
    command = ("consume", "shop/look", "-s", "look", "--format", "raw", "--limit", "3")
    for _ in range(2):
        assert sorted(run(worker, *command, "--no-ack").stdout.split()) == ["0", "1", "2"]


def test_the_command_follows_and_is_interrupted(worker: Worker) -> None:
    fill(worker, "follow", 2)
    arguments = ["consume", "shop/follow", "--subscription", "follow", "--follow"]
    with subprocess.Popen(
        [COMMAND, *arguments, "--format", "raw", "--url", f"http://{worker.address}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stderr is not None
        assert {child.stdout.readline(), child.stdout.readline()} == {b"0\n", b"1\n"}
        with Client(f"http://{worker.address}") as client:
            client.producer("shop/follow").send(b"live")
        assert child.stdout.readline() == b"live\n"
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert child.wait(20) == 130
        assert time.monotonic() - began < 5
        assert b"3 messages read" in (said := child.stderr.read())
        assert b"3 acknowledged" in said
