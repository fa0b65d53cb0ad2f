"""Arrow Flight on a real worker: what HTTP stores Flight reads, and the other way round."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import free_ports

SINGLE = "shop/single"
ORDERS = "shop/orders"


def with_flight(directory: Path, manifests: list[str], limits: Limits | None = None) -> Worker:
    """Prepare a worker that serves Flight, too."""
    worker = Worker(directory, manifests, limits=limits)
    (port,) = free_ports(1)
    worker.settings = replace(worker.settings, flight_port=port)
    (directory / "settings.json").write_text(worker.settings.to_json())
    return worker


def connect(worker: Worker) -> flight.FlightClient:
    return flight.connect(f"grpc://127.0.0.1:{worker.settings.flight_port}")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker with Flight."""
    manifests = [
        topic_manifest(SINGLE, {"partitions": 1}),
        topic_manifest(ORDERS, {"partitions": 3}),
    ]
    limits = Limits(batch_rows_max=5_000, message_bytes_max=ByteSize("1Mi"))
    with with_flight(tmp_path_factory.mktemp("worker"), manifests, limits) as part:
        yield part


@pytest.fixture
def client(worker: Worker) -> Iterator[flight.FlightClient]:
    """Connect."""
    with connect(worker) as found:
        yield found


def batch(values: list[str], keys: list[str] | None = None) -> pa.RecordBatch:
    columns = {"value": pa.array([value.encode() for value in values], pa.binary())}
    if keys is not None:
        columns["key"] = pa.array([key.encode() for key in keys], pa.binary())
    return pa.record_batch(columns)


def put(
    client: flight.FlightClient,
    descriptor: flight.FlightDescriptor,
    batches: list[pa.RecordBatch],
    notes: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Send batches, all at once; return what was said to each."""
    writer, reader = client.do_put(descriptor, batches[0].schema)
    with writer:
        for number, each in enumerate(batches):
            if notes is None:
                writer.write_batch(each)
            else:
                writer.write_with_metadata(each, json.dumps(notes[number]).encode())
        writer.done_writing()
        said = []
        while (buffer := reader.read()) is not None:
            said.append(json.loads(buffer.to_pybytes()))
    return said


def to(topic: str, **options: Any) -> flight.FlightDescriptor:
    if options:
        return flight.FlightDescriptor.for_command(json.dumps({"topic": topic, **options}))
    return flight.FlightDescriptor.for_path(*topic.split("/"))


def get(client: flight.FlightClient, ticket: str) -> pa.Table:
    return client.do_get(flight.Ticket(ticket.encode())).read_all()


def test_put_and_get(worker: Worker, client: flight.FlightClient) -> None:
    """Each batch has its ack; both edges read the same messages."""
    said = put(client, to(SINGLE), [batch([f"{b}-{i}" for i in range(100)]) for b in range(20)])
    assert [each["batch"] for each in said] == list(range(20))
    offsets = [each["acks"][0]["offset"] for each in said]
    assert offsets == list(range(offsets[0], offsets[0] + 2_000, 100))
    table = get(client, f"{SINGLE}@0:{offsets[0]}-{offsets[0] + 2_000}")
    assert table.column("tw_offset").to_pylist() == list(range(offsets[0], offsets[0] + 2_000))
    flown = [value.decode() for value in table.column("value").to_pylist()]
    assert flown == [f"{b}-{i}" for b in range(20) for i in range(100)]
    answer = worker.get(f"/v1/{SINGLE}/messages?offset={offsets[0]}&limit=2000").json()
    assert [m["value"] for m in answer["messages"]] == flown


def test_get_is_one_stream_from_table_and_log(worker: Worker, client: flight.FlightClient) -> None:
    """G3: from every source, any range, no row more and none less."""
    (first,) = put(client, to(SINGLE), [batch([f"t{i}" for i in range(3_000)])])
    begin = first["acks"][0]["offset"]
    worker.flush(SINGLE)
    put(client, to(SINGLE), [batch([f"t{i}" for i in range(3_000, 3_500)])])
    for start, end in ((0, 3_500), (1, 2), (2_990, 3_010), (3_499, 3_500), (7, 7)):
        table = get(client, f"{SINGLE}@0:{begin + start}-{begin + end}")
        values = [value.decode() for value in table.column("value").to_pylist()]
        assert values == [f"t{i}" for i in range(start, end)], "G3 One stream"
    everything = get(client, f"{SINGLE}@0:")
    assert everything.column("tw_offset").to_pylist() == list(range(begin + 3_500))


def test_keys_find_their_partition(worker: Worker, client: flight.FlightClient) -> None:
    keys = [f"k{i}" for i in range(60)]
    (said,) = put(client, to(ORDERS), [batch([f"v-{key}" for key in keys], keys)])
    assert [ack["partition"] for ack in said["acks"]] == [0, 1, 2]
    body = json.dumps({"messages": [{"key": key, "value": "x"} for key in keys]})
    answer = worker.post(f"/v1/{ORDERS}/messages", body).json()
    assert [a["count"] for a in answer["acks"]] == [a["count"] for a in said["acks"]]
    (said,) = put(client, to(ORDERS, partition=1), [batch(["a", "b"], ["k1", "k2"])])
    assert [(a["partition"], a["count"]) for a in said["acks"]] == [(1, 2)]


def test_a_re_send_is_stored_once(client: flight.FlightClient) -> None:
    """G8: by numbers that follow each other, and by those that the batches say."""
    batches = [batch([f"idem {i}"]) for i in range(5)]
    first = put(client, to(SINGLE, producer="p-flight", sequence=10), batches)
    again = put(client, to(SINGLE, producer="p-flight", sequence=10), batches)
    offsets = [each["acks"][0]["offset"] for each in first]
    assert [each["acks"][0]["offset"] for each in again] == offsets
    assert all(each["acks"][0]["duplicate"] for each in again)
    notes = [{"sequence": 14}, {"sequence": 20}]
    mixed = put(client, to(SINGLE, producer="p-flight"), batches[3:], notes)
    assert mixed[0]["acks"][0] == {**again[4]["acks"][0]}
    assert "duplicate" not in mixed[1]["acks"][0]


def test_an_ack_by_the_table(client: flight.FlightClient) -> None:
    (said,) = put(client, to(SINGLE, ack="table"), [batch(["in the table"])])
    assert isinstance(said["snapshot_id"], int)


def test_what_there_is(client: flight.FlightClient) -> None:
    listed = {b"/".join(info.descriptor.path).decode() for info in client.list_flights()}
    assert listed == {SINGLE, ORDERS}
    (only,) = client.list_flights(b"shop/o")
    assert len(only.endpoints) == 3
    put(client, to(SINGLE), [batch(["one more"])])
    info = client.get_flight_info(to(SINGLE))
    assert info.schema.names[:2] == ["tw_partition", "tw_offset"]
    (endpoint,) = info.endpoints
    assert client.do_get(endpoint.ticket).read_all().num_rows == info.total_records
    assert client.get_schema(to(SINGLE)).schema == info.schema


@pytest.mark.parametrize(
    ("ticket", "kind", "reason"),
    [
        ("shop/nowhere@0:", KeyError, "UnknownTopic"),
        ("shop/single@7:", KeyError, "UnknownPartition"),
        ("shop/single", pa.ArrowInvalid, "InvalidTicket"),
        ("shop/single@0:99999999-", pa.ArrowInvalid, "OffsetInFuture"),
    ],
)
def test_what_cannot_be_read(
    client: flight.FlightClient, ticket: str, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        get(client, ticket)


def test_what_cannot_be_written(client: flight.FlightClient) -> None:
    """The batches before a bad one are stored and acknowledged; none after it is."""
    wrong = [
        (to("shop/nowhere"), [batch(["x"])], KeyError, "UnknownTopic"),
        (to(SINGLE), [pa.record_batch({"nope": pa.array([1])})], pa.ArrowInvalid, "UnknownColumn"),
        (to(SINGLE, partition=9), [batch(["x"])], KeyError, "UnknownPartition"),
        (to(SINGLE), [batch(["x"] * 5_001)], pa.ArrowInvalid, "TooManyMessages"),
        (to(SINGLE), [batch(["x" * 1_100_000])], pa.ArrowInvalid, "MessageTooLarge"),
        (to(SINGLE, nonsense=1), [batch(["x"])], pa.ArrowInvalid, "InvalidDescriptor"),
    ]
    for descriptor, batches, kind, reason in wrong:
        with pytest.raises(kind, match=reason):
            put(client, descriptor, batches)
    writer, reader = client.do_put(to(SINGLE), batch(["x"]).schema)
    for values in (["good"], ["x"] * 5_001, ["never stored"]):
        try:
            writer.write_batch(batch(values))
        except (pa.ArrowException, OSError):
            break  # the worker has ended the stream already
    said = reader.read()
    assert said is not None
    end = json.loads(said.to_pybytes())["acks"][0]["offset"] + 1
    with pytest.raises(pa.ArrowInvalid, match="TooManyMessages"):
        writer.close()
    assert get(client, f"{SINGLE}@0:{end}-").num_rows == 0


def test_one_at_a_time(client: flight.FlightClient) -> None:
    """A client that waits for each ack before it sends the next."""
    writer, reader = client.do_put(to(SINGLE), batch(["x"]).schema)
    with writer:
        for number in range(20):
            writer.write_batch(batch([f"step {number}"]))
            assert json.loads(reader.read().to_pybytes())["batch"] == number
        writer.done_writing()


def test_following_live(worker: Worker, client: flight.FlightClient) -> None:
    """DoExchange: what was there, then what comes, once each."""
    (said,) = put(client, to(SINGLE), [batch(["before"])])
    begin = said["acks"][0]["offset"]
    descriptor = flight.FlightDescriptor.for_command(f"{SINGLE}@0:{begin}-")
    writer, reader = client.do_exchange(descriptor)
    assert json.loads(reader.read_chunk().app_metadata.to_pybytes())["next_offset"] == begin

    def produce() -> None:
        for i in range(10):
            body = json.dumps({"messages": [{"value": f"live {i}"}]})
            assert worker.post(f"/v1/{SINGLE}/messages", body).status == 200

    thread = threading.Thread(target=produce)
    thread.start()
    values: list[str] = []
    while len(values) < 11:
        chunk = reader.read_chunk()
        assert chunk.data.column("tw_offset")[0].as_py() == begin + len(values)
        values += [value.decode() for value in chunk.data.column("value").to_pylist()]
        note = json.loads(chunk.app_metadata.to_pybytes())
        assert note["next_offset"] == begin + len(values)
    thread.join()
    assert values == ["before", *(f"live {i}" for i in range(10))], "G3 One stream"
    reader.cancel()
    del writer, reader
    _, reader = client.do_exchange(flight.FlightDescriptor.for_command(f"{SINGLE}@5:0-"))
    with pytest.raises(KeyError, match="UnknownPartition"):
        reader.read_chunk()


def test_a_client_that_leaves_half_way(worker: Worker) -> None:
    """Nothing is left behind: the next ones are served, and what was sent is stored."""
    for _ in range(3):
        with connect(worker) as client:
            writer, _ = client.do_put(to(SINGLE), batch(["x"]).schema)
            writer.write_batch(batch(["left alone"] * 1_000))
            reader = client.do_get(flight.Ticket(f"{SINGLE}@0:".encode()))
            reader.read_chunk()
            reader.cancel()
            del writer, reader
    with connect(worker) as client:
        assert put(client, to(SINGLE), [batch(["fine"])])[0]["acks"][0]["count"] == 1


def test_kill_and_shutdown(tmp_path: Path) -> None:
    """G1 over kill -9; a stop in good order is not held up by an idle stream or a follower."""
    with with_flight(tmp_path / "w", [topic_manifest(SINGLE, {"partitions": 1})]) as worker:
        with connect(worker) as client:
            said = put(client, to(SINGLE), [batch([f"{b}"] * 100) for b in range(30)])
            worker.kill(Victim.EDGE)
        worker.wait_ready()
        with connect(worker) as client:
            values = get(client, f"{SINGLE}@0:").column("value").to_pylist()
            for number, each in enumerate(said):
                at = each["acks"][0]["offset"]
                assert values[at : at + 100] == [f"{number}".encode()] * 100, "G1 Durable"
            idle, _ = client.do_put(to(SINGLE), batch(["x"]).schema)
            idle.write_batch(batch(["last"]))
            _, reader = client.do_exchange(to(SINGLE))
            reader.read_chunk()
            began = time.monotonic()
            assert worker.stop() == 0
            assert time.monotonic() - began < 25, "the deadline of a shutdown is 30 s"
            with pytest.raises(flight.FlightUnavailableError):
                list(reader)
            del idle, reader
