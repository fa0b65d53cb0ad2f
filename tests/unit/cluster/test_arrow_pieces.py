"""An Arrow stream cut anywhere gives the same batches."""

import pyarrow as pa
import pytest

from tidewater_core.errors import Corrupt
from tidewater_worker.cluster.arrow_pieces import ArrowPieces

SCHEMA = pa.schema([("tw_offset", pa.int64()), ("value", pa.binary())])
BATCHES = [
    pa.record_batch([pa.array(range(rows)), pa.array([b"x" * n for n in range(rows)])], SCHEMA)
    for rows in (3, 0, 40, 1)
]


def stream() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for batch in BATCHES:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 64, 1_000, 100_000])
def test_pieces_of_any_size(size: int) -> None:
    data = stream()
    pieces = ArrowPieces()
    found = [
        batch for at in range(0, len(data), size) for batch in pieces.feed(data[at : at + size])
    ]
    assert found == BATCHES
    assert pieces.is_complete
    assert pieces.schema == SCHEMA


def test_a_stream_that_breaks_off_is_not_complete() -> None:
    data = stream()
    for end in range(len(data) - 1):
        pieces = ArrowPieces()
        found = pieces.feed(data[:end])
        assert found == BATCHES[: len(found)]
        assert not pieces.is_complete


@pytest.mark.parametrize("data", [b'{"error": {}}   ', b"\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_what_is_no_stream_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        ArrowPieces().feed(data)
