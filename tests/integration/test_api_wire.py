"""What else than plain requests comes over a connection: offers to upgrade, and garbage."""

import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest

from tidewater_testing.parts.worker import Worker

WAIT_S = 10.0
SILENCE_S = 1.0
"""Behind an answer: that all is said."""
UNREAD_BYTES_MAX = 24 * 1024 * 1024
"""More than the kernel keeps for both sides."""
PRODUCE = "/v1/shop/single/messages"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\n"
BYTES = b"content-type: application/octet-stream\r\n"
CLOSE = b"connection: close\r\n"


def _request(body: bytes, more: bytes = b"", path: str = PRODUCE) -> tuple[bytes, bytes]:
    head = b"POST %b HTTP/1.1\r\nhost: w\r\n%bcontent-length: %d\r\n\r\n"
    return head % (path.encode(), more, len(body)), body


def _talk(worker: Worker, *packets: bytes) -> bytes:
    """Send packets one by one; return all that is said until the worker closes or is silent."""
    host, _, port = worker.address.rpartition(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets:
            connection.sendall(packet)
            time.sleep(0.05)
        with suppress(TimeoutError, ConnectionResetError):
            while piece := connection.recv(65_536):
                said += piece
                connection.settimeout(SILENCE_S)
    return said


def _end(worker: Worker) -> int:
    end: int = worker.get("/v1/shop/single").json()["partitions"][0]["end"]
    return end


def _values(worker: Worker, offset: int) -> list[Any]:
    page = worker.get(f"{PRODUCE}?partition=0&offset={offset}").json()
    return [message["value"] for message in page["messages"]]


def _statuses(said: bytes) -> list[int]:
    return [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]


@pytest.mark.parametrize("is_apart", [False, True], ids=["one packet", "a packet of its own"])
@pytest.mark.parametrize("more", [H2C, H2C + b"expect: 100-continue\r\n"], ids=["h2c", "expect"])
def test_who_offers_another_protocol_keeps_the_body(
    worker: Worker, is_apart: bool, more: bytes
) -> None:
    """G1, G7: the body is what is stored, and what follows it is another request."""
    before = _end(worker)
    first, body = _request(b"with an offer", more + BYTES)
    second = b"".join(_request(b"and one without", BYTES))
    packets = (first, body, second) if is_apart else (first + body + second,)
    said = _talk(worker, *packets)
    assert [status for status in _statuses(said) if status != 100] == [200, 200], said
    assert _values(worker, before) == ["with an offer", "and one without"]


def test_a_chunked_body_behind_an_offer(worker: Worker) -> None:
    """The second parser reads the body as the first would have, and the offers go on."""
    before = _end(worker)
    head = b"POST %b HTTP/1.1\r\nhost: w\r\n%btransfer-encoding: chunked\r\n\r\n"
    request = head % (PRODUCE.encode(), H2C + BYTES)
    whole = request + b"5\r\nhello\r\n0\r\n\r\n"
    said = _talk(worker, whole + whole + request, b"2\r\nyo\r\n", b"0\r\n\r\n")
    assert _statuses(said) == [200, 200, 200], said
    assert _values(worker, before) == ["hello", "hello", "yo"]


def test_a_body_that_is_a_request_is_no_request(worker: Worker) -> None:
    """Nobody's body becomes a request of the connection."""
    before = _end(worker)
    inner = b"".join(_request(b"smuggled", BYTES))
    said = _talk(worker, *_request(inner, H2C + BYTES))
    assert _statuses(said) == [200], said
    assert _values(worker, before) == [inner.decode()]


@pytest.mark.parametrize("is_apart", [False, True], ids=["one packet", "a packet of its own"])
def test_an_ordinary_call_behind_an_offer(worker: Worker, is_apart: bool) -> None:
    """A call with a body runs with that body, not with its defaults."""
    request = _request(b'{"max": "many"}', H2C + CLOSE, "/v1/shop/single/subscriptions/none/pull")
    said = _talk(worker, *(request if is_apart else (b"".join(request),)))
    assert _statuses(said) == [400], said
    assert b"InvalidBody" in said


def test_a_read_behind_an_offer_may_close(worker: Worker) -> None:
    """`Connection: close, Upgrade` still closes."""
    offer = b"connection: close, Upgrade\r\nupgrade: h2c\r\n"
    get = b"GET /healthz HTTP/1.1\r\nhost: w\r\n%b\r\n"
    said = _talk(worker, get % offer + get % b"")
    assert _statuses(said) == [200], said


def test_a_websocket_cannot_be_posted(worker: Worker) -> None:
    """The one protocol that is spoken has a way of its own."""
    before = _end(worker)
    said = _talk(worker, *_request(b"x", WEBSOCKET + BYTES))
    assert _statuses(said) == [404], said
    assert _end(worker) == before


TWICE = (
    b"tidewater-key: %b\r\n",
    b"Tidewater-Header-X: %b\r\n",
    b"tidewater-producer: p\r\ntidewater-sequence: %b\r\n",
    b"ce-type: %b\r\n",
)


@pytest.mark.parametrize("header", TWICE)
def test_nobody_chooses_between_two_headers(worker: Worker, header: bytes) -> None:
    """G7: a message has the key that its sender meant, or is refused."""
    before = _end(worker)
    headers = header % b"1" + header.lower() % b"2"
    said = _talk(worker, b"".join(_request(b"x", BYTES + CLOSE + headers)))
    assert _statuses(said) == [400], said
    assert b'"InvalidHeader"' in said
    assert _end(worker) == before


GOOD = b"".join(_request(b"good", BYTES))
GET = b"GET /healthz HTTP/1.1\r\nhost: w\r\n\r\n"
HUGE = b"GET / HTTP/1.1\r\nx: " + b"a" * 30_000
BROKEN = {
    "garbage": (b"BROKEN\r\n\r\n", 400),
    "a bad chunk": (
        b"POST %b HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n" % PRODUCE.encode(), 400,
    ),
    "a bad chunk of a call": (
        b"POST /v1/shop/single/flush HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400,
    ),
    "a tunnel": (b"CONNECT w:80 HTTP/1.1\r\nhost: w\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(
    ("due", "expected"),
    [
        (b"", []), (GOOD, [200]), (GOOD + GOOD, [200, 200]), (GET, [200]),
        (GET + GOOD + GET, [200, 200, 200]), (GOOD + GET, [200, 200]),
    ],
    ids=["nothing", "one", "two", "a read", "both", "a read behind one"],
)  # fmt: skip
def test_what_is_due_is_answered_before_garbage(
    worker: Worker, broken: str, due: bytes, expected: list[int]
) -> None:
    """G1: an answer is of its own request; the one that cannot be read is refused last."""
    before = _end(worker)
    packet, status = BROKEN[broken]
    said = _talk(worker, due + packet)
    assert _statuses(said) == [*expected, status], said
    assert _end(worker) == before + due.count(b"good")
    error = json.loads(said.rpartition(b"\r\n\r\n")[2])["error"]
    assert (error["kind"], error["reason"]) == ("Invalid", "InvalidRequest")


@pytest.mark.parametrize("broken", BROKEN)
def test_garbage_behind_an_answer(worker: Worker, broken: str) -> None:
    """What came before has its answer; what cannot be read gets one of its own."""
    packet, status = BROKEN[broken]
    assert _statuses(_talk(worker, GET, packet)) == [200, status]


HANDSHAKE = (
    b"GET %b HTTP/1.1\r\nhost: w\r\n" + WEBSOCKET + b"sec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.mark.parametrize(("path", "status"), [(b"/v1/shop/single/socket", 400), (b"/none", 404)])
@pytest.mark.parametrize(
    ("due", "expected"),
    [(GOOD, [200]), (GET, [200]), (GOOD + GET, [200, 200]), (GET + GOOD, [200, 200])],
    ids=["a produce", "a read", "a read behind one", "one behind a read"],
)
def test_what_is_due_is_answered_before_a_socket_is_refused(
    worker: Worker, path: bytes, status: int, due: bytes, expected: list[int]
) -> None:
    """G1: the refusal is not taken for the answer to a produce that was stored."""
    before = _end(worker)
    said = _talk(worker, due + HANDSHAKE % path)
    assert _statuses(said) == [*expected, status], said
    assert _end(worker) == before + due.count(b"good")


def test_a_head_without_an_end_behind_a_produce(worker: Worker) -> None:
    """The answer that is due comes first; `ack=table` takes a while."""
    before = _end(worker)
    head, body = _request(b"good", BYTES, f"{PRODUCE}?ack=table&timeout_ms=300")
    piece = b"a" * 30_000
    said = _talk(worker, head + body + HUGE, piece, piece, piece, piece)
    assert _statuses(said) in ([200, 431], [503, 431]), said
    assert b'"HeadTooLarge"' in said
    assert _end(worker) == before + 1


def test_who_takes_no_answers_is_not_read(worker: Worker) -> None:
    """G6: the answers to one client do not pile up in the worker; it goes on when it takes them."""
    request = b"POST /v1/shop/none/messages HTTP/1.1\r\nhost: w\r\ncontent-length: 0\r\n\r\n"
    packet = memoryview(request * (UNREAD_BYTES_MAX // len(request)))
    host, _, port = worker.address.rpartition(":")
    with socket.socket() as connection:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, 64 * 1024)
        connection.settimeout(2.0)
        connection.connect((host, int(port)))
        sent = 0
        with suppress(TimeoutError):
            while sent < len(packet):
                sent += connection.send(packet[sent : sent + 64 * 1024])
        assert sent < len(packet), "G6 Bounded: all was read, and no answer was taken"
        said = bytearray()
        with suppress(TimeoutError):
            while piece := connection.recv(1024 * 1024):
                said += piece
    assert said.count(b"HTTP/1.1 404") == sent // len(request), "it goes on"


CHUNKED = b"POST %b HTTP/1.1\r\nhost: w\r\n" + BYTES + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PRODUCE, [431]),
        ("/v1/shop/single/subscriptions/none/pull", [431]),
        ("/v1/shop/single/flush", [200]),
    ],
    ids=["a produce", "a call", "a call without a body"],
)
def test_a_trailer_without_an_end(worker: Worker, path: str, expected: list[int]) -> None:
    """G6: what stands behind a body has a bound, too; the parser copies it with each piece."""
    before = _end(worker)
    head = CHUNKED % path.encode() + b"1\r\na\r\n0\r\nx: "
    said = _talk(worker, head, *[b"a" * 30_000] * 4)
    assert _statuses(said) == expected, said
    assert (b'"HeadTooLarge"' in said) == (expected == [431])
    assert _end(worker) == before


def test_a_large_body_in_small_pieces_is_no_trailer(worker: Worker) -> None:
    """What has the bound is what the parser keeps, not the body."""
    before = _end(worker)
    pieces = [b"%x\r\n%b\r\n" % (30_000, b"a" * 30_000)] * 4
    said = _talk(worker, CHUNKED % PRODUCE.encode(), *pieces, b"0\r\n", b"x: y\r\n", b"\r\n")
    assert _statuses(said) == [200], said
    assert _end(worker) == before + 1


def test_a_trailer_changes_no_message(worker: Worker) -> None:
    """What comes behind a body is not of the head that was judged."""
    before = _end(worker)
    said = _talk(worker, CHUNKED % PRODUCE.encode() + b"1\r\na\r\n0\r\ntidewater-key: k\r\n\r\n")
    assert _statuses(said) == [200], said
    page = worker.get(f"{PRODUCE}?partition=0&offset={before}").json()
    assert [message["key"] for message in page["messages"]] == [None]
