"""Reading over a WebSocket: one stream from table to live, at the pace of the credit (G3, G4)."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import websocket

from tidewater_core.crd.manifest import load_manifests
from tidewater_core.settings import Limits
from tidewater_core.units import Duration
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.sockets import Dialled

SINGLE = "shop/single"
ORDERS = "shop/orders"
SUBSCRIPTION = """\
apiVersion: tidewater.dev/v1alpha1
kind: Subscription
metadata: {name: billing, namespace: shop}
spec: {topic: orders, type: Shared, startFrom: {position: earliest}, ackDeadline: 30s}
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker that looks after its sockets often."""
    assert load_manifests(SUBSCRIPTION)
    manifests = [
        topic_manifest(SINGLE, {"partitions": 1}),
        topic_manifest(ORDERS, {"partitions": 2}),
        SUBSCRIPTION,
    ]
    limits = Limits(socket_ping=Duration("1500ms"))
    with Worker(tmp_path_factory.mktemp("worker"), manifests, limits=limits) as part:
        yield part


def _produce(worker: Worker, topic: str, values: list[str]) -> int:
    """Store values; return the first offset."""
    body = json.dumps({"messages": [{"value": value} for value in values]})
    answer = worker.post(f"/v1/{topic}/messages", body)
    assert answer.status == 200, answer.body
    return int(answer.json()["acks"][0]["offset"])


def test_from_the_table_to_live(worker: Worker) -> None:
    """G3: committed, logged and live messages come as one stream, once each."""
    first = _produce(worker, SINGLE, [f"v{i}" for i in range(2_500)])
    worker.flush(SINGLE)
    _produce(worker, SINGLE, [f"v{i}" for i in range(2_500, 2_600)])
    with Dialled(worker, SINGLE) as ws:
        began = ws.ask(read={"id": 1, "offset": first, "credit": 10_000})["reading"]
        assert began["offset"] == first
        found = ws.messages(2_600)
        _produce(worker, SINGLE, ["live 1"])
        found += ws.messages(1)
        with Dialled(worker, SINGLE) as other:
            other.ask(produce={"id": 1, "messages": [{"value": "live 2"}]})
        found += ws.messages(1)
        ws.say(stop={"id": 1})
        assert ws.hear()["stopped"] == {"id": 1, "next_offset": first + 2_602}
    assert [m["offset"] for m in found] == list(range(first, first + 2_602)), "G3 One stream"
    assert [m["value"] for m in found[-3:]] == ["v2599", "live 1", "live 2"]


def test_credit_is_kept_to(worker: Worker) -> None:
    """Not one message more than was asked for."""
    first = _produce(worker, SINGLE, [f"c{i}" for i in range(300)])
    with Dialled(worker, SINGLE) as ws:
        ws.ask(read={"id": 7, "offset": first})
        ws.raw.settimeout(0.3)
        with pytest.raises(TimeoutError):
            _without_pings(ws)
        ws.raw.settimeout(20)
        ws.say(credit={"id": 7, "messages": 10})
        assert len(ws.messages(10)) == 10
        ws.say(credit={"id": 7, "messages": 5})
        ws.say(credit={"id": 7, "messages": 200})
        assert [m["offset"] for m in ws.messages(205)] == list(range(first + 10, first + 215))
        ws.raw.settimeout(0.3)
        with pytest.raises(TimeoutError):
            _without_pings(ws)


def _without_pings(ws: Dialled) -> dict[str, Any]:
    """Wait for a message; the library answers pings by itself and goes on waiting."""
    try:
        return ws.hear()
    except Exception as error:
        raise TimeoutError from error


def test_where_a_read_begins(worker: Worker) -> None:
    with Dialled(worker, SINGLE) as ws:
        end = _produce(worker, SINGLE, ["a"]) + 1
        assert ws.ask(read={"id": 1})["reading"]["offset"] == 0
        latest = ws.ask(read={"id": 2, "position": "latest", "credit": 1})["reading"]
        assert latest["offset"] == end
        time.sleep(0.01)
        now = time.time()
        assert _produce(worker, SINGLE, ["b"]) == end
        assert ws.messages(1)[0]["value"] == "b"
        by_time = ws.ask(read={"id": 3, "timestamp": int(now * 1000)})["reading"]
        assert by_time["offset"] == end


def test_what_cannot_be_read(worker: Worker) -> None:
    with Dialled(worker, SINGLE) as ws:
        for command, reason in (
            ({"id": 1, "offset": 10**9}, "OffsetInFuture"),
            ({"id": 1, "partition": 5}, "UnknownPartition"),
            ({"id": 1, "timestamp": "yesterday"}, "InvalidTimestamp"),
        ):
            said = ws.ask(read=command)["error"]
            assert (said["id"], said["reason"]) == (1, reason)
        assert ws.ask(credit={"id": 99, "messages": 1})["error"]["reason"] == "UnknownStream"
        assert ws.ask(stop={"id": 99})["error"]["reason"] == "UnknownStream"
        assert "reading" in ws.ask(read={"id": 1})
        assert ws.ask(read={"id": 1})["error"]["reason"] == "IdInUse"


def test_arrow_frames(worker: Worker) -> None:
    first = _produce(worker, SINGLE, [f"arrow {i}" for i in range(3_000)])
    with Dialled(worker, SINGLE) as ws:
        ws.ask(read={"id": 1, "offset": first, "credit": 3_000, "format": "arrow"})
        rows = 0
        while rows < 3_000:
            head, table = ws.hear_arrow()
            assert table.column("tw_offset")[0].as_py() == first + rows
            rows += head["messages"]["count"]
            assert head["messages"]["next_offset"] == first + rows
            assert table.num_rows == head["messages"]["count"]


def test_readers_share_what_is_live(worker: Worker) -> None:
    """Twenty followers of one partition, all get all of it in order."""
    with ExitStack() as stack:
        readers = [stack.enter_context(Dialled(worker, SINGLE)) for _ in range(20)]
        for i, ws in enumerate(readers):
            ws.ask(read={"id": i, "position": "latest", "credit": 7 + 100 * i})
        first = _produce(worker, SINGLE, ["s0"])
        for i in range(1, 30):
            _produce(worker, SINGLE, [f"s{i}"])
        for i, ws in enumerate(readers):
            count = min(30, 7 + 100 * i)
            assert [m["offset"] for m in ws.messages(count)] == list(range(first, first + count))


def test_a_client_that_takes_nothing_blocks_nobody(worker: Worker) -> None:
    """G4, G6: it is given up after two pings; others read and produce meanwhile."""
    big = ["x" * 100_000] * 20
    first = [_produce(worker, SINGLE, big) for _ in range(20)][-1]
    with Dialled(worker, SINGLE) as deaf, Dialled(worker, SINGLE) as ws:
        deaf.say(read={"id": 1, "offset": 0, "credit": 10**9})  # and then it reads no byte
        ws.ask(read={"id": 1, "offset": first, "credit": 20})
        assert len(ws.messages(20)) == 20
        until = time.monotonic() + 7
        while time.monotonic() < until:
            assert "ack" in ws.ask(produce={"id": 2, "messages": [{"value": "on and on"}]})
            time.sleep(0.05)
        assert _is_cut_off(deaf), "G6: a client that takes nothing is given up"


def _is_cut_off(ws: Dialled) -> bool:
    try:
        for _ in range(10_000):
            ws.raw.recv()
    except (OSError, websocket.WebSocketConnectionClosedException):
        return True
    return False


def test_a_quiet_client_stays(worker: Worker) -> None:
    """One that answers pings is not given up, however long it says nothing."""
    with Dialled(worker, SINGLE) as ws:
        ws.ask(read={"id": 1, "position": "latest", "credit": 1})
        timer = threading.Timer(5.0, lambda: _produce(worker, SINGLE, ["at last"]))
        timer.start()
        assert ws.messages(1)[0]["value"] == "at last"
        timer.join()


def test_a_subscription(worker: Worker) -> None:
    """Deliveries by credit; acknowledged ones are not delivered again (G4), rejected ones are."""
    for i in range(6):
        _produce(worker, ORDERS, [f"o{i}"])
    with Dialled(worker, ORDERS) as ws:
        said = ws.ask(subscribe={"id": 1, "subscription": "billing", "credit": 4})
        assert said["subscribed"]["id"] == 1
        found = ws.messages(4)
        assert all(message["delivery"] == 1 for message in found)
        done = [m["ack_id"] for m in found[:3]]
        ws.say(acknowledge={"id": 10, "subscription": "billing", "ack_ids": done})
        assert ws.hear()["acknowledged"] == {"id": 10, "count": 3, "refused": []}
        back = [found[3]["ack_id"]]
        said = ws.ask(extend={"id": 11, "subscription": "billing", "ack_ids": back})
        assert said["extended"]["count"] == 1
        said = ws.ask(reject={"id": 12, "subscription": "billing", "ack_ids": back, "delay_ms": 0})
        assert said["rejected"]["count"] == 1
        ws.say(credit={"id": 1, "messages": 10})
        rest = ws.messages(3)
        again = [m["value"] for m in rest if m["delivery"] == 2]
        assert again == [found[3]["value"]]
        assert len({m["value"] for m in found + rest}) == 6
        said = ws.ask(acknowledge={"id": 13, "subscription": "billing", "ack_ids": ["junk"]})
        assert said["error"]["id"] == 13
        said = ws.ask(subscribe={"id": 2, "subscription": "none"})
        assert said["error"]["reason"] == "UnknownSubscription"
        left = {m["value"] for m in rest}
    with Dialled(worker, ORDERS) as ws:  # the first one is gone: what it held comes back at once
        ws.ask(subscribe={"id": 1, "subscription": "billing", "credit": 10, "format": "arrow"})
        values: set[str] = set()
        while len(values) < 3:
            _, table = ws.hear_arrow()
            values |= {value.decode() for value in table.column("value").to_pylist()}
            assert len(table.column("tw_ack_id")) == table.num_rows
        assert values == left, "G4: at least once until acknowledged"
