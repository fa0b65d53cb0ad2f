"""Three workers of one topic: any of them answers any request, and partitions move (G3, G5)."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
SPEC = {"partitions": 3, "writer": {"flushInterval": "200ms"}}
NAMES = ("a", "b", "c")
WAIT_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Cluster:
    """Three workers with logs of their own, one catalog and one coordination store."""

    def __init__(self, directory: Path, coordination: str, ttl: str = "3s") -> None:
        catalog = {
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        }
        self.workers = {
            name: Worker(
                directory / name,
                [topic_manifest(TOPIC, SPEC)] if name == "a" else [],
                catalog=catalog,
                coordination=coordination,
                worker_id=name,
                session_ttl=ttl,
            )
            for name in NAMES
        }

    def owners(self, via: str = "a") -> dict[int, str | None]:
        found = self.workers[via].get(f"/v1/{TOPIC}")
        if found.status != 200:
            return {}
        return {p["partition"]: p["owner"] for p in found.json()["partitions"]}

    def describe(self, number: int, via: str = "a") -> dict[str, Any]:
        answer = self.workers[via].get(f"/v1/{TOPIC}")
        found: dict[str, Any] = answer.json()["partitions"][number]
        return found

    def move(self, number: int, to: str, via: str = "a") -> None:
        path = f"/v1/{TOPIC}/partitions/{number}/move"
        assert self.workers[via].post(path, json.dumps({"to": to})).status == 202
        self.wait_owner(number, to, via)

    def wait_owner(self, number: int, owner: str, via: str = "a") -> None:
        def there() -> bool:
            part = self.describe(number, via)
            return bool(part["owner"] == owner and part["state"] == "running")

        wait_until(there, WAIT_S, f"partition {number} on {owner}", 0.1)

    def produce(
        self, via: str, values: list[str], number: int | None = None, keys: bool = False
    ) -> tuple[int, Any]:
        query = "" if number is None else f"?partition={number}"
        messages = [{"value": v, **({"key": v} if keys else {})} for v in values]
        answer = self.workers[via].post(
            f"/v1/{TOPIC}/messages{query}", json.dumps({"messages": messages})
        )
        return answer.status, answer.json()

    def produced(self, via: str, values: list[str], number: int | None = None) -> Any:
        """Produce, asking again while a partition is on its way."""
        answers: list[Any] = []

        def done() -> bool:
            status, body = self.produce(via, values, number)
            answers.append(body)
            assert status in (200, 503), body
            return status == 200

        wait_until(done, WAIT_S, "messages to be taken", 0.1)
        return answers[-1]

    def read(self, via: str, number: int, offset: int = 0) -> list[tuple[int, str]]:
        path = f"/v1/{TOPIC}/messages?partition={number}&offset={offset}&limit=1000"
        answer = self.workers[via].get(path)
        assert answer.status == 200, answer.body
        return [(m["offset"], m["value"]) for m in answer.json()["messages"]]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        if request.param == "etcd":
            coordination = stack.enter_context(Etcd(tmp_path / "etcd")).coordination
        else:
            coordination = str(tmp_path / "coordination.db")
        made = Cluster(tmp_path, coordination)
        first = stack.enter_context(made.workers["a"])
        for name in NAMES[1:]:
            made.workers[name].start(wait=False)
            stack.push(made.workers[name])
        for name in NAMES[1:]:
            made.workers[name].wait_ready()
        assert made.owners() == {0: "a", 1: "a", 2: "a"}, "who comes first keeps what is unassigned"
        assert first.get("/readyz").status == 200
        yield made


@pytest.mark.parametrize("cluster", ["etcd"], indirect=True)
def test_any_worker_answers_and_partitions_move(cluster: Cluster) -> None:
    cluster.produced("b", ["before"], 1)
    once = {"Tidewater-Producer": "p1", "Tidewater-Sequence": "0"}
    path, body = f"/v1/{TOPIC}/messages?partition=1", '{"messages": [{"value": "once"}]}'
    assert cluster.workers["c"].post(path, body, headers=once).status == 200
    cluster.move(1, "b")
    again = cluster.workers["c"].post(path, body, headers=once)
    assert again.json()["acks"] == [{"partition": 1, "offset": 1, "count": 1, "duplicate": True}], (
        "G8 Idempotent producers: a new owner knows what the last one stored"
    )
    cluster.move(2, "c", via="b")
    for via in NAMES:
        assert cluster.owners(via) == {0: "a", 1: "b", 2: "c"}, f"asked {via}"
    for via in NAMES:
        for number in range(3):
            cluster.produced(via, [f"{via}{number}"], number)
        status, body = cluster.produce(via, [f"{via}-key-{i}" for i in range(12)], keys=True)
        assert status == 200, body
        assert {ack["partition"] for ack in body["acks"]} == {0, 1, 2}
        assert sum(ack["count"] for ack in body["acks"]) == 12
    streams = {number: cluster.read("a", number) for number in range(3)}
    for number, stream in streams.items():
        assert [offset for offset, _ in stream] == list(range(len(stream))), "G3 One stream"
        for via in NAMES:
            assert cluster.read(via, number) == stream, f"G3 One stream: partition {number}, {via}"
    values = [value for stream in streams.values() for _, value in stream]
    assert len(values) == len(set(values)) == 2 + 9 + 36, "G1: stored once"
    assert streams[1][0] == (0, "before"), "G1: an offset never changes, wherever the partition is"
    flushed = cluster.workers["c"].post(f"/v1/{TOPIC}/flush")
    assert flushed.status == 200, flushed.body
    assert flushed.json()["frontier"] == {str(n): len(s) for n, s in streams.items()}
    # Back on a volume whose old log is drained, and further.
    cluster.move(1, "a", via="c")
    cluster.produced("c", ["back"], 1)
    assert cluster.read("b", 1)[-1] == (len(streams[1]), "back")
    status, body = cluster.produce("b", ["t"], 0)
    answer = cluster.workers["b"].post(
        f"/v1/{TOPIC}/messages?partition=0&ack=table", '{"messages":[{"value":"in-table"}]}'
    )
    assert answer.status == 200, answer.body
    assert answer.json()["snapshot_id"] > 0


@pytest.mark.parametrize("cluster", ["sqlite"], indirect=True)
def test_while_an_owner_is_away(cluster: Cluster) -> None:
    cluster.produced("a", ["one", "two"], 1)
    cluster.move(1, "b")
    cluster.produced("a", ["three"], 1)
    cluster.workers["a"].flush(TOPIC)
    away = cluster.workers["b"]
    away.kill(Victim.SUPERVISOR, Victim.EDGE, Victim.TABLE)

    def is_away() -> bool:
        return bool(cluster.describe(1)["state"] == "away")

    wait_until(is_away, WAIT_S, "b's session to run out", 0.2)
    assert cluster.describe(1)["owner"] == "b"
    assert cluster.describe(1)["reason"] == "OwnerAway"
    assert cluster.owners("c")[1] == "b", "G5: nobody else takes it"
    status, body = cluster.produce("c", ["keyed"], 1)
    assert (status, body["error"]["reason"]) == (503, "OwnerAway")
    assert body["error"]["retry_after_ms"] > 0
    for via in ("a", "c"):
        status, body = cluster.produce(via, ["unkeyed"])
        assert status == 200, body
        assert body["acks"][0]["partition"] != 1
        assert cluster.read(via, 1) == [(0, "one"), (1, "two"), (2, "three")], (
            "G3: history stays readable everywhere"
        )
    away.process.start()
    away.wait_ready()
    cluster.wait_owner(1, "b")
    acks = cluster.produced("c", ["four"], 1)["acks"]
    assert acks == [{"partition": 1, "offset": 3, "count": 1}]
    assert cluster.read("a", 1)[-1] == (3, "four")
