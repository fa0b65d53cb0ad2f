import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater.http1 import (
    END,
    Head,
    ProtocolError,
    Response,
    ResponseParser,
    header_line,
    request_bytes,
    request_head,
)
from tidewater_core.errors import Invalid


def parse_all(data: bytes, cuts: list[int], *, eof: bool = False) -> list[Response]:
    parser = ResponseParser()
    found = []
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        parser.feed(data[begin:end])
        while (response := parser.response()) is not None:
            found.append(response)
    if eof:
        parser.feed_eof()
        while (response := parser.response()) is not None:
            found.append(response)
            break
    return found


def with_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def chunked(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(p), p) for p in pieces if p)
    return (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + body
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


@given(
    bodies=st.lists(st.lists(st.binary(max_size=40), max_size=4), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    data=st.data(),
)
def test_responses_are_the_same_in_every_cut(
    bodies: list[list[bytes]], cuts: list[int], data: st.DataObject
) -> None:
    stream = b""
    for pieces in bodies:
        if data.draw(st.booleans()):
            stream += chunked(pieces, data.draw(st.sampled_from([b"", b"X-Sum: 1\r\n"])))
        else:
            stream += with_length(b"".join(pieces))
    assert [r.body for r in parse_all(stream, cuts)] == [b"".join(p) for p in bodies]


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_a_body_until_close_ends_with_the_connection(data: bytes, cuts: list[int]) -> None:
    stream = b"HTTP/1.1 200 OK\r\n\r\n" + data
    assert parse_all(stream, cuts) == []
    assert [r.body for r in parse_all(stream, cuts, eof=True)] == [data]


@given(cut=st.integers(1, 200))
def test_a_response_that_is_cut_off_is_an_error(cut: int) -> None:
    for stream in (with_length(b"0123456789"), chunked([b"01234", b"56789"])):
        cut_off = stream[: min(cut, len(stream) - 1)]
        with pytest.raises(ProtocolError):
            parse_all(cut_off, [], eof=True)


def test_pieces_of_a_streamed_body_arrive_as_they_come() -> None:
    parser = ResponseParser()
    stream = chunked([b"abc", b"defgh"])
    head_end = stream.index(b"\r\n\r\n") + 4
    parser.feed(stream[:head_end])
    head = parser.head()
    assert head is not None
    assert head.chunked
    assert parser.piece() is None
    parser.feed(stream[head_end:])
    assert parser.piece() == b"abc"
    assert parser.piece() == b"defgh"
    assert parser.piece() == END
    parser.finish()
    assert parser.idle


def test_interim_responses_are_passed_over() -> None:
    stream = b"HTTP/1.1 100 Continue\r\n\r\n" + with_length(b"x")
    assert [(r.status, r.body) for r in parse_all(stream, [])] == [(200, b"x")]


def test_statuses_without_a_body_have_none() -> None:
    stream = b"HTTP/1.1 204 No Content\r\n\r\n" + with_length(b"x")
    assert [(r.status, r.body) for r in parse_all(stream, [])] == [(204, b""), (200, b"x")]


def test_headers_are_found_by_any_case() -> None:
    head = Head(b"HTTP/1.1 429 Slow\r\nRETRY-after:  7 \r\ncontent-LENGTH: 3")
    assert (head.header("Retry-After"), head.length, head.status) == ("7", 3, 429)
    assert head.header("Retry") is None


@pytest.mark.parametrize(
    ("raw", "close"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0", False),
    ],
)
def test_whether_the_connection_stays_open(raw: bytes, close: bool) -> None:
    assert Head(raw).close is close


@pytest.mark.parametrize(
    "stream",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_all(stream, [])


def test_a_request_in_bytes() -> None:
    head = request_head("POST", "/v1/a/b", header_line("Host", "h"))
    assert request_bytes(head, b"hi", b"N: 1\r\n") == (
        b"POST /v1/a/b HTTP/1.1\r\nHost: h\r\nN: 1\r\nContent-Length: 2\r\n\r\nhi"
    )


@pytest.mark.parametrize("value", ["a\r\nEvil: 1", "a\nb", "nul\0", "snow ☃"])
def test_a_header_cannot_smuggle(value: str) -> None:
    with pytest.raises(Invalid, match="BadHeader"):
        header_line("X", value)


def test_a_target_cannot_smuggle() -> None:
    with pytest.raises(Invalid, match="BadTarget"):
        request_head("GET", "/a HTTP/1.1\r\nX: 1", b"")
