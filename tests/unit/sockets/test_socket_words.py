"""The opening and the messages of a socket: what is taken and what is refused."""

import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Forbidden, Invalid, TidewaterError
from tidewater_worker.api import socket_messages as say
from tidewater_worker.api.messages import MessageDecoder
from tidewater_worker.api.socket_handshake import UpgradeRequired, accept, check_origin
from tidewater_worker.api.socket_reading import Chunk, Chunks

HEADERS = {
    b"host": b"localhost:8080",
    b"sec-websocket-version": b"13",
    b"sec-websocket-key": b"dGhlIHNhbXBsZSBub25jZQ==",
}


def test_the_handshake_of_the_rfc() -> None:
    answer = accept(HEADERS, ())
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer
    assert b"protocol" not in answer.lower().replace(b"protocols", b"")


def test_the_subprotocol_is_agreed_on() -> None:
    answer = accept({**HEADERS, b"sec-websocket-protocol": b"chat, tidewater.v1"}, ())
    assert b"sec-websocket-protocol: tidewater.v1\r\n" in answer
    with pytest.raises(Invalid):
        accept({**HEADERS, b"sec-websocket-protocol": b"chat"}, ())


def test_another_version_or_no_key() -> None:
    with pytest.raises(UpgradeRequired):
        accept({**HEADERS, b"sec-websocket-version": b"8"}, ())
    for key in (b"", b"???", b"c2hvcnQ="):
        with pytest.raises(Invalid):
            accept({**HEADERS, b"sec-websocket-key": key}, ())


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "is_taken"),
    [
        (None, b"worker:8080", (), True),
        (b"http://localhost:3000", b"localhost:8080", (), True),
        (b"http://[::1]:3000", b"[::1]:8080", (), True),
        (b"https://evil.example", b"localhost:8080", (), False),
        (b"null", b"localhost:8080", (), False),
        (b"https://localhost.evil.example", b"localhost:8080", (), False),
        (b"https://shop.example", b"worker:8080", ("https://shop.example",), True),
        (b"http://shop.example", b"worker:8080", ("https://shop.example",), False),
        (b"https://any.example", b"worker:8080", ("*",), True),
        (b"https://any.example", b"", (), False),
        (b"http://[", b"localhost:8080", (), False),
        (b"http://[::1", b"[::1]:8080", (), False),
        (b"http://localhost", b"[", (), False),
        (b"http://[", b"[", (), False),
    ],
)
def test_pages_of_other_sites_are_kept_out(
    origin: bytes | None, host: bytes, allowed: tuple[str, ...], is_taken: bool
) -> None:
    """G9: a browser lets any page open a socket to any address."""
    if is_taken:
        check_origin(origin, host, allowed)
    else:
        with pytest.raises(Forbidden):
            check_origin(origin, host, allowed)


def _decoder() -> say.CommandDecoder:
    return say.CommandDecoder(MessageDecoder(TopicSpec()))


def test_commands_in_json() -> None:
    command = _decoder().text(b'{"produce":{"id":7,"messages":[{"value":"a"}]}}')
    assert (command.produce.id, command.produce.messages[0].value) == (7, "a")
    assert command.read is None
    assert _decoder().text(b'{"read":{"id":1,"offset":5,"credit":10}}').read.offset == 5


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"7", b"[]", b'"text"', b"\xff", b'{"produce":{}}', b'{"prodce":{"id":1}}',
        b'{"produce":{"id":-1,"messages":[]}}',
        b'{"produce":{"id":9007199254740992,"messages":[]}}',
        b'{"read":{"id":1,"format":"xml"}}', b'{"read":{"id":1,"credit":-5}}',
        b'{"credit":{"id":1}}', b'{"acknowledge":{"id":1,"subscription":"s","ack_ids":[]}}',
        b'{"produce":{"id":1,"messages":[{"value":' + b"[" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_command(payload: bytes) -> None:
    with pytest.raises(Invalid):
        _decoder().text(payload)


def test_an_error_finds_its_id() -> None:
    assert say.id_of(b'{"produce":{"id":7,"messages":[{"valu":1}]}}', is_binary=False) == 7
    assert say.id_of(b'{"produce":{"id":"x"}}', is_binary=False) is None
    assert say.id_of(b"\xff\xfe", is_binary=False) is None
    assert say.id_of(say.binary(b'{"produce":{"id":3,"what":1}}', b""), is_binary=True) == 3


def test_binary_messages_are_aligned() -> None:
    for width in range(1, 20):
        head = b'{"produce":{"id":%d}}' % 10**width if width < 15 else b'{"produce":{"id":1}}'
        data = say.binary(head, b"ARROW")
        assert (4 + int.from_bytes(data[:4], "little")) % 8 == 0
        produce, stream = _decoder().binary(data)
        assert stream == b"ARROW"
        assert produce.ack == "log"


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00{}", b"\x04\0\0\0null"]
)
def test_what_is_no_binary_message(data: bytes) -> None:
    with pytest.raises(TidewaterError):
        _decoder().binary(data)


def test_kept_chunks_are_bounded() -> None:
    """G6: a thousand chunks, at most so many bytes."""
    chunks = Chunks(bytes_max=1_000)
    for offset in range(1_000):
        chunks.put(("t", 0, offset), Chunk(1, b"x" * 100))
        assert chunks.nbytes <= 1_000
    assert chunks.get(("t", 0, 0)) is None
    assert chunks.get(("t", 0, 999)) == Chunk(1, b"x" * 100)
