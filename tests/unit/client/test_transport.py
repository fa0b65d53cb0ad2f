import io
import socket
import threading
from collections.abc import Callable

import pytest

from scripted_http import HANG_UP, RESET, SILENCE, Handler, Request, Server, answer
from tidewater import transport as transport_module
from tidewater.http1 import request_bytes
from tidewater.origin import Origin, parse_url
from tidewater.transport import Transport
from tidewater_core.errors import Invalid, OutcomeUnknown, Retryable

Serve = Callable[[Handler], Server]


def echo(request: Request) -> bytes:
    return answer(request.body + request.target.encode())


def test_requests_share_a_connection(serve: Serve) -> None:
    server = serve(echo)
    with Transport(server.origin) as transport:
        bodies = [transport.request("POST", f"/{i}", b"x").body for i in range(5)]
    assert bodies == [b"x/0", b"x/1", b"x/2", b"x/3", b"x/4"]
    assert server.connections == 1


def test_threads_get_a_connection_each_and_the_pool_keeps_few(serve: Serve) -> None:
    together = threading.Barrier(4)

    def handler(request: Request) -> bytes:
        together.wait(5)
        return echo(request)

    server = serve(handler)
    with Transport(server.origin, idle_connections_max=2) as transport:
        found: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: found.append(transport.request("GET", "/").body))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert found == [b"/"] * 4
        assert server.connections == 4
        assert len(transport._idle) == 2


def test_headers_and_token_are_sent(serve: Serve) -> None:
    server = serve(echo)
    origin = parse_url(server.url, token="secret")
    with Transport(origin) as transport:
        transport.request("GET", "/", Accept="a/b", X_None=None)
    sent = server.requests[0].headers
    assert sent["authorization"] == "Bearer secret"
    assert sent["accept"] == "a/b"
    assert sent["host"] == f"127.0.0.1:{origin.port}"
    assert "x-none" not in sent


def test_a_large_body_arrives_whole(serve: Serve) -> None:
    body = bytes(range(256)) * 40_000
    server = serve(lambda request: answer(request.body))
    with Transport(server.origin) as transport:
        assert transport.request("POST", "/", body).body == body


def test_a_chunked_body_is_streamed_as_a_file(serve: Serve) -> None:
    pieces = [b"a" * 1000, b"b" * 70_000, b"c"]
    body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    server = serve(lambda _: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    with Transport(server.origin) as transport:
        for _ in range(2):
            request = request_bytes(transport.origin.head("GET", "/"))
            with transport.stream(request) as (head, reader):
                assert head.status == 200
                assert io.BufferedReader(reader, 100).read() == b"".join(pieces)
        assert transport.request("GET", "/").body == b"".join(pieces)
    assert server.connections == 1


def test_a_stream_left_early_costs_its_connection(serve: Serve) -> None:
    server = serve(lambda _: answer(b"x" * 1_000_000))
    with Transport(server.origin) as transport:
        with transport.stream(request_bytes(transport.origin.head("GET", "/"))) as (_, reader):
            assert reader.read(10) == b"x" * 10
        assert len(transport.request("GET", "/").body) == 1_000_000
    assert server.connections == 2


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Transport(Origin("127.0.0.1", port)) as transport, pytest.raises(Retryable) as caught:
        transport.request("GET", "/")
    assert caught.value.reason == "Unreachable"


@pytest.mark.parametrize("fault", [HANG_UP, RESET])
def test_a_connection_that_ends_unanswered_leaves_the_outcome_unknown(
    serve: Serve, fault: bytes
) -> None:
    server = serve(lambda _: fault)
    with Transport(server.origin) as transport, pytest.raises(OutcomeUnknown):
        transport.request("POST", "/", b"x")


def test_silence_ends_with_the_time_limit(serve: Serve) -> None:
    server = serve(lambda _: SILENCE)
    transport = Transport(server.origin, timeout_s=0.1)
    with transport, pytest.raises(OutcomeUnknown, match="NoAnswer"):
        transport.request("POST", "/", b"x")


def test_half_an_answer_leaves_the_outcome_unknown(serve: Serve) -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\nhalf"
    server = serve(lambda _: half)
    with Transport(server.origin) as transport, pytest.raises(OutcomeUnknown, match="BadAnswer"):
        transport.request("POST", "/", b"x")


def test_a_connection_that_the_server_closes_is_not_used_again(serve: Serve) -> None:
    server = serve(lambda _: answer(b"ok", headers="Connection: close\r\n"))
    with Transport(server.origin) as transport:
        assert [transport.request("GET", "/").body for _ in range(3)] == [b"ok"] * 3
    assert server.connections == 3


def test_a_connection_closed_while_idle_is_noticed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "TRUST_IDLE_S", 0.0)
    server = serve(echo)
    with Transport(server.origin) as transport:
        transport.request("GET", "/")
        transport.request("GET", "/")
        assert server.connections == 1
        server.drop_connections()
        # Wait until the end of the connection has arrived here.
        transport._idle[0]._sock.recv(1)
        assert transport.request("POST", "/", b"x").body == b"x/"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://localhost:8080", Origin("localhost", 8080)),
        ("http://localhost:8080/", Origin("localhost", 8080)),
        ("https://tw.example", Origin("tw.example", 443, tls=True)),
        ("http://[::1]:9/tide/", Origin("::1", 9, prefix="/tide")),
    ],
)
def test_urls(url: str, origin: Origin) -> None:
    assert parse_url(url) == origin
    assert parse_url(str(origin)) == origin


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8080",
        "ftp://x",
        "http://",
        "http://h:x",
        "http://h?q",
        "http://[::1",
        "http://[h]",
        "http://worker..svc:8080",
        f"http://{'a' * 64}.example",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(Invalid, match="BadUrl"):
        parse_url(url)
