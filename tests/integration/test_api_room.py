"""G6 Bounded: bodies that come slowly, or never end, are held against what a worker may hold."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.sockets import Dialled

TOPIC = "shop/single"
PRODUCE = f"/v1/{TOPIC}/messages"
MIB = 1024 * 1024
INFLIGHT_BYTES_MAX = 16 * MIB
CLIENTS = 16
SOCKETS = 12
VALUE = "x" * 900_000
LIMITS = Limits(
    request_bytes_max=ByteSize("2Mi"),
    message_bytes_max=ByteSize("1Mi"),
    group_bytes_max=ByteSize("1Mi"),
    inflight_bytes_max=ByteSize("16Mi"),
    partition_inflight_bytes_max=ByteSize("16Mi"),
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker that may hold little."""
    directory = tmp_path_factory.mktemp("worker")
    manifest = topic_manifest(TOPIC, {"partitions": 1})
    with Worker(directory, [manifest], limits=LIMITS) as part:
        yield part


def _inflight(worker: Worker) -> int:
    lines = worker.get("/metrics").body.decode().splitlines()
    (found,) = [line for line in lines if line.startswith("tidewater_inflight_bytes ")]
    return int(found.split()[1])


def _settled(worker: Worker) -> int:
    """Return what is held when no more comes."""
    found = _inflight(worker)
    while True:
        time.sleep(0.3)
        before, found = found, _inflight(worker)
        if found == before:
            return found


class Slow:
    """A client that sends all of a body but its last byte."""

    def __init__(self, worker: Worker, path: str, body: bytes) -> None:
        host, _, port = worker.address.rpartition(":")
        self._rest = body[-1:]
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        head = b"POST %b HTTP/1.1\r\nhost: w\r\ncontent-type: application/json\r\n"
        head += b"content-length: %d\r\nconnection: close\r\n\r\n"
        self._socket.sendall(head % (path.encode(), len(body)) + body[:-1])

    def finish(self) -> tuple[int, bytes]:
        """Send the last byte; return the status and all that was said."""
        said = b""
        self._socket.sendall(self._rest)
        while piece := self._socket.recv(65_536):
            said += piece
        return int(said.split()[1]), said

    def __enter__(self) -> "Slow":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _body(value: str = VALUE, messages: int = 2) -> bytes:
    return json.dumps({"messages": [{"value": value}] * messages}).encode()


WAYS = {
    "produce": PRODUCE,
    "produce by the ordinary way": "/v1/shop/singl%65/messages",
    "a call of a subscription": f"/v1/{TOPIC}/subscriptions/none/ack",
    "a call between workers": f"/v1/{TOPIC}/commits",
}


@pytest.mark.parametrize("way", WAYS)
def test_unfinished_bodies_are_bounded(worker: Worker, way: str) -> None:
    """Past the limit bodies are let go; small requests get through, and so do those before it."""
    with ExitStack() as clients:
        slow = [clients.enter_context(Slow(worker, WAYS[way], _body())) for _ in range(CLIENTS)]
        held = _settled(worker)
        assert INFLIGHT_BYTES_MAX // 2 < held <= INFLIGHT_BYTES_MAX, (
            f"G6 Bounded: {held} bytes are held"
        )
        answer = worker.post(PRODUCE, '{"messages": [{"value": "small"}]}')
        assert answer.status == 200, answer.body
        said = [client.finish() for client in slow]
    statuses = [status for status, _ in said]
    assert set(statuses) >= {429}, statuses
    for status, text in said:
        assert (b'"WorkerBusy"' in text) == (b"retry-after: 1" in text) == (status == 429), text
    if way.startswith("produce"):
        assert statuses.count(200) >= 1, "G6 Bounded: nobody got through"
        assert set(statuses) == {200, 429}
    wait_until(lambda: _inflight(worker) == 0, 10, "nothing to be held")


def test_who_goes_away_gives_back(worker: Worker) -> None:
    for path in WAYS.values():
        with Slow(worker, path, _body()):
            wait_until(lambda: _inflight(worker) > MIB, 10, "the body to be held")
        wait_until(lambda: _inflight(worker) == 0, 10, "nothing to be held")


@pytest.mark.parametrize("path", [PRODUCE, "/v1/shop/singl%65/messages"])
def test_a_largest_request_finds_room_alone(tmp_path: Path, path: str) -> None:
    """Where one request may be all that a worker holds, it is taken."""
    limits = Limits(
        request_bytes_max=ByteSize("4Mi"),
        message_bytes_max=ByteSize("4Mi"),
        group_bytes_max=ByteSize("4Mi"),
        inflight_bytes_max=ByteSize("4Mi"),
        partition_inflight_bytes_max=ByteSize("4Mi"),
    )
    with Worker(tmp_path / "w", [topic_manifest(TOPIC)], limits=limits) as worker:
        body = _body("x" * (4 * MIB - 1024), 1)
        with Slow(worker, path, body) as client:
            wait_until(lambda: _inflight(worker) == len(body) - 1, 10, "the body to come")
            status, said = client.finish()
        assert status == 200, said


def _command(worker: Worker, id_: int, go_on: threading.Event) -> dict[str, Any]:
    """Send all of a command but its last byte, that when told to; return the answer."""
    said = json.dumps({"produce": {"id": id_, "messages": [{"value": VALUE}] * 2}}).encode()
    frame = b"\x81\xff" + len(said).to_bytes(8, "big") + bytes(4) + said
    with Dialled(worker, TOPIC) as ws:
        ws.send_bytes(frame[:-1])  # waits if it is not read
        go_on.wait()
        ws.send_bytes(frame[-1:])
        return ws.hear()


def test_unfinished_messages_of_sockets_wait_for_room(worker: Worker) -> None:
    """Nobody is cut off while others finish; each command has its answer."""
    go_on = threading.Event()
    with ThreadPoolExecutor(SOCKETS) as threads:
        answers = [threads.submit(_command, worker, id_, go_on) for id_ in range(SOCKETS)]
        try:
            wait_until(lambda: _inflight(worker) > MIB, 10, "messages to be held")
            held = _settled(worker)
            answer = worker.post(PRODUCE, '{"messages": [{"value": "small"}]}')
        finally:
            go_on.set()
        said = [answer.result() for answer in answers]
    assert held <= INFLIGHT_BYTES_MAX, f"G6 Bounded: {held} bytes are held"
    assert answer.status == 200, answer.body
    assert [found.get("ack", {}).get("id") for found in said] == list(range(SOCKETS)), said
    wait_until(lambda: _inflight(worker) == 0, 10, "nothing to be held")
