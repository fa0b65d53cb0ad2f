"""Producing over a WebSocket: the same promises as over HTTP, many commands under way."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.sockets import Dialled

SINGLE = "shop/single"
ORDERS = "shop/orders"


@pytest.fixture
def ws(worker: Worker) -> Iterator[Dialled]:
    """Open a socket on the topic of one partition."""
    with Dialled(worker, SINGLE) as socket:
        yield socket


def values(worker: Worker, topic: str, partition: int, offset: int, count: int) -> list[str]:
    answer = worker.get(f"/v1/{topic}/messages?partition={partition}&offset={offset}&limit={count}")
    return [message["value"] for message in answer.json()["messages"]]


def test_many_commands_under_way(worker: Worker, ws: Dialled) -> None:
    """Every id is acknowledged once, in the order of this socket, and what is stored is right."""
    total = 2_000  # more than may be under way: the rest waits
    for i in range(total):
        ws.say(produce={"id": i, "messages": [{"value": f"m{i}"}]})
    acks = [ws.hear()["ack"] for _ in range(total)]
    assert [ack["id"] for ack in acks] == list(range(total))
    offsets = [ack["acks"][0]["offset"] for ack in acks]
    assert offsets == list(range(offsets[0], offsets[0] + total)), "G1: an offset each"
    assert values(worker, SINGLE, 0, offsets[0], total) == [f"m{i}" for i in range(total)]


def test_batches_and_keys_over_partitions(worker: Worker) -> None:
    """A key goes where it goes over HTTP; each partition has its ack."""
    ws = Dialled(worker, ORDERS)
    messages = [{"key": f"k{i}", "value": f"v{i}", "headers": {"n": str(i)}} for i in range(30)]
    acks = ws.ask(produce={"id": 1, "messages": messages})["ack"]["acks"]
    assert [ack["partition"] for ack in acks] == [0, 1, 2]
    assert sum(ack["count"] for ack in acks) == 30
    answer = worker.post(f"/v1/{ORDERS}/messages", json.dumps({"messages": messages}))
    same = [(a["partition"], a["count"]) for a in answer.json()["acks"]]
    assert [(a["partition"], a["count"]) for a in acks] == same
    to_one = ws.ask(produce={"id": 2, "partition": 2, "messages": messages})["ack"]["acks"]
    assert [(ack["partition"], ack["count"]) for ack in to_one] == [(2, 30)]
    ws.raw.close()


def test_keyed_singles_over_partitions(worker: Worker) -> None:
    """Commands that arrive together but go different ways keep their own acks."""
    ws = Dialled(worker, ORDERS)
    for i in range(50):
        ws.say(produce={"id": i, "messages": [{"key": f"k{i}", "value": f"single {i}"}]})
    by_id = {ack["id"]: ack["acks"] for ack in (ws.hear()["ack"] for _ in range(50))}
    assert sorted(by_id) == list(range(50))
    for i, ((ack,)) in by_id.items():
        assert values(worker, ORDERS, ack["partition"], ack["offset"], 1) == [f"single {i}"]
    ws.raw.close()


def test_a_bad_command_spoils_no_other(worker: Worker, ws: Dialled) -> None:
    """Sent in one go: each gets its own answer, and the socket stays open."""
    ws.say(produce={"id": 1, "messages": [{"value": "good 1"}]})
    ws.say(produce={"id": 2, "messages": [{"valu": "typo"}]})
    ws.say(produce={"id": 3, "messages": [{"value": "x" * 1_100_000}]})
    ws.say(produce={"id": 4, "messages": []})
    ws.say(produce={"id": 5, "messages": [{"value": "good 5"}], "partition": 9})
    ws.say(produce={"id": 6, "messages": [{"value": "a", "value_b64": "YQ=="}]})
    ws.say(produce={"id": 7, "messages": [{"value": "good 7"}]})
    ws.raw.send("no JSON")
    ws.say(produce={"id": 8, "messages": [{"value": "x"}]}, stop={"id": 1})
    heard = [ws.hear() for _ in range(9)]
    acked = {said["ack"]["id"] for said in heard if "ack" in said}
    errors = {said["error"]["id"]: said["error"] for said in heard if "error" in said}
    assert acked == {1, 7}
    assert {id_: error["status"] for id_, error in errors.items() if id_ is not None} == {
        2: 400, 3: 413, 4: 400, 5: 404, 6: 400,
    }  # fmt: skip
    assert errors[3]["reason"] == "MessageTooLarge"
    assert len([said for said in heard if said.get("error", {}).get("id", 0) is None]) == 2
    assert "ack" in ws.ask(produce={"id": 10, "messages": [{"value": "still here"}]})


def test_a_re_send_is_stored_once(ws: Dialled) -> None:
    """G8, also when both copies arrive together."""
    one = {"messages": [{"value": "once"}], "producer": "p-ws", "sequence": 0}
    ws.say(produce={"id": 1, **one})
    ws.say(produce={"id": 2, **one})
    first, second = ws.hear()["ack"]["acks"][0], ws.hear()["ack"]["acks"][0]
    assert first["offset"] == second["offset"]
    assert sorted([first.get("duplicate", False), second.get("duplicate", False)]) == [False, True]
    assert ws.ask(produce={"id": 3, **one})["ack"]["acks"][0]["duplicate"] is True
    alone = ws.ask(produce={"id": 4, "messages": [{"value": "x"}], "producer": "p"})
    assert alone["error"]["reason"] == "InvalidProducer"


def test_an_ack_by_the_table(ws: Dialled) -> None:
    said = ws.ask(produce={"id": 1, "messages": [{"value": "t"}], "ack": "table"})
    assert isinstance(said["ack"]["snapshot_id"], int)


def test_arrow_frames(worker: Worker, ws: Dialled) -> None:
    batch = pa.record_batch(
        {"value": pa.array([b"a", b"\xff\x00", b"c"]), "key": pa.array([b"k", None, b"k"])}
    )
    ws.say_arrow({"produce": {"id": 5}}, batch)
    (ack,) = ws.hear()["ack"]["acks"]
    assert ack["count"] == 3
    answer = worker.get(f"/v1/{SINGLE}/messages?offset={ack['offset']}&limit=3").json()
    assert [m.get("value", m.get("value_b64")) for m in answer["messages"]] == ["a", "/wA=", "c"]
    ws.raw.send_binary(b"\x02\x00\x00\x00{}")
    assert ws.hear()["error"]["reason"] == "InvalidFrame"
    ws.say_arrow({"produce": {"id": 6}}, batch, cut=40)
    said = ws.hear()
    assert said.get("error", {}).get("id") == 6 or said["ack"]["id"] == 6
    ws.say_arrow({"produce": {"id": 7}}, pa.record_batch({"nope": pa.array([1])}))
    assert ws.hear()["error"]["reason"] == "UnknownColumn"


def test_typed_topics(worker: Worker) -> None:
    ws = Dialled(worker, "shop/typed")
    for i in range(5):
        ws.say(produce={"id": i, "messages": [{"value": {"id": i, "name": f"n{i}"}}]})
    assert {ws.hear()["ack"]["id"] for _ in range(5)} == set(range(5))
    said = ws.ask(produce={"id": 9, "messages": [{"value": {"id": "x"}}]})
    assert "$.produce.messages[0].value.id" in said["error"]["message"]
    ws.raw.close()


def test_what_was_acknowledged_survives_a_kill(tmp_path: Any) -> None:
    """G1: kill -9 while messages stream in; every acked one is there, at its offset."""
    with Worker(tmp_path / "w", [topic_manifest(SINGLE, {"partitions": 1})]) as worker:
        ws = Dialled(worker, SINGLE)
        acked: dict[int, int] = {}
        for i in range(3_000):
            ws.say(produce={"id": i, "messages": [{"value": f"k{i}"}]})
            if i % 64 == 63:
                for _ in range(64):
                    ack = ws.hear()["ack"]
                    acked[ack["id"]] = ack["acks"][0]["offset"]
            if i == 2_000:
                worker.kill(Victim.EDGE)
                break
        ws.cut()
        worker.wait_ready()
        stored = values(worker, SINGLE, 0, 0, 5_000)
        assert len(acked) >= 1_900
        lost = {i: offset for i, offset in acked.items() if stored[offset] != f"k{i}"}
        assert not lost, f"G1 Durable: acknowledged but not there: {lost}"
