"""Readers at a worker that does not own the partition: HTTP, sockets and Flight alike (G3)."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tidewater_testing.parts.pair import move, two_workers
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.sockets import Dialled

RAW = "shop/raw"
TYPED = "shop/typed"
SCHEMA = {"fields": [{"name": "region", "type": "string"}, {"name": "amount", "type": "long"}]}
FRESH = {"writer": {"flushInterval": "200ms"}}
SLOW = {"writer": {"flushInterval": "10m"}, "freshness": "20m"}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """Two workers with Flight; partition 1 of every topic is b's."""
    directory = tmp_path_factory.mktemp("readers")
    manifests = [
        topic_manifest(RAW, {"partitions": 2, **FRESH}),
        topic_manifest(TYPED, {"partitions": 2, "schema": SCHEMA, **SLOW}),
    ]
    with two_workers(directory, manifests, [RAW, TYPED], flight=True) as found:
        yield found


def produce(worker: Worker, topic: str, number: int, values: list[Any]) -> int:
    """Store messages; return the first offset."""
    body = json.dumps({"messages": [{"key": "k", "value": value} for value in values]})
    offsets: list[int] = []

    def done() -> bool:
        answer = worker.post(f"/v1/{topic}/messages?partition={number}", body)
        assert answer.status in (200, 503), answer.body
        if answer.status == 200:
            offsets.append(answer.json()["acks"][0]["offset"])
        return answer.status == 200

    wait_until(done, 30, "messages to be taken", 0.1)
    return offsets[0]


def connect(worker: Worker) -> flight.FlightClient:
    return flight.connect(f"grpc://127.0.0.1:{worker.settings.flight_port}")


def test_a_socket_reads_what_another_worker_has(workers: dict[str, Worker]) -> None:
    """From history to live, with credit, in JSON and Arrow; the partition moves meanwhile."""
    first = produce(workers["b"], RAW, 1, [f"s{i}" for i in range(5)])
    with Dialled(workers["a"], RAW) as dialled:
        said = dialled.ask(read={"id": 1, "partition": 1, "offset": first, "credit": 100})
        assert said["reading"]["offset"] == first
        got = dialled.messages(5)
        assert [m["value"] for m in got] == [f"s{i}" for i in range(5)]
        begun = time.monotonic()
        produce(workers["b"], RAW, 1, ["live"])
        (live,) = dialled.messages(1)
        assert live["value"] == "live"
        assert time.monotonic() - begun < 3
        move(workers["a"], RAW, 1, "a")
        produce(workers["b"], RAW, 1, ["moved-1"])
        assert dialled.messages(1)[0]["value"] == "moved-1", "it goes on at the next owner"
        move(workers["a"], RAW, 1, "b")
        last = produce(workers["a"], RAW, 1, ["moved-2"])
        assert dialled.messages(1)[0]["value"] == "moved-2"
        latest = dialled.ask(read={"id": 2, "partition": 1, "position": "latest", "credit": 9})
        assert latest["reading"]["offset"] == last + 1
        arrow = {"id": 3, "partition": 1, "offset": last, "credit": 9, "format": "arrow"}
        dialled.say(read=arrow)
        assert dialled.hear()["reading"]["end_offset"] == last + 1
        _, table = dialled.hear_arrow()
        assert table["value"].to_pylist() == [b"moved-2"]


def test_a_socket_produces_to_another_worker(workers: dict[str, Worker]) -> None:
    with Dialled(workers["a"], RAW) as dialled:
        said = dialled.ask(produce={"id": 1, "partition": 1, "messages": [{"value": "via"}]})
        (ack,) = said["ack"]["acks"]
        path = f"/v1/{RAW}/messages?partition=1&offset={ack['offset']}"
        assert workers["b"].get(path).json()["messages"][0]["value"] == "via"


def test_flight_reads_and_writes_at_another_worker(workers: dict[str, Worker]) -> None:
    batch = pa.record_batch({"value": pa.array([b"f0", b"f1", b"f2"])})
    with connect(workers["a"]) as client:
        command = json.dumps({"topic": RAW, "partition": 1}).encode()
        writer, reader = client.do_put(flight.FlightDescriptor.for_command(command), batch.schema)
        writer.write_batch(batch)
        (ack,) = json.loads(reader.read().to_pybytes())["acks"]
        writer.close()
        at = ack["offset"]
        ticket = flight.Ticket(f"{RAW}@1:{at}-{at + 3}".encode())
        table = client.do_get(ticket).read_all()
        assert table["value"].to_pylist() == [b"f0", b"f1", b"f2"]
        assert table["tw_offset"].to_pylist() == [at, at + 1, at + 2]
        with connect(workers["b"]) as owner:
            assert owner.do_get(ticket).read_all().equals(table), "the same bytes"


def test_flight_tells_where_each_partition_is(workers: dict[str, Worker]) -> None:
    """Each endpoint names its owner; whoever asks there is served, and so is who does not."""
    produce(workers["a"], RAW, 0, ["zero"])
    end = produce(workers["a"], RAW, 1, ["one"]) + 1
    with connect(workers["a"]) as client:
        info = client.get_flight_info(flight.FlightDescriptor.for_path(*RAW.split("/")))
        here, there = info.endpoints
        assert [place.uri for place in here.locations] == []
        port = workers["b"].settings.flight_port
        assert [place.uri for place in there.locations] == [f"grpc://127.0.0.1:{port}".encode()]
        assert there.ticket.ticket == f"{RAW}@1:0-{end}".encode()
        with flight.connect(there.locations[0]) as owner:
            assert owner.do_get(there.ticket).read_all().num_rows == end
        assert client.do_get(there.ticket).read_all().num_rows == end
        (listed,) = client.list_flights(RAW.encode())
        assert [len(each.locations) for each in listed.endpoints] == [0, 1]
        exact = client.get_flight_info(
            flight.FlightDescriptor.for_command(f"{RAW}@1:{end - 1}-".encode())
        )
        assert exact.total_records == 1


def test_flight_follows_a_partition_of_another_worker(workers: dict[str, Worker]) -> None:
    first = produce(workers["b"], RAW, 1, ["x0"])
    got: list[bytes] = []
    with connect(workers["a"]) as client:
        descriptor = flight.FlightDescriptor.for_command(f"{RAW}@1:{first}-".encode())
        writer, reader = client.do_exchange(descriptor)

        def listen() -> None:
            while len(got) < 2:
                chunk = reader.read_chunk()
                if chunk.data is not None:
                    got.extend(chunk.data["value"].to_pylist())

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        wait_until(lambda: got == [b"x0"], 15, "what was there", 0.02)
        produce(workers["b"], RAW, 1, ["x1"])
        listening.join(15)
        assert got == [b"x0", b"x1"]
        reader.cancel()
        with suppress(flight.FlightCancelledError):
            writer.close()


@pytest.mark.parametrize("via", ["a", "b"])
def test_some_columns(workers: dict[str, Worker], via: str) -> None:
    """`columns` on every way to read, at the owner and elsewhere."""
    row = {"region": "eu", "amount": 7}
    at = produce(workers["b"], TYPED, 1, [row])
    path = f"/v1/{TYPED}/messages?partition=1&offset={at}&limit=1"
    (message,) = workers[via].get(f"{path}&columns=amount").json()["messages"]
    assert message["value"] == {"amount": 7}
    assert "key" not in message
    (message,) = workers[via].get(f"{path}&columns=tw_key,region").json()["messages"]
    assert (message["key"], message["value"]) == ("k", {"region": "eu"})
    (message,) = workers[via].get(f"{path}&columns=").json()["messages"]
    assert set(message) == {"partition", "offset", "time"}
    refused = workers[via].get(f"{path}&columns=colour")
    assert (refused.status, refused.reason) == (400, "UnknownColumn")
    with connect(workers[via]) as client:
        ticket = flight.Ticket(f"{TYPED}@1:{at}-{at + 1}?columns=amount".encode())
        table = client.do_get(ticket).read_all()
        assert table.column_names == ["tw_partition", "tw_offset", "tw_time", "amount"]
        assert table["amount"].to_pylist() == [7]
        with pytest.raises(pa.ArrowInvalid, match="UnknownColumn"):
            client.do_get(flight.Ticket(f"{TYPED}@1:-?columns=colour".encode())).read_all()
    with Dialled(workers[via], TYPED) as dialled:
        read = {"id": 1, "partition": 1, "offset": at, "credit": 1, "columns": ["region"]}
        dialled.ask(read=read)
        assert dialled.messages(1)[0]["value"] == {"region": "eu"}


@pytest.mark.parametrize("via", ["a", "b"])
def test_committed_reads_see_what_sql_sees(workers: dict[str, Worker], via: str) -> None:
    at = produce(workers["b"], TYPED, 1, [{"region": "us", "amount": 1}])
    path = f"/v1/{TYPED}/messages?partition=1&offset={at}"
    assert len(workers[via].get(path).json()["messages"]) == 1
    page = workers[via].get(f"{path}&isolation=committed&wait_ms=100").json()
    assert (page["messages"], page["end_offset"] <= at) == ([], True)
    waiting: list[Any] = []

    def wait() -> None:
        waiting.append(workers[via].get(f"{path}&isolation=committed&wait_ms=20000").json())

    reading = threading.Thread(target=wait)
    reading.start()
    workers[via].flush(TYPED)
    reading.join(30)
    assert [m["value"]["region"] for m in waiting[0]["messages"]] == ["us"]
    assert waiting[0]["end_offset"] == at + 1
    with connect(workers[via]) as client:
        ticket = flight.Ticket(f"{TYPED}@1:{at}-?isolation=committed".encode())
        assert client.do_get(ticket).read_all().num_rows == 1
