"""Producers against a real worker: batches that form by themselves, Arrow in and out."""

import asyncio
import threading
from collections.abc import Iterator

import polars as pl
import pyarrow as pa
import pytest

from tidewater import AsyncClient, BatchOptions, Client, Invalid, Message, NotFound
from tidewater_testing.parts.worker import Worker, topic_manifest

COLUMNS = {"fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}]}
FLOATS = {
    "fields": [
        {"name": "d", "type": "double"},
        {"name": "f", "type": "float"},
        {"name": "l", "type": "list<double>"},
    ]
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    manifests = [
        topic_manifest("shop/posts", {"partitions": 3}),
        topic_manifest("shop/bad", {"partitions": 2}),
        topic_manifest("shop/raw", {"partitions": 2}),
        topic_manifest("shop/typed", {"partitions": 1, "schema": COLUMNS}),
        topic_manifest("shop/frames", {"partitions": 1, "schema": COLUMNS}),
        topic_manifest("shop/floats", {"partitions": 1, "schema": FLOATS}),
        topic_manifest("shop/async", {"partitions": 3}),
    ]
    with Worker(tmp_path_factory.mktemp("producer"), manifests) as part:
        yield part


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    with Client(f"http://{worker.address}", timeout_s=10) as found:
        yield found


def stored(client: Client, topic: str) -> dict[tuple[int, int], bytes]:
    reader = client.reader(topic)
    return {
        (message.partition, message.offset): message.value
        for number in client.admin.bounds(topic)
        for message in reader.messages(number)
    }


def test_posted_messages_share_requests_and_know_their_offsets(client: Client) -> None:
    with client.producer("shop/posts") as producer:
        futures = {}
        lock = threading.Lock()

        def post(name: int) -> None:
            for i in range(300):
                value = b"%d:%03d" % (name, i)
                future = producer.post(value, key=b"k%d" % name)
                with lock:
                    futures[value] = future

        threads = [threading.Thread(target=post, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush()
        acks = {value: future.result(0) for value, future in futures.items()}
    found = stored(client, "shop/posts")
    assert len(found) == 1200
    for value, ack in acks.items():
        assert found[ack.partition, ack.offset] == value
    for name in range(4):
        mine = [v for _, v in sorted(found.items()) if v.startswith(b"%d:" % name)]
        assert mine == sorted(mine), "messages of a key keep their order"
    requests = client.admin.stats("shop/posts")["counters"]["requests"]
    assert requests < 600, "far fewer requests than messages"


def test_a_message_that_is_refused_fails_alone(client: Client) -> None:
    producer = client.producer("shop/bad", batching=BatchOptions(linger_s=0.05))
    good = [producer.post(b"%d" % i) for i in range(10)]
    bad = producer.post(b"x", headers={"h": "v" * 10_000_000})
    more = [producer.post(b"%d" % i) for i in range(10, 20)]
    with pytest.raises(Invalid):
        bad.result(10)
    assert len({f.result(10).offset for f in good + more}) == 20
    with pytest.raises(Invalid):
        producer.flush()
    producer.close()
    with pytest.raises(NotFound):
        client.producer("shop/nothing").post(b"x")


async def test_the_asyncio_producer_posts_too(worker: Worker) -> None:
    async with (
        AsyncClient(f"http://{worker.address}") as client,
        client.producer("shop/async") as producer,
    ):
        futures = [await producer.post(b"%d" % i, key=b"%d" % i) for i in range(500)]
        await producer.flush()
        acks = await asyncio.gather(*futures)
        assert len({(ack.partition, ack.offset) for ack in acks}) == 500
        page = await client.reader("shop/async").page(acks[7].partition, acks[7].offset, limit=1)
        assert page.messages[0].value == b"7"


class Frame:
    """Hands out an Arrow stream as pandas and polars DataFrames do; nothing else is known of it."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_frames_go_in_and_tables_come_out(client: Client) -> None:
    views = pa.table(
        {
            "id": pa.array(range(120_000), pa.int32()),
            "name": pa.array([f"n{i % 7}" for i in range(120_000)], pa.string_view()),
            "__index_level_0__": pa.array(range(120_000)),
        }
    )
    producer = client.producer("shop/typed")
    produced = producer.send_table(Frame(views))
    assert sum(ack.count for ack in produced.acks) == 120_000
    assert len(produced.acks) > 1, "cut into requests that a worker takes"
    table = client.reader("shop/typed").read_table()
    assert table.column("id").to_pylist() == list(range(120_000))
    assert set(table.column("name").to_pylist()) == {f"n{i}" for i in range(7)}
    part = client.reader("shop/typed").read_table(0, start=10, stop=20)
    assert part.column("tw_offset").to_pylist() == list(range(10, 20))
    streamed = pa.table(client.reader("shop/typed").read_batches(0, 100, 100))
    assert (streamed.num_rows, streamed.schema) == (0, table.schema)
    with pytest.raises(Invalid, match="NotArrow"):
        producer.send_table([1, 2])


def test_floats_that_json_has_not(client: Client) -> None:
    """G7: by every way they are stored as they are, not as NULL."""
    nan, inf = float("nan"), float("inf")
    value = {"d": nan, "f": -inf, "l": [1.5, inf, None]}
    producer = client.producer("shop/floats")
    producer.send(value)
    producer.send_many([Message(value), Message({"d": 1.0})])
    posted = producer.post(value)
    producer.flush()
    posted.result()
    producer.send_table(
        pa.table({"d": [nan], "f": pa.array([-inf], pa.float32()), "l": [[1.5, inf, None]]})
    )
    table = client.reader("shop/floats").read_table()
    rows = [repr(row) for row in table.select(["d", "f", "l"]).to_pylist()]
    told = "{'d': nan, 'f': -inf, 'l': [1.5, inf, None]}"
    assert rows == [told, told, "{'d': 1.0, 'f': None, 'l': None}", told, told]


def test_frames_of_polars(client: Client) -> None:
    """A real one goes in and comes back equal."""
    frame = pl.DataFrame({"name": ["x", None, "ü"], "id": [8, 9, 10]})
    client.producer("shop/frames").send_table(frame)
    found = pl.DataFrame(client.reader("shop/frames").read_batches(0))
    assert found.select("name", "id").equals(frame)


def test_batches_with_keys_spread_over_partitions(client: Client) -> None:
    batch = pa.record_batch(
        {"value": pa.array([b"%d" % i for i in range(50)]),
         "tw_key": pa.array([b"%d" % i for i in range(50)])}
    )  # fmt: skip
    produced = client.producer("shop/raw").send_batches([batch, batch])
    assert {ack.partition for ack in produced.acks} == {0, 1}
    assert client.reader("shop/raw").read_table().num_rows == 100
    client.producer("shop/raw").send_many([Message("x", key="k")])
