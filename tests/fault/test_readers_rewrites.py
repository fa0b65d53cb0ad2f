"""Readers from every offset while everything under them changes (G3).

Somebody else rewrites the table's files in another order and mixes partitions, expires snapshots
and deletes what they alone used; segments go as soon as the table has them; edge and table process
are killed. Whatever a reader gets is the next messages from where it asked, and nothing else.
A subscription with a filter goes over the same history again and again (G4): it gets every message
that it wants, in order, and no other.
"""

import contextlib
import http.client
import json
import random
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import Table

from table_faults import compact
from tidewater_testing import web
from tidewater_testing.evidence import load_table
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import Consumer, subscription_manifest

TOPIC = "shop/all"
PARTITIONS = 2
SPEC = {
    "partitions": PARTITIONS,
    "log": {"segmentSize": "64Ki", "tailCache": "64Ki", "retention": {"time": "0s", "size": "0"}},
    "writer": {"flushInterval": "200ms"},
}
SECONDS = 8.0
SLOW_S = 60.0
"""So much longer on a machine that is too busy to have rewritten anything by then."""
SEED = 4
BATCH = 20
VALUE_BYTES = 1_000
"""A few requests fill a segment: what the log has let go of comes from the table alone."""
PAGE = 200
FILTERS = {
    "keyed": {"keyPrefix": "hot-"},
    "headed": {"headers": {"kind": "hot"}},
}
"""Subscriptions that want one message in ten."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Story:
    """What is in each partition, as far as the producers were told."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.over = threading.Event()
        self.values: list[dict[int, str]] = [{} for _ in range(PARTITIONS)]
        self.faults: list[str] = []
        self.pages = 0
        self.rewrites = 0
        self.expired = 0
        self.deleted = 0
        self.refused: set[str] = set()
        self.delivered = 0
        self.replays = 0

    def wanted(self, partition: int) -> set[int]:
        """Return the offsets that the filters let through, as far as the producers were told."""
        values = self.values[partition].copy()  # in one step: producers go on
        return {offset for offset, value in values.items() if is_hot(value)}

    def check(self, partition: int, asked: int, messages: list[dict[str, object]]) -> None:
        """See that a page is the next messages from where it was asked for."""
        self.pages += 1
        for i, message in enumerate(messages):
            offset, value = message["offset"], message["value"]
            known = self.values[partition].get(asked + i, value)
            if (offset, value) != (asked + i, known):
                self.faults.append(
                    f"G3 One stream: partition {partition}, from {asked}: offset {offset} is "
                    f"{str(value)[:20]!r} where {asked + i}, {str(known)[:20]!r} is expected"
                )
                return


def is_hot(value: str) -> bool:
    """Say if a message is one that the filters want."""
    return int(value.split("/")[1]) % 10 == 3


def message_of(value: str) -> dict[str, object]:
    """Return a message whose key and header say whether it is wanted."""
    if is_hot(value):
        return {"value": value, "key": f"hot-{value.split('/')[1]}", "headers": {"kind": "hot"}}
    return {"value": value, "key": "cold", "headers": {"kind": "cold"}}


def produce(story: Story, partition: int) -> None:
    """Store numbered messages, each request until it is taken."""
    sequence = number = 0
    while not story.over.is_set():
        values = [f"{partition}/{number + i}/{'x' * VALUE_BYTES}" for i in range(BATCH)]
        number += BATCH
        sequence += 1
        headers = {"Tidewater-Producer": f"p{partition}", "Tidewater-Sequence": str(sequence),
                   "Content-Type": "application/json"}  # fmt: skip
        body = json.dumps({"messages": [message_of(value) for value in values]})
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                path = f"/v1/{TOPIC}/messages?partition={partition}"
                answer = web.request(story.worker.address, "POST", path, body, headers)
                if answer.status == 200:
                    (ack,) = answer.json()["acks"]
                    story.values[partition].update(
                        {ack["offset"] + i: value for i, value in enumerate(values)}
                    )
                    break
                assert answer.status in (429, 503), answer.body
            time.sleep(0.05)
        time.sleep(0.15)


def read(story: Story, number: int) -> None:
    """Read pages from drawn offsets, some of them on and on."""
    draw = random.Random(f"{SEED}/{number}")
    while not story.over.is_set():
        partition = draw.randrange(PARTITIONS)
        at = draw.randrange(max(len(story.values[partition]), 1))
        for _ in range(draw.choice([1, 1, 5])):
            page = read_page(story, partition, at, draw.choice([1, 7, PAGE]))
            if not page:
                break
            at += len(page)


def read_page(story: Story, partition: int, at: int, limit: int) -> list[dict[str, object]]:
    """Read once; what is refused for now is no answer."""
    path = f"/v1/{TOPIC}/messages?partition={partition}&offset={at}&limit={limit}"
    try:
        answer = web.request(story.worker.address, "GET", path, timeout_s=30)
    except (OSError, http.client.HTTPException):
        time.sleep(0.1)
        return []
    if answer.status != 200:
        story.refused.add(answer.reason)
        # 400: the edge is back and has yet to recover the end that a producer was told of.
        assert answer.status in (400, 503), answer.body
        time.sleep(0.05)
        return []
    messages: list[dict[str, object]] = answer.json()["messages"]
    story.check(partition, at, messages)
    return messages


class Follower:
    """The consumer of a filtered subscription, and what it has got since it last began anew."""

    def __init__(self, story: Story, name: str) -> None:
        self.story = story
        self.consumer = Consumer(story.worker.address, TOPIC, name)
        self.got: list[set[int]] = [set() for _ in range(PARTITIONS)]

    def run(self) -> None:
        """Take what comes, and begin at the earliest again from time to time."""
        draw = random.Random(f"{SEED}/{self.consumer.subscription}")
        while not self.story.over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                if draw.random() < 0.05:
                    self.begin_anew()
                self.take(draw.choice([3, 50]))

    def begin_anew(self) -> bool:
        """Go back to the first message; tell whether the worker did."""
        is_done = self.consumer.call("seek", position="earliest").status == 200
        if is_done:
            self.got = [set() for _ in range(PARTITIONS)]
            self.story.replays += 1
        return is_done

    def take(self, limit: int) -> int:
        """Pull, check and acknowledge some messages."""
        answer = self.consumer.call("pull", max=limit, wait_ms=200, consumer="c1")
        if answer.status != 200:
            self.story.refused.add(answer.reason)
            assert answer.status == 503, answer.body
            time.sleep(0.05)
            return 0
        messages = answer.json()["messages"]
        for message in messages:
            self.check(message["partition"], message["offset"], message["value"])
        if messages:
            self.consumer.call("ack", ack_ids=[m["ack_id"] for m in messages], consumer="c1")
        return len(messages)

    def check(self, partition: int, offset: int, value: str) -> None:
        """See that a message is wanted, and that nothing before it was left out."""
        self.story.delivered += 1
        before = {known for known in self.story.wanted(partition) if known < offset}
        left_out = before - self.got[partition]
        known = self.story.values[partition].get(offset, value)
        if not is_hot(value) or known != value or left_out:
            self.story.faults.append(
                f"G4 At least once: {self.consumer.subscription}, partition {partition}: offset "
                f"{offset} is {value[:20]!r}, known as {known[:20]!r}; not delivered before it: "
                f"{sorted(left_out)[:5]}"
            )
        self.got[partition].add(offset)

    def drain(self) -> None:
        """Go over everything once more, and see that it is all there."""
        wait_until(self.begin_anew, 30, "seek")
        wanted = [self.story.wanted(partition) for partition in range(PARTITIONS)]

        def is_done() -> bool:
            self.take(500)
            return self.got == wanted and self.consumer.status()["lag"] == 0

        wait_until(is_done, 60, "G4: all that is wanted is delivered, and the rest passed over")


def meddle(story: Story) -> None:
    """Rewrite all files, expire snapshots and delete what is no longer used, a round later."""
    properties = story.worker.catalog_properties
    doomed: set[str] = set()
    while not story.over.is_set():
        # The committer may be faster: then nothing has changed, and the next round tries again.
        with contextlib.suppress(CommitFailedException, ValidationException):
            table = load_table(properties, TOPIC)
            before = _files(table)
            compact(table)
            story.rewrites += 1
            table = load_table(properties, TOPIC)
            now = _files(table)
            for path in doomed - now:
                with contextlib.suppress(FileNotFoundError):
                    table.io.delete(path)
                    story.deleted += 1
            doomed = before - now
        with contextlib.suppress(CommitFailedException, ValidationException):
            table = load_table(properties, TOPIC)
            table.maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
            story.expired += 1
        story.over.wait(0.3)


def _files(table: Table) -> set[str]:
    return {task.file.file_path for task in table.scan().plan_files()}


def test_readers_from_every_offset(tmp_path: Path) -> None:
    subscriptions = [
        subscription_manifest(f"shop/{name}", "all", type="Exclusive", filter=wanted)
        for name, wanted in FILTERS.items()
    ]
    with Worker(tmp_path / "w", [topic_manifest(TOPIC, SPEC), *subscriptions]) as worker:
        story = Story(worker)
        followers = [Follower(story, name) for name in FILTERS]
        threads = [threading.Thread(target=produce, args=(story, i)) for i in range(PARTITIONS)]
        threads += [threading.Thread(target=read, args=(story, i)) for i in range(3)]
        threads += [threading.Thread(target=follower.run) for follower in followers]
        threads.append(threading.Thread(target=meddle, args=(story,)))
        for thread in threads:
            thread.start()
        wait_until(lambda: in_table_alone(worker) > 0, SLOW_S, "a log that has let messages go")
        draw = random.Random(SEED)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or (not story.deleted and time.monotonic() < end + SLOW_S):
            time.sleep(draw.uniform(1.0, 3.0))
            worker.kill(draw.choice([Victim.EDGE, Victim.TABLE]))
        worker.wait_ready()
        story.over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not story.faults, story.faults[:5]
        assert story.rewrites >= 2, story.rewrites
        assert story.expired, "snapshots were expired"
        assert story.deleted, "files that a reader may have planned were deleted"
        worker.flush(TOPIC)
        compact(load_table(worker.catalog_properties, TOPIC))
        worker.kill(Victim.EDGE, Victim.TABLE)
        worker.wait_ready()
        wait_until(lambda: all(read_page(story, i, 0, 1) for i in range(PARTITIONS)), 30, "history")
        every_offset(story)
        for follower in followers:
            follower.drain()
        assert not story.faults, story.faults[:5]
        assert story.replays > len(followers), "history was filtered while it changed"
        assert passed_over(worker) > 0, "rows were filtered by the table process"


def in_table_alone(worker: Worker) -> int:
    """Return how many messages every partition's log has let go."""
    topic = web.request(worker.address, "GET", f"/v1/{TOPIC}").json()
    return min(int(partition["log_start"]) for partition in topic["partitions"])


def passed_over(worker: Worker) -> int:
    """Return how many rows of history the table process did not send to the edge."""
    stats = web.request(worker.address, "GET", f"/v1/{TOPIC}/stats").json()
    return int(stats["table"]["filters"]["rows_passed"])


def every_offset(story: Story) -> None:
    """Read a little from each offset there is, on one connection."""
    connection = http.client.HTTPConnection(story.worker.address, timeout=30)
    for partition, values in enumerate(story.values):
        assert sorted(values) == list(range(len(values))), "G1: offsets are contiguous"
        for at in range(len(values)):
            path = f"/v1/{TOPIC}/messages?partition={partition}&offset={at}&limit=3"
            connection.request("GET", path)
            answer = connection.getresponse()
            page = json.loads(answer.read())
            assert answer.status == 200, page
            story.check(partition, at, page["messages"])
            assert len(page["messages"]) == min(3, len(values) - at), f"G3: from {at}"
    connection.close()
