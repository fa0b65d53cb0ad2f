"""Typed topics: one column per field, in JSON and Arrow, in the log and in the table."""

import json
from typing import Any

import pyarrow as pa

from tidewater_testing.evidence import load_table
from tidewater_testing.parts.worker import Worker

TOPIC = "shop/typed"
ROW = {
    "id": 1,
    "name": "☃",
    "amount": "12.50",
    "ratio": 0.25,
    "day": "2026-01-31",
    "at": "2026-01-31T12:00:00.000001Z",
    "ok": True,
    "tags": ["a", None],
    "scores": {"x": 1, "y": None},
    "uid": "7c1d3a52-6f0e-4f6b-9a55-0d7d5d6c0001",
    "small": -5,
    "raw": "AP8=",
}


def _produce(worker: Worker, values: list[dict[str, Any]]) -> int:
    body = json.dumps({"messages": [{"key": "k", "value": value} for value in values]})
    answer = worker.post(f"/v1/{TOPIC}/messages", body)
    assert answer.status == 200, answer.body
    return int(answer.json()["acks"][0]["offset"])


def test_every_type_goes_into_its_column(worker: Worker) -> None:
    """JSON in, typed columns in the table."""
    offset = _produce(worker, [ROW, {"id": 2}])
    worker.flush(TOPIC)
    rows = load_table(worker.catalog_properties, TOPIC).scan().to_arrow().sort_by("tw_offset")
    full = rows.slice(offset, 1).to_pylist()[0]
    assert str(full["amount"]) == "12.50"
    assert full["at"].isoformat() == "2026-01-31T12:00:00.000001+00:00"
    assert full["tags"] == ["a", None]
    assert dict(full["scores"]) == {"x": 1, "y": None}
    assert full["raw"] == b"\x00\xff"
    assert full["tw_key"] == b"k"
    assert (full["id"], full["name"], full["ok"], full["small"]) == (1, "☃", True, -5)
    empty = rows.slice(offset + 1, 1).to_pylist()[0]
    assert empty["id"] == 2
    assert empty["name"] is None


def test_typed_values_are_read_back_as_objects(worker: Worker) -> None:
    """What JSON gave, JSON gets."""
    offset = _produce(worker, [ROW])
    answer = worker.get(f"/v1/{TOPIC}/messages?offset={offset}&limit=1")
    assert answer.status == 200, answer.body
    value = answer.json()["messages"][0]["value"]
    for name in ("id", "name", "ratio", "day", "ok", "tags", "scores", "uid", "small", "raw"):
        assert value[name] == ROW[name], name


def test_arrow_columns_go_straight_in(worker: Worker) -> None:
    """Column by name, in any order, cast where nothing is lost."""
    table = pa.table({"name": ["x", "y"], "id": pa.array([7, 8], pa.int32())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    body = sink.getvalue().to_pybytes()
    answer = worker.post(f"/v1/{TOPIC}/messages", body, "application/vnd.apache.arrow.stream")
    assert answer.status == 200, answer.body
    offset = answer.json()["acks"][0]["offset"]
    read = worker.get(f"/v1/{TOPIC}/messages?offset={offset}&limit=2").json()["messages"]
    assert [(m["value"]["id"], m["value"]["name"]) for m in read] == [(7, "x"), (8, "y")]


def test_a_cloud_event_fills_the_columns(worker: Worker) -> None:
    """The event's data is the object of columns."""
    event = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {"id": 9}}
    answer = worker.post(f"/v1/{TOPIC}/messages", json.dumps(event), "application/cloudevents+json")
    assert answer.status == 200, answer.body
    offset = answer.json()["acks"][0]["offset"]
    (read,) = worker.get(f"/v1/{TOPIC}/messages?offset={offset}&limit=1").json()["messages"]
    assert read["value"]["id"] == 9
    assert read["headers"]["ce-type"] == "t"
