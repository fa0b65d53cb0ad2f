"""Each call of a subscription on a real worker: what it does, and what it refuses (G4)."""

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from tidewater_testing.evidence import load_table
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import Consumer, subscription_manifest, values

FAST = {"ackDeadline": "700ms", "backoff": {"initial": "50ms", "max": "100ms"}}
TYPED = {
    "partitions": 1,
    "schema": {
        "fields": [{"name": "region", "type": "string"}, {"name": "amount", "type": "long"}]
    },
}
ONE = {"partitions": 1}
TOPICS: dict[str, dict[str, Any]] = {
    "acks": ONE, "backs": ONE, "polls": ONE, "seeks": {"partitions": 2}, "filters": ONE,
    "typed": TYPED, "deads": {"partitions": 2}, "graves": ONE, "orphans": ONE, "slow": ONE,
    "errors": ONE, "big": ONE, "crashes": ONE,
    "gone": ONE,
    "long": {
        "partitions": 1,
        "log": {
            "segmentSize": "64Ki",
            "tailCache": "64Ki",
            "retention": {"time": "0s", "size": "0"},
        },
        "writer": {"flushInterval": "100ms"},
    },
    "sql": {"partitions": 1, "writer": {"flushInterval": "1m"}, "freshness": "2m"},
}  # fmt: skip
SUBSCRIPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "acks": ("acks", {}),
    "acks-too": ("acks", {}),
    "backs": ("backs", FAST),
    "polls": ("polls", {}),
    "seeks": ("seeks", {}),
    "keyed": ("filters", {"filter": {"key": "a"}}),
    "prefixed": ("filters", {"filter": {"keyPrefix": "ab", "headers": {"kind": "x"}}}),
    "typed": ("typed", {"filter": {"where": "region = 'eu' AND (amount > 100 OR amount IS NULL)"}}),
    "bad-where": ("typed", {"filter": {"where": "colour = 'red'"}}),
    "deads": ("deads", {**FAST, "maxDeliveries": 2, "deadLetter": {"topic": "graves"}}),
    "crashes": ("crashes", {**FAST, "maxDeliveries": 3, "deadLetter": {"topic": "graves"}}),
    "orphans": ("orphans", {**FAST, "maxDeliveries": 1, "deadLetter": {"topic": "nowhere"}}),
    "slow": ("slow", {"maxUnacked": 3}),
    "errors": ("errors", {"type": "Exclusive"}),
    "big": ("big", {}),
    "gone": ("gone", {}),
    "long": ("long", {"type": "Exclusive", "backoff": {"initial": "0s"}}),
    "sql": ("sql", {"isolation": "committed"}),
    "late": ("acks", {"startFrom": {"position": "latest"}}),
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    manifests = [topic_manifest(f"shop/{name}", spec) for name, spec in TOPICS.items()]
    manifests += [
        subscription_manifest(f"shop/{name}", topic, **spec)
        for name, (topic, spec) in SUBSCRIPTIONS.items()
    ]
    with Worker(tmp_path_factory.mktemp("subscriptions"), manifests) as started:
        yield started


def produce(worker: Worker, topic: str, messages: list[dict[str, Any]], query: str = "") -> Any:
    body = json.dumps({"messages": messages})
    answer = worker.post(f"/v1/shop/{topic}/messages{query}", body)
    assert answer.status == 200, answer.body
    return answer.json()


def fill(worker: Worker, topic: str, *texts: str) -> None:
    produce(worker, topic, [{"value": text} for text in texts])


def consumer(worker: Worker, name: str, who: str = "c1") -> Consumer:
    return Consumer(worker.address, f"shop/{SUBSCRIPTIONS[name][0]}", name, who)


def test_pull_and_ack(worker: Worker) -> None:
    """What is acknowledged is gone; what is not stays with its consumer; others see everything."""
    fill(worker, "acks", "a", "b", "c")
    mine = consumer(worker, "acks")
    got = mine.pull(2)
    assert values(got) == ["a", "b"]
    assert [(m["offset"], m["delivery"]) for m in got] == [(0, 1), (1, 1)]
    assert mine.ack(got[1:]) == {"acked": 1, "refused": []}
    status = mine.status()
    assert (status["lag"], status["unacked"]) == (2, 1)
    assert status["partitions"][0]["next_offset"] == 0
    assert mine.ack(got) == {"acked": 2, "refused": []}, "an ack may be sent twice"
    assert mine.status()["partitions"][0]["next_offset"] == 2
    assert values(mine.pull()) == ["c"]
    assert values(consumer(worker, "acks-too").pull()) == ["a", "b", "c"]
    listed = worker.get("/v1/shop/acks/subscriptions").json()["subscriptions"]
    assert [each["name"] for each in listed] == ["acks", "acks-too", "late"]


def test_messages_come_back(worker: Worker) -> None:
    """After a nack with its delay, and after the deadline, counted; extend puts that off."""
    fill(worker, "backs", "x", "y")
    mine, other = consumer(worker, "backs"), consumer(worker, "backs", "c2")
    x, y = mine.pull()
    begun = time.monotonic()
    mine.nack([x], delay_ms=400)
    (again,) = other.pull(wait_ms=5000)
    assert time.monotonic() - begun >= 0.39
    assert (again["value"], again["delivery"]) == ("x", 2)
    assert mine.ack([x]) == {
        "acked": 0,
        "refused": [
            {"ack_id": x["ack_id"], "reason": "Stale",
             "message": "this delivery is over: the message was given to another consumer, "
                        "given back, or the subscription was moved"}
        ],
    }  # fmt: skip
    assert mine.ok("extend", ack_ids=[y["ack_id"]], deadline_ms=3000)["extended"] == 1
    (again,) = other.pull(wait_ms=2000)
    assert (again["value"], again["delivery"]) == ("x", 3), "y was extended, x ran out"
    stale = mine.ok("ack", ack_ids=[x["ack_id"], y["ack_id"], again["ack_id"]])
    assert stale["acked"] == 2, "one stale id does not fail the others"
    assert [each["ack_id"] for each in stale["refused"]] == [x["ack_id"]]
    assert other.pull(wait_ms=300) == []


def test_leaving_gives_back_at_once(worker: Worker) -> None:
    """A consumer that says goodbye does not make others wait for the deadline."""
    fill(worker, "big", "one")
    first, second = consumer(worker, "big"), consumer(worker, "big", "c2")
    assert values(first.pull()) == ["one"]
    assert second.pull() == []
    assert {c["name"] for c in first.status()["consumers"]} == {"c1", "c2"}
    first.ok("leave", consumer="c1")
    (again,) = second.pull()
    assert (again["value"], again["delivery"]) == ("one", 1)
    assert [c["name"] for c in first.status()["consumers"]] == ["c2"]
    second.ack([again])
    large = "x" * 3_000_000
    for _ in range(14):
        fill(worker, "big", large)
    got = second.pull(14)
    assert 8 <= len(got) < 14, "an answer has about 32 MiB"
    second.ack(got)
    rest = second.pull(14)
    assert len(got) + len(rest) == 14
    second.ack(rest)


def test_a_long_poll_wakes_up(worker: Worker) -> None:
    """A pull with `wait_ms` returns as soon as there is something, and empty when there is not."""
    mine = consumer(worker, "polls")
    begun = time.monotonic()
    assert mine.pull(wait_ms=200) == []
    assert 0.19 < time.monotonic() - begun < 3
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(consumer(worker, "polls", name).pull, 1, 20_000) for name in "ab"]
        time.sleep(0.3)
        fill(worker, "polls", "1")
        fill(worker, "polls", "2")
        got = [future.result(timeout=10) for future in both]
    assert sorted(values(got[0]) + values(got[1])) == ["1", "2"]


def test_unacked_is_bounded(worker: Worker) -> None:
    """A consumer at `maxUnacked` gets no more; another does (a slow one blocks nobody)."""
    fill(worker, "slow", *"abcdef")
    slow, other = consumer(worker, "slow"), consumer(worker, "slow", "c2")
    held = slow.pull()
    assert values(held) == ["a", "b", "c"]
    assert slow.pull() == []
    rest = other.pull()
    assert values(rest) == ["d", "e", "f"]
    other.ack(rest)
    slow.ack(held[:1])
    fill(worker, "slow", "g")
    assert values(slow.pull()) == ["g"]


def test_a_client_that_hung_up_gets_nothing(worker: Worker) -> None:
    """A long poll whose client is gone does not take messages that nobody would hear."""
    mine, other = consumer(worker, "gone"), consumer(worker, "gone", "c2")
    connection = http.client.HTTPConnection(worker.address, timeout=20)
    body = json.dumps({"wait_ms": 20_000, "consumer": "c1"})
    connection.request("POST", f"{mine.path}/pull", body)
    wait_until(lambda: bool(mine.status()["consumers"]), 10, "the long poll to be there")
    connection.close()
    time.sleep(0.2)
    fill(worker, "gone", "x")
    (got,) = other.pull(wait_ms=3000)
    assert (got["value"], got["delivery"]) == ("x", 1)


def test_over_table_log_and_memory(worker: Worker) -> None:
    """G3: one order from the table's first row to the newest message, and again on a nack."""
    count = 60
    for i in range(count):
        fill(worker, "long", *(f"{i * 20 + j}".ljust(500, ".") for j in range(20)))
    worker.flush("shop/long")

    def log_start() -> int:
        (part,) = worker.get("/v1/shop/long").json()["partitions"]
        return int(part["log_start"])

    wait_until(lambda: log_start() > 0, 30, "the first segments to be deleted", 0.2)
    fill(worker, "long", *(f"{count * 20 + j}".ljust(500, ".") for j in range(20)))
    mine = consumer(worker, "long")
    seen = 0
    nacked = False
    while seen < (count + 1) * 20:
        messages = mine.pull(300, wait_ms=5000)
        assert messages, f"G4: nothing after {seen}"
        assert [m["offset"] for m in messages] == list(range(seen, seen + len(messages)))
        assert all(m["value"].startswith(f"{m['offset']}.") for m in messages)
        if not nacked and len(messages) > 10:
            mine.ack(messages[:5])
            mine.nack(messages[5:6])
            nacked, seen = True, seen + 5
            continue
        mine.ack(messages)
        seen += len(messages)
    assert mine.status()["lag"] == 0


def test_seek(worker: Worker) -> None:
    """Every kind of place; what was delivered before cannot be acknowledged after."""
    mine = consumer(worker, "seeks")
    for partition in (0, 1):
        produce(worker, "seeks", [{"value": f"{partition}-{i}"} for i in range(3)],
                f"?partition={partition}")  # fmt: skip
    before = mine.pull()
    assert len(before) == 6
    assert mine.ok("seek", offset=1) == {"offsets": {"0": 1, "1": 1}}
    assert mine.ack(before)["acked"] == 0
    assert sorted(values(mine.pull())) == ["0-1", "0-2", "1-1", "1-2"]
    assert mine.ok("seek", position="latest") == {"offsets": {"0": 3, "1": 3}}
    assert mine.pull() == []
    assert mine.ok("seek", offset=99) == {"offsets": {"0": 3, "1": 3}}, "never past the end"
    assert mine.ok("seek", timestamp="2001-01-01T00:00:00Z") == {"offsets": {"0": 0, "1": 0}}
    assert mine.ok("seek", timestamp="2999-01-01T00:00:00Z") == {"offsets": {"0": 3, "1": 3}}
    flushed = worker.flush("shop/seeks")
    table = load_table(worker.catalog_properties, "shop/seeks")
    table.manage_snapshots().create_tag(flushed["snapshot_id"], "month-close").commit()
    produce(worker, "seeks", [{"value": "0-3"}], "?partition=0")
    assert mine.ok("seek", snapshotId=flushed["snapshot_id"])["offsets"] == {"0": 3, "1": 3}
    assert values(mine.pull()) == ["0-3"]
    assert mine.ok("seek", tag="month-close")["offsets"] == {"0": 3, "1": 3}
    read = worker.get("/v1/shop/seeks/messages?partition=0&tag=month-close").json()
    assert [message["value"] for message in read["messages"]] == ["0-3"]
    assert worker.get("/v1/shop/seeks/messages?tag=month-close&offset=1").status == 400
    assert mine.call("seek", tag="no-such").reason == "UnknownTag"
    assert mine.call("seek", snapshotId=1).reason == "UnknownSnapshot"
    assert mine.call("seek", offset=1, tag="a").reason == "InvalidStartFrom"


def test_latest_is_when_the_subscription_came(worker: Worker) -> None:
    """Not when somebody pulls for the first time."""
    status = consumer(worker, "late").status()
    begun = status["partitions"][0]["next_offset"]
    fill(worker, "acks", "new")
    got = consumer(worker, "late").pull()
    assert values(got)[-1] == "new"
    assert got[0]["offset"] == begun


def test_filters(worker: Worker) -> None:
    """On key, key prefix and headers; what is filtered out counts as acknowledged."""
    produce(
        worker,
        "filters",
        [
            {"key": "a", "value": "1"},
            {"key": "abc", "value": "2", "headers": {"kind": "x"}},
            {"key": "abd", "value": "3", "headers": {"kind": "y"}},
            {"value": "4", "headers": {"kind": "x"}},
            {"key": "a", "value": "5"},
        ],
    )
    keyed = consumer(worker, "keyed")
    got = keyed.pull()
    assert values(got) == ["1", "5"]
    keyed.ack(got)
    assert keyed.status()["partitions"][0]["next_offset"] == 5
    assert values(consumer(worker, "prefixed").pull()) == ["2"]
    rows = [("eu", 200), ("us", 200), ("eu", 50), ("eu", None)]
    produce(worker, "typed", [{"value": {"region": r, "amount": a}} for r, a in rows])
    got = consumer(worker, "typed").pull()
    assert [m["value"]["amount"] for m in got] == [200, None]
    answer = consumer(worker, "bad-where").call("pull")
    assert (answer.status, answer.reason) == (400, "InvalidFilter")
    assert "there is no column 'colour'" in answer.body.decode()


def test_committed_waits_for_the_table(worker: Worker) -> None:
    """`isolation: committed` delivers what SQL sees, and not before."""
    mine = consumer(worker, "sql")
    fill(worker, "sql", "row")
    assert mine.pull(wait_ms=300) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.pull, 10, 20_000)
        worker.flush("shop/sql")
        assert values(waiting.result(timeout=15)) == ["row"]


def test_dead_letters_and_their_way_back(worker: Worker) -> None:
    """Delivered too often: into the other topic with its story; replayed on demand."""
    produce(worker, "deads", [{"key": "k", "value": "poison", "headers": {"h": "1"}}])
    mine = consumer(worker, "deads")
    (poison,) = mine.pull(wait_ms=5000)
    mine.nack([poison])
    (again,) = mine.pull(wait_ms=5000)
    assert again["delivery"] == 2
    mine.nack([again])

    def letters() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = worker.get("/v1/shop/graves/messages").json()["messages"]
        return found

    wait_until(lambda: bool(letters()), 10, "a dead letter")
    (letter,) = letters()
    assert (letter["key"], letter["value"]) == ("k", "poison")
    assert letter["headers"] == {
        "h": "1",
        "tidewater-origin-topic": "shop/deads",
        "tidewater-origin-partition": str(poison["partition"]),
        "tidewater-origin-offset": "0",
        "tidewater-subscription": "shop/deads",
        "tidewater-reason": "Nacked",
        "tidewater-attempts": "2",
    }
    wait_until(lambda: mine.status()["lag"] == 0, 5, "the dead one to count as acknowledged")
    assert mine.pull(wait_ms=300) == []
    assert mine.ok("replay") == {"replayed": 1, "expired": 0}
    (again,) = mine.pull(wait_ms=2000)
    assert (again["value"], again["delivery"]) == ("poison", 1)
    mine.ack([again])
    assert mine.ok("replay") == {"replayed": 0, "expired": 0}, "each dead letter once"
    assert mine.status()["lag"] == 0


def test_no_dead_letter_topic_loses_nothing(worker: Worker) -> None:
    """G7: what cannot be put away is delivered again, and the status says why."""
    fill(worker, "orphans", "kept")
    mine = consumer(worker, "orphans")
    (first,) = mine.pull()
    mine.nack([first])
    (again,) = mine.pull(wait_ms=5000)
    assert (again["value"], again["delivery"]) == ("kept", 2)
    mine.ack([again])


@pytest.mark.parametrize(
    ("accept", "begins"),
    [("application/x-ndjson", b"{"), ("text/event-stream", b": tidewater"), ("*/*", b": ")],
)
def test_streams(worker: Worker, accept: str, begins: bytes) -> None:
    """A stream delivers what is there and what comes, and its ids can be acknowledged."""
    mine = consumer(worker, "polls", f"stream {accept}")
    fill(worker, "polls", "s1")
    connection = http.client.HTTPConnection(worker.address, timeout=20)
    connection.request(
        "GET", f"{mine.path}/stream?consumer=s{len(accept)}", headers={"Accept": accept}
    )
    answer = connection.getresponse()
    assert answer.status == 200
    lines: list[bytes] = []

    def read_until(text: bytes) -> dict[str, Any]:
        while True:
            line = answer.readline()
            lines.append(line)
            if text in line:
                found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                return found

    first = read_until(b'"s1"')
    fill(worker, "polls", "s2")
    second = read_until(b'"s2"')
    assert lines[0].startswith(begins)
    assert mine.ack([first, second])["acked"] == 2
    connection.close()


def test_arrow_stream(worker: Worker) -> None:
    """The same as record batches, with the ids in a column."""
    mine = consumer(worker, "acks-too", "arrow")
    mine.ok("seek", position="earliest")
    connection = http.client.HTTPConnection(worker.address, timeout=20)
    accept = {"Accept": "application/vnd.apache.arrow.stream"}
    connection.request("GET", f"{mine.path}/stream", headers=accept)
    answer = connection.getresponse()
    batch = pa.ipc.open_stream(answer).read_next_batch()
    rows = batch.to_pylist()
    assert rows[0]["value"] == b"a"
    assert rows[0]["tw_delivery"] == 1
    assert mine.ok("ack", ack_ids=[row["tw_ack_id"] for row in rows])["acked"] == len(rows)
    connection.close()

    def streams() -> list[str]:
        names = [each["name"] for each in mine.status()["consumers"]]
        return [name for name in names if name.startswith("stream-")]

    wait_until(lambda: not streams(), 10, "an unnamed stream to be gone")


def test_refusals(worker: Worker) -> None:
    """Each mistake has its own answer."""
    mine = consumer(worker, "errors")
    assert mine.pull() == []
    taken = consumer(worker, "errors", "c2").call("pull", consumer="c2")
    assert (taken.status, taken.reason) == (409, "ExclusiveTaken")
    stream = worker.get(f"{mine.path}/stream?consumer=c2")
    assert (stream.status, stream.reason) == (409, "ExclusiveTaken")
    mine.ok("leave", consumer="c1")
    assert consumer(worker, "errors", "c2").pull() == []
    missing = worker.post("/v1/shop/errors/subscriptions/nope/pull", "{}")
    assert (missing.status, missing.reason) == (404, "UnknownSubscription")
    elsewhere = worker.post("/v1/shop/acks/subscriptions/errors/pull", "{}")
    assert (elsewhere.status, elsewhere.reason) == (404, "UnknownSubscription")
    no_topic = worker.post("/v1/shop/nope/subscriptions/errors/pull", "{}")
    assert (no_topic.status, no_topic.reason) == (404, "UnknownTopic")
    for ids in (["x"], ["1.0.1.1"], ["1.0.1.ffffff.1"]):
        bad = mine.call("ack", ack_ids=ids)
        assert (bad.status, bad.reason) == (400, "InvalidAckId"), ids
    for body in ({"max": 0}, {"max": "x"}, {"wait_ms": -1}, {"maximum": 1}):
        bad = mine.call("pull", **body)
        assert (bad.status, bad.reason) == (400, "InvalidBody"), body
    assert mine.call("pull", consumer="c" * 999).reason == "InvalidConsumer"
    assert mine.call("pull", consumer="").reason == "ExclusiveTaken"  # it is none given
    assert mine.call("replay").reason == "NoDeadLetters"
    assert worker.post(f"{mine.path}/pull", "{").reason == "InvalidBody"


def test_maxdeliveries_holds_over_kills(worker: Worker) -> None:
    """A message that fails with every owner is dead after so many deliveries in all."""
    fill(worker, "crashes", "poison")
    mine = consumer(worker, "crashes")
    for attempt in range(1, 4):
        (poison,) = mine.pull(wait_ms=10_000)
        assert poison["delivery"] == attempt, "failed deliveries are counted over kill -9"
        assert mine.nack([poison]) == {"nacked": 1, "refused": []}
        worker.kill(Victim.EDGE)
        worker.wait_ready()
    assert mine.pull(wait_ms=300) == []

    def buried() -> bool:
        letters = worker.get("/v1/shop/graves/messages?limit=1000").json()["messages"]
        mine.pull()
        return any(each["value"] == "poison" and each["headers"]["tidewater-attempts"] == "3"
                   for each in letters)  # fmt: skip

    wait_until(buried, 10, "the dead letter", 0.1)
    wait_until(lambda: mine.status()["lag"] == 0, 5, "it to count as acknowledged")
