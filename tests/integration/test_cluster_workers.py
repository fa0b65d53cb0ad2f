"""Three workers of one topic: any of them answers any request, and partitions move (G3, G5)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater_testing.parts.cluster import NAMES, TOPIC, WAIT_S, Cluster, running_cluster
from tidewater_testing.parts.worker import Victim
from tidewater_testing.process import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, request.param) as made:
        assert made.owners() == {0: "a", 1: "a", 2: "a"}, "who comes first keeps what is unassigned"
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
    forwarded = {"Tidewater-Forwarded": "b"}
    refused = cluster.workers["a"].post(path, body, headers=forwarded)
    assert (refused.status, refused.json()["error"]["reason"]) == (503, "OwnedElsewhere"), (
        "a forwarded request is never forwarded again"
    )
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
        return all(cluster.describe(1, via)["state"] == "away" for via in ("a", "c"))

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
