"""Reading without a subscription: one ordered stream over table, log files and memory (G3)."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidewater_testing import web
from tidewater_testing.evidence import load_table
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
ARROW = "application/vnd.apache.arrow.stream"


def _produce(worker: Worker, values: list[str], topic: str = TOPIC, query: str = "") -> Any:
    body = json.dumps({"messages": [{"value": value} for value in values]})
    answer = worker.post(f"/v1/{topic}/messages?partition=0{query}", body)
    assert answer.status == 200, answer.body
    return answer.json()


def _page(worker: Worker, query: str, topic: str = TOPIC) -> Any:
    answer = worker.get(f"/v1/{topic}/messages?partition=0&{query}")
    assert answer.status == 200, answer.body
    return answer.json()


def test_pages_follow_each_other(worker: Worker) -> None:
    """`next_offset` of one page is the `offset` of the next."""
    offset = _produce(worker, [f"page {i}" for i in range(25)])["acks"][0]["offset"]
    got: list[str] = []
    end = offset + 25
    while offset < end:
        page = _page(worker, f"offset={offset}&limit=7")
        got += [message["value"] for message in page["messages"]]
        offset = page["next_offset"]
    assert got[:25] == [f"page {i}" for i in range(25)]


def test_the_end_is_an_empty_page(worker: Worker) -> None:
    """At the end there is nothing, and that is no error."""
    end = _produce(worker, ["x"])["acks"][0]["offset"] + 1
    page = _page(worker, f"offset={end}")
    assert page == {"messages": [], "next_offset": end, "end_offset": end}


def test_a_long_poll_returns_when_a_message_comes(worker: Worker) -> None:
    """`wait_ms` waits, but not longer than it must."""
    end = _produce(worker, ["x"])["acks"][0]["offset"] + 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_page, worker, f"offset={end}&wait_ms=20000")
        time.sleep(0.3)
        begun = time.monotonic()
        _produce(worker, ["the one"])
        page = waiting.result(timeout=10)
    assert [message["value"] for message in page["messages"]] == ["the one"]
    assert time.monotonic() - begun < 5


def test_a_long_poll_ends_empty(worker: Worker) -> None:
    """After `wait_ms` the answer is an empty page."""
    end = _produce(worker, ["x"])["acks"][0]["offset"] + 1
    begun = time.monotonic()
    assert _page(worker, f"offset={end}&wait_ms=300")["messages"] == []
    assert 0.25 < time.monotonic() - begun < 5


def test_a_key_always_goes_to_the_same_partition(worker: Worker) -> None:
    """Whatever the format and the batch."""
    seen: dict[str, set[int]] = {}
    for _ in range(3):
        for i in range(12):
            body = json.dumps({"messages": [{"key": f"key{i}", "value": "x"}]})
            acks = worker.post(f"/v1/{TOPIC}/messages", body).json()["acks"]
            seen.setdefault(f"key{i}", set()).add(acks[0]["partition"])
    assert all(len(partitions) == 1 for partitions in seen.values()), seen
    assert len(set.union(*seen.values())) == 3


def test_ack_table_means_that_the_table_has_it(worker: Worker) -> None:
    """The answer comes with the snapshot in which the message is."""
    value = "in the table"
    answer = _produce(worker, [value], query="&ack=table")
    table = load_table(worker.catalog_properties, TOPIC)
    offset = answer["acks"][0]["offset"]
    rows = table.scan(
        row_filter=f"tw_partition = 0 and tw_offset = {offset}", snapshot_id=answer["snapshot_id"]
    ).to_arrow()
    assert rows["value"].to_pylist() == [value.encode()]


def test_a_timestamp_finds_its_place(worker: Worker) -> None:
    """The first message that is not older than the time given."""
    offsets = []
    for i in range(4):
        offsets.append(_produce(worker, [f"t{i}"])["acks"][0]["offset"])
        time.sleep(0.03)
    messages = _page(worker, f"offset={offsets[0]}&limit=1000")["messages"]
    times = {message["offset"]: message["time"] for message in messages}
    for offset in offsets:
        page = _page(worker, f"timestamp={times[offset]}&limit=1")
        assert page["messages"][0]["offset"] == offset
    moment = datetime.fromisoformat(times[offsets[2]]).timestamp()
    page = _page(worker, f"timestamp={int(moment * 1000)}&limit=1")
    assert page["messages"][0]["offset"] == offsets[2]
    far = _page(worker, "timestamp=2999-01-01T00:00:00Z&limit=1")
    assert far["messages"] == []


def test_one_stream_over_table_log_and_memory(tmp_path: Path) -> None:
    """The log has let go of its first segments, memory holds a few: a read sees every offset."""
    spec = {
        "partitions": 1,
        "log": {
            "segmentSize": "64Ki",
            "tailCache": "64Ki",
            "retention": {"time": "0s", "size": "0"},
        },
        "writer": {"flushInterval": "100ms"},
    }
    topic = "shop/stream"
    count = 60
    with Worker(tmp_path / "w", [topic_manifest(topic, spec)]) as worker:
        for i in range(count):
            _produce(worker, [f"m{i}-{j}".ljust(500, ".") for j in range(20)], topic)
        worker.flush(topic)

        def log_start() -> int:
            (partition,) = worker.get(f"/v1/{topic}").json()["partitions"]
            return int(partition["log_start"])

        wait_until(lambda: log_start() > 0, 30, "the first segments to be deleted", 0.2)
        for i in range(5):
            _produce(worker, [f"m{count + i}-{j}".ljust(500, ".") for j in range(20)], topic)
        begin = log_start()
        total = (count + 5) * 20
        path = f"/v1/{topic}/messages?partition=0&offset="
        for offset in (0, 17, begin - 1, begin, begin + 1, total - 1):
            answer = web.request(
                worker.address, "GET", f"{path}{offset}&limit={total}", headers={"Accept": ARROW}
            )
            table = pa.ipc.open_stream(answer.body).read_all()
            assert table["tw_offset"].to_pylist() == list(range(offset, total)), "G3 One stream"
            first = table["value"][0].as_py().decode()
            assert first.startswith(f"m{offset // 20}-{offset % 20}."), "G3 One stream"
        page = _page(worker, f"offset={begin - 3}&limit=6", topic)
        assert [m["offset"] for m in page["messages"]] == list(range(begin - 3, begin + 3))
