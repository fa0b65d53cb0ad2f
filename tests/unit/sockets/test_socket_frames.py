"""RFC 6455 frames: however they are cut, and whatever a client gets wrong."""

import pytest

from tidewater_worker.api import socket_frames as frames
from tidewater_worker.api.socket_frames import Close, FrameError, FrameReader, Opcode, unmask

MASK = b"\x37\xfa\x21\x3d"
LIMIT = 100_000


def client(opcode: int, payload: bytes, *, fin: bool = True, mask: bytes = MASK) -> bytes:
    """Frame as a client does; written apart from the code that is tested."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 65_536:
        length = bytes([0x80 | 126]) + size.to_bytes(2, "big")
    else:
        length = bytes([0x80 | 127]) + size.to_bytes(8, "big")
    masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
    return bytes([(0x80 if fin else 0) | opcode]) + length + mask + masked


def test_the_example_of_the_rfc() -> None:
    data = bytes.fromhex("818537fa213d7f9f4d5158")
    assert FrameReader(LIMIT).feed(data) == [(Opcode.TEXT, b"Hello")]
    assert frames.text(b"Hello") == bytes.fromhex("810548656c6c6f")


@pytest.mark.parametrize("size", [0, 1, 3, 125, 126, 127, 2047, 2048, 2051, 65_535, 65_536, 99_999])
def test_every_length(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    assert FrameReader(LIMIT).feed(client(2, payload)) == [(2, payload)]
    head = frames.head(Opcode.BINARY, size)
    assert head[0] == 0x82
    written = head[1] if size < 126 else int.from_bytes(head[2:], "big")
    assert written == size


@pytest.mark.parametrize("size", [5, 2048, 5000])
def test_a_mask_applied_twice_is_none(size: int) -> None:
    data = bytes(i % 256 for i in range(size))
    assert unmask(MASK, unmask(MASK, data)) == data
    assert unmask(MASK, data) != data


def test_however_the_bytes_are_cut() -> None:
    """For every cut, and byte by byte: the same messages."""
    stream = b"".join(
        [
            client(1, b"one"),
            client(1, b"tw", fin=False),
            client(9, b"ping in between"),
            client(0, b"o" * 200),
            client(2, b"x" * 300),
            client(8, b"\x03\xe8bye"),
        ]
    )
    expected = [
        (1, b"one"), (9, b"ping in between"), (1, b"tw" + b"o" * 200), (2, b"x" * 300),
        (8, b"\x03\xe8bye"),
    ]  # fmt: skip
    for cut in range(len(stream) + 1):
        reader = FrameReader(LIMIT)
        assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == expected
        assert reader.held_bytes == 0
    reader = FrameReader(LIMIT)
    assert [m for i in range(len(stream)) for m in reader.feed(stream[i : i + 1])] == expected


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x05Hello", Close.PROTOCOL_ERROR),  # not masked
        (client(1, b"x")[:1].replace(b"\x81", b"\xc1") + client(1, b"x")[1:], Close.PROTOCOL_ERROR),
        (client(3, b"x"), Close.PROTOCOL_ERROR),
        (client(11, b"x"), Close.PROTOCOL_ERROR),
        (client(0, b"x"), Close.PROTOCOL_ERROR),  # continues nothing
        (client(1, b"x", fin=False) + client(1, b"y"), Close.PROTOCOL_ERROR),
        (client(9, b"x" * 126), Close.PROTOCOL_ERROR),
        (client(9, b"x", fin=False), Close.PROTOCOL_ERROR),
        (client(2, b"x" * (LIMIT + 1)), Close.TOO_BIG),
        (client(2, b"x" * LIMIT, fin=False) + client(0, b"y"), Close.TOO_BIG),
        (b"\x82\xff" + b"\xff" * 8, Close.TOO_BIG),  # seen by its head alone
    ],
)
def test_what_breaks_the_protocol(data: bytes, code: Close) -> None:
    with pytest.raises(FrameError) as caught:
        FrameReader(LIMIT).feed(data)
    assert caught.value.code == code


def test_fragments_without_end_are_refused() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(client(1, b"", fin=False))
    with pytest.raises(FrameError) as caught:
        reader.feed(client(0, b"", fin=False) * (frames.FRAGMENTS_MAX + 1))
    assert caught.value.code == Close.POLICY


@pytest.mark.parametrize(("payload", "code"), [(b"", 1000), (b"\x03\xe9away", 1001)])
def test_reasons_to_close(payload: bytes, code: int) -> None:
    assert frames.close_code(payload) == code


@pytest.mark.parametrize("payload", [b"\x03", b"\x03\xee", b"\x00\x00", b"\x03\xe8\xff\xff"])
def test_reasons_that_may_not_be_sent(payload: bytes) -> None:
    with pytest.raises(FrameError):
        frames.close_code(payload)


def test_a_long_reason_is_cut_between_characters() -> None:
    frame = frames.close(1008, "ä" * 200)
    assert len(frame) <= 2 + frames.CONTROL_BYTES_MAX
    assert frame[4:].decode() == "ä" * 61
