"""Connections are bounded in number, and nobody keeps one without saying what for (G6)."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tidewater_core.settings import Limits
from tidewater_core.units import Duration
from tidewater_testing.parts.worker import Worker, topic_manifest

MOST = 6
STALL = "2s"
WAIT_S = 30.0
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: w\r\n\r\n"
BEGUN = {
    "nothing": b"",
    "half a head": b"POST /v1/shop/orders/messages HTTP/1.1\r\nhost: w\r\n",
    "half a message": b"POST /v1/shop/orders/messages HTTP/1.1\r\nhost: w\r\n"
    b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{",
    "half of another request": b"POST /v1/shop/orders/partitions/0/move HTTP/1.1\r\nhost: w\r\n"
    b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{",
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    limits = Limits(connections_max=MOST, stall_max=Duration(STALL))
    manifests = [topic_manifest("shop/orders", {"partitions": 1})]
    with Worker(tmp_path_factory.mktemp("connections") / "w", manifests, limits=limits) as worker:
        yield worker


def _connect(worker: Worker) -> socket.socket:
    host, _, port = worker.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def _is_healthy(connection: socket.socket) -> bool:
    connection.sendall(HEALTH)
    answer = b""
    while not answer.endswith(b"ok\n"):
        piece = connection.recv(1000)
        if not piece:
            return False
        answer += piece
    return True


def test_one_too_many_is_told_so(worker: Worker) -> None:
    connections = [_connect(worker) for _ in range(MOST)]
    try:
        for connection in connections:
            assert _is_healthy(connection)
        with _connect(worker) as refused:
            answer = refused.recv(1000)
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"TooManyConnections" in answer
            assert b"retry-after: 1" in answer
            assert refused.recv(1000) == b"", "it is closed"
        connections.pop().close()
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with _connect(worker) as again, suppress(ConnectionError):
                if _is_healthy(again):
                    return
            time.sleep(0.1)
        pytest.fail("G6 Bounded: a closed connection leaves room for another")
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN.keys())
def test_who_stops_talking_is_cut_off(worker: Worker, begun: bytes) -> None:
    with _connect(worker) as connection:
        connection.sendall(begun)
        with suppress(ConnectionResetError):
            assert connection.recv(1000) == b"", "G6 Bounded: nothing was asked"


def test_who_only_waits_between_requests_stays(worker: Worker) -> None:
    with _connect(worker) as connection:
        assert _is_healthy(connection)
        time.sleep(5)
        assert _is_healthy(connection)
