"""Starting, draining, backpressure, and what a worker tells about itself."""

import asyncio
import json
import os
import signal
import time
import zlib
from pathlib import Path

import pytest

from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_testing.checker import verify
from tidewater_testing.evidence import load_table
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import alive, wait_until
from tidewater_testing.traffic import Load, Traffic
from tidewater_testing.web import Connection

TOPIC = "shop/orders"
SLOW_FLUSH = {"partitions": 2, "writer": {"flushInterval": "1h"}, "freshness": "1h"}


async def test_sigterm_drains_and_commits(tmp_path: Path) -> None:
    """Under load: answers in flight are given, the rest is refused, the table has all of it."""
    with Worker(tmp_path / "w", [topic_manifest(TOPIC, SLOW_FLUSH)]) as worker:
        pids = [worker.pid(victim) for victim in Victim]
        async with Traffic(Load(worker.address, TOPIC, partitions=2, give_up_s=90)) as traffic:
            await asyncio.sleep(1.0)
            begun = time.monotonic()
            code = await asyncio.to_thread(worker.stop)
            assert code == 0, worker.process.log_tail()
            assert time.monotonic() - begun < 30
            assert not any(alive(pid) for pid in pids), "a process was left behind"
            properties, root = worker.catalog_properties, worker.settings.log_root
            acked = list(traffic.record.acked)
            assert acked
            verify(properties, root, TOPIC, acked, flushed=True)
            worker.start()
            await asyncio.sleep(0.5)
        worker.flush(TOPIC)
        verify(properties, root, TOPIC, traffic.record.acked, flushed=True)


async def test_sigterm_is_bounded(tmp_path: Path) -> None:
    """A table process that hangs does not keep a worker from stopping; the log has the rows."""
    manifests = [topic_manifest(TOPIC, SLOW_FLUSH)]
    with Worker(tmp_path / "w", manifests, shutdown_deadline="3s") as worker:
        body = json.dumps({"messages": [{"value": "a:0:"}]})
        assert worker.post(f"/v1/{TOPIC}/messages?partition=0", body).status == 200
        worker.freeze(Victim.TABLE)
        begun = time.monotonic()
        await asyncio.to_thread(worker.stop)
        assert time.monotonic() - begun < 15, "the deadline of 3 s was not kept"
        worker.start()
        worker.flush(TOPIC)
        rows = load_table(worker.catalog_properties, TOPIC).scan().to_arrow()
        assert rows["value"].to_pylist() == [b"a:0:"]


def test_the_children_die_with_the_supervisor(tmp_path: Path) -> None:
    """Nothing is left to append to a log that the next worker opens."""
    with Worker(tmp_path / "w", [topic_manifest(TOPIC)]) as worker:
        children = [worker.pid(Victim.EDGE), worker.pid(Victim.TABLE)]
        worker.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in children), 10, "the children to die")


def test_a_second_worker_on_the_same_log_is_refused(tmp_path: Path) -> None:
    """G5: the lock on the log directory holds."""
    with Worker(tmp_path / "a", [topic_manifest(TOPIC)]) as first:
        second = Worker(
            tmp_path / "b",
            [topic_manifest(TOPIC)],
            catalog=first.catalog_properties,
            log_root=first.settings.log_root,
            coordination=Path(first.settings.coordination),
            worker_id="worker-1",
        )
        try:
            second.start(wait=False)
            wait_until(second.answers, 30, "the second worker to listen")
            path, body = f"/v1/{TOPIC}/messages", '{"messages": [{"value": "x"}]}'
            # Until it has tried the lock it says that the partition is being opened.
            wait_until(lambda: second.post(path, body).reason == "LogLocked", 30, "its refusal")
            assert second.post(path, body).status == 409
            answer = first.post(f"/v1/{TOPIC}/messages", '{"messages": [{"value": "x"}]}')
            assert answer.status == 200, "G5 One owner: the first owner was disturbed"
            first.flush(TOPIC)
        finally:
            second.process.kill()


@pytest.mark.timeout(120)
async def test_past_the_limits_producers_are_pushed_back(tmp_path: Path) -> None:
    """G6: many large requests at once get 429 with Retry-After, and memory stays bounded."""
    limits = Limits(
        request_bytes_max=ByteSize("2Mi"),
        message_bytes_max=ByteSize("1Mi"),
        group_bytes_max=ByteSize("1Mi"),
        inflight_bytes_max=ByteSize("4Mi"),
        partition_inflight_bytes_max=ByteSize("2Mi"),
    )
    spec = {"partitions": 1}
    with Worker(tmp_path / "w", [topic_manifest(TOPIC, spec)], limits=limits) as worker:
        body = json.dumps({"messages": [{"value": "x" * 900_000}]}).encode()

        async def send() -> list[tuple[int, bool]]:
            connection = Connection(worker.address)
            seen = []
            for _ in range(12):
                answer = await connection.request("POST", f"/v1/{TOPIC}/messages", body)
                seen.append((answer.status, answer.retry_after_s is not None))
            await connection.close()
            return seen

        sent = await asyncio.gather(*(send() for _ in range(24)))
        results = [pair for seen in sent for pair in seen]
        statuses = {status for status, _ in results}
        assert statuses <= {200, 429, 503}, statuses
        assert 200 in statuses
        assert all(retry for status, retry in results if status != 200)
        stored = sum(status == 200 for status, _ in results)
        (partition,) = worker.get(f"/v1/{TOPIC}").json()["partitions"]
        assert partition["end"] == stored, "G6 Bounded: a refused request was stored"


@pytest.mark.timeout(120)
async def test_a_request_over_partitions_is_refused_whole(tmp_path: Path) -> None:
    """G6: one partition has no room for its share, so the other must not store its own."""
    limits = Limits(
        request_bytes_max=ByteSize("2Mi"),
        message_bytes_max=ByteSize("1Mi"),
        group_bytes_max=ByteSize("1Mi"),
        partition_inflight_bytes_max=ByteSize("2Mi"),
    )
    manifest = topic_manifest(TOPIC, {"partitions": 2})
    with Worker(tmp_path / "w", [manifest], limits=limits) as worker:
        keys = {zlib.crc32(key.encode()) % 2: key for key in ("a", "b", "c", "d", "e", "f")}
        one_sided = [{"key": keys[0], "value": "x" * 900_000}]
        both = [{"key": keys[0], "value": "x" * 700_000}, {"key": keys[1], "value": "small"}]

        async def send(messages: list[dict[str, str]]) -> list[int]:
            body = json.dumps({"messages": messages}).encode()
            connection = Connection(worker.address)
            seen = []
            for _ in range(15):
                answer = await connection.request("POST", f"/v1/{TOPIC}/messages", body)
                assert answer.status in {200, 429}, answer.body
                seen.append(len(messages) if answer.status == 200 else 0)
            await connection.close()
            return seen

        loads = [send(both if i % 2 else one_sided) for i in range(16)]
        results = [count for seen in await asyncio.gather(*loads) for count in seen]
        assert 0 in results, "nobody was pushed back: the test does not reach its limit"
        partitions = worker.get(f"/v1/{TOPIC}").json()["partitions"]
        assert sum(p["end"] for p in partitions) == sum(results), "a refused request was stored"


def test_a_worker_opens_so_many_partitions_and_says_why_not_more(tmp_path: Path) -> None:
    manifest = topic_manifest(TOPIC, {"partitions": 3})
    worker = Worker(tmp_path / "w", [manifest], limits=Limits(partitions_max=2))

    def statuses() -> list[int]:
        body = '{"messages": [{"value": "x"}]}'
        path = f"/v1/{TOPIC}/messages?partition="
        return sorted(worker.post(f"{path}{number}", body).status for number in range(3))

    try:
        worker.start(wait=False)  # it is not ready while one of the three is closed
        wait_until(worker.answers, 60, "the worker to answer", 0.2)
        wait_until(lambda: statuses() == [200, 200, 429], 30, "two of three to be open", 0.2)
        assert b"TooManyPartitions" in worker.get(f"/v1/{TOPIC}").body
    finally:
        worker.process.kill()


def test_pages_about_itself(worker: Worker) -> None:
    """Health, metrics, OpenAPI, the list of topics, metadata and statistics."""
    assert worker.get("/healthz").status == 200
    assert worker.get("/readyz").json()["ready"] is True
    metrics = worker.get("/metrics").body.decode()
    assert "tidewater_" in metrics
    paths = worker.get("/openapi.json").json()["paths"]
    assert "/v1/{namespace}/{name}/messages" in paths
    names = {(t["namespace"], t["name"]) for t in worker.get("/v1/topics").json()["topics"]}
    assert names == {("shop", "orders"), ("shop", "single"), ("shop", "typed")}
    worker.post(f"/v1/{TOPIC}/messages?partition=1", '{"messages": [{"value": "x"}]}')
    flushed = worker.flush(TOPIC)
    assert flushed["frontier"]["1"] >= 1
    meta = worker.get(f"/v1/{TOPIC}").json()
    assert [p["partition"] for p in meta["partitions"]] == [0, 1, 2]
    assert meta["partitions"][1]["frontier"] == flushed["frontier"]["1"]
    assert meta["partitions"][1]["lag"] == 0
    statistics = worker.get(f"/v1/{TOPIC}/stats").json()
    assert statistics["counters"]["messages"] >= 1
    assert "table" in statistics


def test_a_worker_without_a_table_process_still_takes_messages(tmp_path: Path) -> None:
    """Acknowledgement is the log's alone: the table process may be dead for a while."""
    with Worker(tmp_path / "w", [topic_manifest(TOPIC, {"partitions": 1})]) as worker:
        body = '{"messages": [{"value": "a:0:"}]}'
        assert worker.post(f"/v1/{TOPIC}/messages", body).status == 200
        frozen = worker.freeze(Victim.TABLE)
        begun = time.monotonic()
        assert worker.post(f"/v1/{TOPIC}/messages", body.replace("0", "1")).status == 200
        assert time.monotonic() - begun < 2
        assert worker.get(f"/v1/{TOPIC}/messages?offset=1").json()["messages"][0]["value"] == "a:1:"
        assert worker.get(f"/v1/{TOPIC}").status == 200
        worker.thaw(frozen)
        worker.flush(TOPIC)


async def test_pipelined_requests_are_answered_in_order(worker: Worker) -> None:
    """Many requests on one connection before the first answer, good and bad ones mixed."""
    host, _, port = worker.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    wanted = []
    for i in range(60):
        good = i % 5 != 2
        body = json.dumps({"messages": [{"value": f"pipe {i}"}]}).encode() if good else b"{bad"
        method = b"GET" if i % 13 == 7 else b"POST"
        path = b"/healthz" if method == b"GET" else b"/v1/shop/single/messages"
        head = b"%b %b HTTP/1.1\r\nHost: x\r\n" % (method, path)
        if method == b"POST":
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
                len(body),
                body,
            )
            wanted.append(200 if good else 400)
        else:
            head += b"\r\n"
            wanted.append(200)
        writer.write(head)
    await writer.drain()
    statuses = []
    offsets = []
    for _ in wanted:
        status, body = await _read_one(reader)
        statuses.append(status)
        if b'"acks"' in body:
            offsets.append(json.loads(body)["acks"][0]["offset"])
    writer.close()
    await writer.wait_closed()
    assert statuses == wanted
    assert offsets == sorted(offsets), "order within a partition"


async def _read_one(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split()[1])
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().splitlines()
        if line.startswith(b"content-length")
    )
    return status, await reader.readexactly(length)


def test_a_signal_to_the_supervisor_twice_is_fine(tmp_path: Path) -> None:
    """An impatient second SIGTERM does no harm."""
    with Worker(tmp_path / "w", [topic_manifest(TOPIC)]) as worker:
        os.kill(worker.process.pid, signal.SIGTERM)
        time.sleep(0.05)
        assert worker.stop() == 0


def test_pandas_is_imported_before_the_first_message(tmp_path: Path) -> None:
    """G6 Bounded: pyarrow imports it wherever it is; no message waits those seconds."""
    noted = tmp_path / "imported"
    package = tmp_path / "packages" / "pandas"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import pathlib, sys\n"
        f"with pathlib.Path({str(noted)!r}).open('a') as out: out.write(sys.argv[0] + '\\n')\n"
        "raise ImportError('not a real one')\n"
    )
    path = ("env", f"PYTHONPATH={package.parent}")
    with Worker(tmp_path / "w", [topic_manifest(TOPIC)], command_prefix=path) as worker:
        before = noted.read_text()
        assert "edge" in before
        assert worker.post(f"/v1/{TOPIC}/messages", '{"messages": [{"value": "x"}]}').status == 200
        assert noted.read_text().count("edge") == before.count("edge")
