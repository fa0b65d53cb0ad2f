"""Bad input: a 4xx that names the reason, and nothing is stored (G6)."""

import gzip
import json
import socket
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from tidewater_testing import web
from tidewater_testing.parts.worker import Worker

ARROW = "application/vnd.apache.arrow.stream"
NDJSON = "application/x-ndjson"
TOPICS = ("shop/orders", "shop/single", "shop/typed")
DIGITS = "9" * 6_000


def _arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _bomb() -> bytes:
    """Make a body of some kilobytes that says it is 64 MiB of values."""
    batch = pa.record_batch({"value": pa.array([bytes(1024 * 1024)] * 64, pa.binary())})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    assert len(data) < 100_000
    return data


def _one(value: object = "x", **more: object) -> str:
    return json.dumps({"messages": [{"value": value, **more}]})


@dataclass(frozen=True)
class Bad:
    """A produce request that must be refused."""

    status: int
    body: bytes | str
    kind: str = "application/json"
    path: str = "/v1/shop/single/messages"
    headers: dict[str, str] = field(default_factory=dict)


GOOD_ARROW = _arrow(pa.table({"value": pa.array([b"a" * 100] * 10, pa.binary())}))
CE = {"ce-id": "1", "ce-source": "/s", "ce-type": "t"}
TYPED = "/v1/shop/typed/messages"
BAD = {
    "not json": Bad(400, "{nonsense"),
    "empty body": Bad(400, ""),
    "half a json body": Bad(400, '{"messages": [{"value": "x"}'),
    "not utf-8": Bad(400, b'{"messages": [{"value": "\xff\xfe"}]}'),
    "lone surrogate": Bad(400, '{"messages": [{"value": "\\ud800"}]}'),
    "a list": Bad(400, "[1, 2]"),
    "null": Bad(400, "null"),
    "no messages": Bad(400, '{"messages": []}'),
    "messages is an object": Bad(400, '{"messages": {}}'),
    "a message is a string": Bad(400, '{"messages": ["x"]}'),
    "a message without a value": Bad(400, '{"messages": [{"key": "k"}]}'),
    "an unknown field": Bad(400, _one(valeu="typo")),
    "an unknown field beside": Bad(400, '{"messages": [{"value": 1}], "more": 1}'),
    "the second message is bad": Bad(400, '{"messages": [{"value": "good"}, {"valu": 1}]}'),
    "key is a number": Bad(400, _one(key=5)),
    "headers is a list": Bad(400, _one(headers=["a"])),
    "a header is a number": Bad(400, _one(headers={"a": 1})),
    "bad base64": Bad(400, '{"messages": [{"value_b64": "***"}]}'),
    "value twice": Bad(400, _one(value_b64="AAAA")),
    "key twice": Bad(400, _one(key="k", key_b64="AAAA")),
    "nested too deep": Bad(400, '{"messages": [{"value": ' + "[" * 50_000 + "]" * 50_000 + "}]}"),
    "a header that is not utf-8": Bad(
        400, b"x", "application/octet-stream", headers={"Tidewater-Key": "caf\xe9"}
    ),
    "a time after the year 9999": Bad(
        400, _one({"id": 1, "at": "9999-12-31T23:59:59-01:00"}), path=TYPED
    ),
    "arrow: a day after the year 9999": Bad(
        400,
        _arrow(pa.table({"id": [1], "day": pa.array([2**30], pa.int32()).view(pa.date32())})),
        ARROW,
        path=TYPED,
    ),
    "arrow: a map with a key twice": Bad(
        400,
        _arrow(
            pa.table(
                {
                    "id": [1],
                    "scores": pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
                }
            )
        ),
        ARROW,
        path=TYPED,
    ),
    "more headers than are taken": Bad(
        413, _one({"id": 1}, headers={f"h{n}": "" for n in range(200)}), path=TYPED
    ),
    "ndjson: line 2 is bad": Bad(400, '{"value": "good"}\n{bad}\n', NDJSON),
    "ndjson: empty": Bad(400, "", NDJSON),
    "ndjson: a batch object": Bad(400, _one(), NDJSON),
    "arrow: garbage": Bad(400, b"ARROW1\0\0 not really", ARROW),
    "arrow: empty": Bad(400, b"", ARROW),
    "arrow: half a stream": Bad(400, GOOD_ARROW[: len(GOOD_ARROW) // 2], ARROW),
    "arrow: cut in the schema": Bad(400, GOOD_ARROW[:40], ARROW),
    "arrow: no rows": Bad(400, _arrow(pa.table({"value": pa.array([], pa.binary())})), ARROW),
    "arrow: no value": Bad(400, _arrow(pa.table({"tw_key": pa.array([b"k"])})), ARROW),
    "arrow: other column": Bad(400, _arrow(pa.table({"value": [b"v"], "x": [1]})), ARROW),
    "arrow: wrong type": Bad(400, _arrow(pa.table({"value": [[1, 2]]})), ARROW),
    "arrow: large when decompressed": Bad(413, _bomb(), ARROW),
    "arrow: a column twice": Bad(
        400, _arrow(pa.table({"key": [b"a"], "tw_key": [b"b"], "value": [b"v"]})), ARROW
    ),
    "content encoding": Bad(
        415, gzip.compress(_one().encode()), headers={"content-encoding": "gzip"}
    ),
    "content encoding of bytes": Bad(
        415, b"\x1f\x8b", "application/octet-stream", headers={"content-encoding": "gzip"}
    ),
    "content type": Bad(415, _one(), "text/csv"),
    "form": Bad(415, "a=b", "application/x-www-form-urlencoded"),
    "unknown topic": Bad(404, _one(), path="/v1/shop/nosuch/messages"),
    "unknown namespace": Bad(404, _one(), path="/v1/nosuch/single/messages"),
    "unknown partition": Bad(404, _one(), path="/v1/shop/single/messages?partition=1"),
    "negative partition": Bad(400, _one(), path="/v1/shop/single/messages?partition=-1"),
    "partition is a word": Bad(400, _one(), path="/v1/shop/single/messages?partition=first"),
    "partition of many digits": Bad(4, _one(), path=f"/v1/shop/single/messages?partition={DIGITS}"),
    "ack is a word": Bad(400, _one(), path="/v1/shop/single/messages?ack=yes"),
    "unknown parameter": Bad(400, _one(), path="/v1/shop/single/messages?partitoin=0"),
    "a parameter twice": Bad(400, _one(), path="/v1/shop/single/messages?partition=0&partition=0"),
    "a header without a name": Bad(
        400, b"x", "application/octet-stream", headers={"Tidewater-Header-": "x"}
    ),
    "producer without sequence": Bad(400, _one(), headers={"Tidewater-Producer": "p"}),
    "sequence without producer": Bad(400, _one(), headers={"Tidewater-Sequence": "1"}),
    "negative sequence": Bad(
        400, _one(), headers={"Tidewater-Producer": "p", "Tidewater-Sequence": "-1"}
    ),
    "sequence of many digits": Bad(
        400, _one(), headers={"Tidewater-Producer": "p", "Tidewater-Sequence": DIGITS}
    ),
    "sequence past 63 bits": Bad(
        400, _one(), headers={"Tidewater-Producer": "p", "Tidewater-Sequence": str(2**63)}
    ),
    "empty producer": Bad(
        400, _one(), headers={"Tidewater-Producer": "", "Tidewater-Sequence": "1"}
    ),
    "long producer": Bad(
        400, _one(), headers={"Tidewater-Producer": "p" * 129, "Tidewater-Sequence": "1"}
    ),
    "cloudevent: no id": Bad(
        400, '{"specversion":"1.0","source":"s","type":"t"}', "application/cloudevents+json"
    ),
    "cloudevent: version": Bad(
        400,
        '{"specversion":"9","id":"1","source":"s","type":"t"}',
        "application/cloudevents+json",
    ),
    "cloudevent: a list": Bad(400, "[]", "application/cloudevents+json"),
    "cloudevents: no event": Bad(400, "[]", "application/cloudevents-batch+json"),
    "cloudevents: bad data_base64": Bad(
        400,
        '{"specversion":"1.0","id":"1","source":"s","type":"t","data_base64":"*"}',
        "application/cloudevents+json",
    ),
    "binary cloudevent: no id": Bad(400, b"x", "text/plain", headers={"ce-specversion": "1.0"}),
    "binary cloudevent: bad data for columns": Bad(
        400, b"{bad", path=TYPED, headers={"ce-specversion": "1.0", **CE}
    ),
    "binary cloudevent: no data for columns": Bad(
        400, b"", path=TYPED, headers={"ce-specversion": "1.0", **CE}
    ),
    "too large a message": Bad(413, _one("x" * (1024 * 1024 + 1))),
    "too large a request": Bad(413, _one("x" * (2 * 1024 * 1024))),
    "too many messages": Bad(413, json.dumps({"messages": [{"value": ""}] * 5_001})),
    "too large a key": Bad(413, _one(key="k" * (64 * 1024 + 1))),
    "too many headers": Bad(413, _one(headers={f"h{i}": "" for i in range(129)})),
    "arrow: too large a message": Bad(
        413, _arrow(pa.table({"value": [b"x" * (1024 * 1024 + 1)]})), ARROW
    ),
    "arrow: too many rows": Bad(413, _arrow(pa.table({"value": [b""] * 5_001})), ARROW),
    "raw: too large": Bad(413, b"x" * (1024 * 1024 + 1), "application/octet-stream"),
    "typed: raw bytes": Bad(415, b"x", "application/octet-stream", TYPED),
    "typed: not an object": Bad(400, _one("text"), path=TYPED),
    "typed: required column missing": Bad(400, _one({"name": "x"}), path=TYPED),
    "typed: required column null": Bad(400, _one({"id": None}), path=TYPED),
    "typed: unknown column": Bad(400, _one({"id": 1, "nmae": "x"}), path=TYPED),
    "typed: text for a number": Bad(400, _one({"id": "1"}), path=TYPED),
    "typed: int out of range": Bad(400, _one({"id": 1, "small": 2**31}), path=TYPED),
    "typed: long out of range": Bad(400, _one({"id": 2**63}), path=TYPED),
    "typed: decimal too precise": Bad(400, _one({"id": 1, "amount": "1.234"}), path=TYPED),
    "typed: decimal too large": Bad(400, _one({"id": 1, "amount": "1234567890.12"}), path=TYPED),
    "typed: bad date": Bad(400, _one({"id": 1, "day": "2026-02-30"}), path=TYPED),
    "typed: time without zone": Bad(400, _one({"id": 1, "at": "2026-01-01T00:00:00"}), path=TYPED),
    "typed: bad uuid": Bad(400, _one({"id": 1, "uid": "no"}), path=TYPED),
    "typed: bad list": Bad(400, _one({"id": 1, "tags": [1]}), path=TYPED),
    "typed: arrow without id": Bad(400, _arrow(pa.table({"name": ["x"]})), ARROW, TYPED),
    "typed: arrow null id": Bad(
        400, _arrow(pa.table({"id": pa.array([None], pa.int64())})), ARROW, TYPED
    ),
    "typed: arrow lossy": Bad(400, _arrow(pa.table({"id": [1.5]})), ARROW, TYPED),
}


def _ends(worker: Worker) -> dict[str, list[int]]:
    """Return where each partition of each topic ends, from the metadata."""
    return {
        topic: [p["end"] for p in worker.get(f"/v1/{topic}").json()["partitions"]]
        for topic in TOPICS
    }


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_and_nothing_is_stored(worker: Worker, name: str) -> None:
    """The status is of its kind, the answer has a reason and a message for people."""
    bad = BAD[name]
    before = _ends(worker)
    answer = worker.post(bad.path, bad.body, bad.kind, bad.headers)
    expected = range(400, 500) if bad.status == 4 else (bad.status,)
    assert answer.status in expected, (answer.status, answer.body)
    error = answer.json()["error"]
    assert error["reason"][0].isupper(), error
    assert error["reason"].isalnum(), error
    assert len(error["message"]) > 5, error
    assert _ends(worker) == before, "a refused request left something behind"


def test_the_answer_says_which_message_is_wrong(worker: Worker) -> None:
    """Of a thousand messages, one has a typing error: say which."""
    messages: list[dict[str, object]] = [{"value": "good"}] * 1_000
    messages[617] = {"value": "bad", "kye": "k"}
    answer = worker.post("/v1/shop/single/messages", json.dumps({"messages": messages}))
    assert answer.status == 400
    assert "617" in answer.json()["error"]["message"]


READS = {
    "unknown topic": (404, "/v1/shop/nosuch/messages"),
    "unknown partition": (404, "/v1/shop/single/messages?partition=9"),
    "negative partition": (400, "/v1/shop/single/messages?partition=-1"),
    "negative offset": (400, "/v1/shop/single/messages?offset=-1"),
    "offset is a word": (400, "/v1/shop/single/messages?offset=latest"),
    "offset of many digits": (4, f"/v1/shop/single/messages?offset={DIGITS}"),
    "offset past the end": (400, "/v1/shop/single/messages?offset=999999999"),
    "offset and timestamp": (400, "/v1/shop/single/messages?offset=0&timestamp=0"),
    "bad timestamp": (400, "/v1/shop/single/messages?timestamp=yesterday"),
    "timestamp without zone": (400, "/v1/shop/single/messages?timestamp=2026-01-01T00:00:00"),
    "timestamp of many digits": (4, f"/v1/shop/single/messages?timestamp={DIGITS}"),
    "unknown parameter": (400, "/v1/shop/single/messages?offest=3"),
    "a parameter twice": (400, "/v1/shop/single/messages?offset=0&offset=1"),
    "limit 0": (400, "/v1/shop/single/messages?limit=0"),
    "negative wait": (400, "/v1/shop/single/messages?wait_ms=-5"),
    "no such path": (404, "/v2/shop"),
    "metadata of an unknown topic": (404, "/v1/shop/nosuch"),
    "stats of an unknown topic": (404, "/v1/shop/nosuch/stats"),
}


@pytest.mark.parametrize("name", READS)
def test_a_bad_read_is_refused(worker: Worker, name: str) -> None:
    """Reading has its own ways to be wrong."""
    status, path = READS[name]
    answer = worker.get(path)
    expected = range(400, 500) if status == 4 else (status,)
    assert answer.status in expected, (answer.status, answer.body)
    assert answer.json()["error"]["reason"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/v1/shop/single/messages"),
        ("PUT", "/v1/shop/single"),
        ("GET", "/v1/shop/single/flush"),
    ],
)
def test_a_wrong_method_is_refused(worker: Worker, method: str, path: str) -> None:
    """405, in the same shape as every error."""
    answer = web.request(worker.address, method, path)
    assert answer.status == 405
    assert answer.reason == "MethodNotAllowed"


CALLS = (
    *(
        f"/v1/shop/single/subscriptions/none/{verb}"
        for verb in ("pull", "ack", "nack", "extend", "seek", "leave", "replay")
    ),
    "/v1/shop/single/commits",
    "/v1/shop/single/partitions/0/move",
    "/v1/shop/single/partitions/0/give-up",
)
UNREADABLE = {
    "not json": b"{nonsense",
    "not utf-8": b'{"consumer": "\xff"}',
    "nested too deep": b'{"consumer": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a list": b"[]",
}


@pytest.mark.parametrize("body", UNREADABLE)
@pytest.mark.parametrize("path", CALLS)
def test_a_call_with_an_unreadable_body_is_refused(worker: Worker, path: str, body: str) -> None:
    """400 with the body of every error: the outcome is known, nothing was done."""
    answer = worker.post(path, UNREADABLE[body])
    assert answer.status == 400, (answer.status, answer.body)
    error = answer.json()["error"]
    assert error["kind"] == "Invalid"
    assert error["reason"].isalnum()


@pytest.mark.parametrize("sent", [b"", b'{"messages": [{"val', b'{"messages": [{"value": "x"}]}'])
def test_half_a_body_stores_nothing(worker: Worker, sent: bytes) -> None:
    """The connection closes before the announced length: not a message, whatever came."""
    before = _ends(worker)
    host, _, port = worker.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/shop/single/messages HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n" + sent
        )
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        answer = connection.recv(4_096)
    assert not answer or answer.split()[1].startswith(b"4"), answer
    assert _ends(worker) == before


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"POST /v1/shop/single/messages HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/shop/single/messages HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/shop/single/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_http_is_refused(worker: Worker, sent: bytes) -> None:
    """Garbage on the port gets a 400 or a closed connection, and hurts nobody else."""
    before = _ends(worker)
    host, _, port = worker.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        connection.settimeout(10)
        answer = connection.recv(4_096)
    assert not answer or b" 400 " in answer.splitlines()[0], answer
    assert _ends(worker) == before
    assert worker.get("/healthz").status == 200
