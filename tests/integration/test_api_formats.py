"""Every content type that produce takes and read gives, there and back."""

import base64
import json
from typing import Any

import pyarrow as pa
import pytest

from tidewater_testing import web
from tidewater_testing.parts.worker import Worker

ARROW = "application/vnd.apache.arrow.stream"
NDJSON = "application/x-ndjson"
BINARY = b"\x00\xff\xfe binary"


def _produce(
    worker: Worker,
    body: bytes | str,
    content_type: str = "application/json",
    headers: dict[str, str] | None = None,
    topic: str = "shop/single",
) -> int:
    """Produce to a topic of one partition; returns the first offset."""
    answer = worker.post(f"/v1/{topic}/messages", body, content_type, headers)
    assert answer.status == 200, (answer.status, answer.body)
    (ack,) = answer.json()["acks"]
    assert ack["partition"] == 0
    return int(ack["offset"])


def _read(worker: Worker, offset: int, count: int, topic: str = "shop/single") -> list[Any]:
    answer = worker.get(f"/v1/{topic}/messages?partition=0&offset={offset}&limit={count}")
    assert answer.status == 200, answer.body
    page = answer.json()
    messages: list[Any] = page["messages"]
    assert [m["offset"] for m in messages] == list(range(offset, offset + count))
    assert page["next_offset"] == offset + count
    assert page["end_offset"] >= offset + count
    return messages


def _arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def test_json_batch(worker: Worker) -> None:
    """Keys, headers, and values of every JSON kind."""
    values: list[Any] = ["text", {"a": [1, 2.5]}, [1, None], 7, True, "snow ☃ \u0000"]
    messages: list[dict[str, Any]] = [{"value": value} for value in values]
    messages.append({"key": "k", "value": "with key", "headers": {"h": "1", "empty": ""}})
    messages.append({"value": None, "key": "tombstone"})
    offset = _produce(worker, json.dumps({"messages": messages}))
    got = _read(worker, offset, len(messages))
    texts = ["text", '{"a":[1,2.5]}', "[1,null]", "7", "true", "snow ☃ \u0000", "with key", None]
    assert [m["value"] for m in got] == texts
    assert [m["key"] for m in got][-2:] == ["k", "tombstone"]
    assert got[-2]["headers"] == {"h": "1", "empty": ""}
    assert got[0]["headers"] == {}
    assert got[0]["time"].endswith("Z")


def test_json_bytes_travel_as_base64(worker: Worker) -> None:
    """Bytes that are not UTF-8 come back under `_b64` names."""
    encoded = base64.b64encode(BINARY).decode()
    body = json.dumps({"messages": [{"key_b64": encoded, "value_b64": encoded}]})
    (got,) = _read(worker, _produce(worker, body), 1)
    assert base64.b64decode(got["key_b64"]) == BINARY
    assert base64.b64decode(got["value_b64"]) == BINARY
    assert "value" not in got


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_ndjson(worker: Worker, end: str) -> None:
    """One message a line, with any line end, and none after the last."""
    lines = [json.dumps({"key": f"k{i}", "value": f"v{i}"}) for i in range(3)]
    offset = _produce(worker, (end or "\n").join(lines) + end, NDJSON)
    assert [m["value"] for m in _read(worker, offset, 3)] == ["v0", "v1", "v2"]


def test_arrow_stream(worker: Worker) -> None:
    """Several batches in a stream are one request; keys and headers are optional columns."""
    headers = pa.array([[("h", "x")], None, []], pa.map_(pa.string(), pa.string()))
    table = pa.table(
        {
            "value": pa.array([b"a", BINARY, None], pa.binary()),
            "tw_key": pa.array([b"k", None, b""], pa.binary()),
            "tw_headers": headers,
        }
    )
    offset = _produce(worker, _arrow(pa.concat_tables([table, table])), ARROW)
    got = _read(worker, offset, 6)
    assert [m.get("value") for m in got] == ["a", None, None] * 2
    assert base64.b64decode(got[1]["value_b64"]) == BINARY
    assert [m["key"] for m in got[:3]] == ["k", None, ""]
    assert got[0]["headers"] == {"h": "x"}


def test_arrow_values_may_be_strings(worker: Worker) -> None:
    """Columns are cast where nothing is lost."""
    table = pa.table({"value": pa.array(["a", "b"], pa.large_string())})
    assert [m["value"] for m in _read(worker, _produce(worker, _arrow(table), ARROW), 2)] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_arrow_compressed_and_with_dictionaries(worker: Worker, compression: str | None) -> None:
    """What pyarrow can write is taken."""
    values = ["a" * 1000, "b" * 1000, "a" * 1000]
    batch = pa.record_batch({"value": pa.array(values).dictionary_encode(), "key": ["k"] * 3})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    offset = _produce(worker, sink.getvalue().to_pybytes(), ARROW)
    assert [m["value"] for m in _read(worker, offset, 3)] == values


@pytest.mark.parametrize(
    "content_type", ["application/octet-stream", "Application/Octet-Stream; charset=binary"]
)
def test_raw_bytes(worker: Worker, content_type: str) -> None:
    """The body is the message; key and headers are HTTP headers."""
    headers = {"Tidewater-Key": "k", "Tidewater-Header-Trace": "t1"}
    (got,) = _read(worker, _produce(worker, BINARY, content_type, headers), 1)
    assert base64.b64decode(got["value_b64"]) == BINARY
    assert got["key"] == "k"
    assert got["headers"] == {"trace": "t1"}


def test_header_values_are_utf8(worker: Worker) -> None:
    """A key is the same bytes by whichever door it comes: its messages share a partition."""
    on_the_wire = {
        name: text.encode().decode("latin-1")
        for name, text in {"Tidewater-Key": "café", "Tidewater-Header-Where": "Zürich"}.items()
    }
    (got,) = _read(worker, _produce(worker, b"x", "application/octet-stream", on_the_wire), 1)
    assert got["key"] == "café"
    assert got["headers"] == {"where": "Zürich"}


def test_an_empty_raw_body_is_a_message(worker: Worker) -> None:
    """No bytes are bytes, too."""
    (got,) = _read(worker, _produce(worker, b"", "application/octet-stream"), 1)
    assert got["value"] == ""


EVENT = {
    "specversion": "1.0",
    "id": "e1",
    "source": "/test",
    "type": "t",
    "partitionkey": "pk",
    "data": {"a": 1},
}


def test_cloudevents_structured(worker: Worker) -> None:
    """Attributes become `ce-` headers, data the value, `partitionkey` the key."""
    offset = _produce(worker, json.dumps(EVENT), "application/cloudevents+json")
    (got,) = _read(worker, offset, 1)
    assert got["value"] == '{"a":1}'
    assert got["key"] == "pk"
    assert got["headers"]["ce-id"] == "e1"
    assert got["headers"]["ce-source"] == "/test"


def test_cloudevents_batch(worker: Worker) -> None:
    """A JSON array of events."""
    events = [{**EVENT, "id": f"e{i}", "data": f"d{i}"} for i in range(3)]
    offset = _produce(worker, json.dumps(events), "application/cloudevents-batch+json")
    assert [m["value"] for m in _read(worker, offset, 3)] == ["d0", "d1", "d2"]


def test_cloudevents_binary(worker: Worker) -> None:
    """Attributes are HTTP headers, the body is the data."""
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t"}
    offset = _produce(worker, b"data", "text/plain", headers)
    (got,) = _read(worker, offset, 1)
    assert got["value"] == "data"
    assert got["headers"]["ce-datacontenttype"] == "text/plain"


def test_read_as_ndjson_and_arrow(worker: Worker) -> None:
    """The same messages in the three formats of a read."""
    body = json.dumps({"messages": [{"key": "k", "value": f"v{i}"} for i in range(5)]})
    offset = _produce(worker, body)
    path = f"/v1/shop/single/messages?partition=0&offset={offset}&limit=5"
    lines = web.request(worker.address, "GET", path, headers={"Accept": NDJSON}).body
    assert [json.loads(line)["value"] for line in lines.splitlines()] == [f"v{i}" for i in range(5)]
    answer = web.request(worker.address, "GET", path, headers={"Accept": ARROW})
    assert answer.headers["content-type"] == ARROW
    table = pa.ipc.open_stream(answer.body).read_all()
    assert table.schema.names == [
        "tw_partition",
        "tw_offset",
        "tw_time",
        "tw_key",
        "tw_headers",
        "value",
    ]
    assert table["tw_offset"].to_pylist() == list(range(offset, offset + 5))
    assert table["value"].to_pylist() == [f"v{i}".encode() for i in range(5)]
