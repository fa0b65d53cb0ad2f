"""Bodies of produce requests: what is decoded, and what is refused before it is looked at."""

import struct

import pyarrow as pa
import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid
from tidewater_core.settings import Limits
from tidewater_worker import flatbuffer as fb
from tidewater_worker.api.decode import ARROW, TopicDecoder


def _stream(batch: pa.RecordBatch) -> list[pa.Message]:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    return list(pa.ipc.MessageReader.open_stream(sink.getvalue()))


def _with_a_negative_buffer(values: list[bytes]) -> bytes:
    """Make a stream whose batch has a column more than its schema, of less than no bytes.

    Arrow never looks at that one, so what it is said to take must not make up for the others.
    """
    rows = pa.array(values, pa.binary())
    _, message = _stream(pa.record_batch([rows, rows], names=["value", "more"]))
    given = bytes(message.metadata)
    batch = fb.target(given, fb.field(given, fb.target(given, 0), fb.MESSAGE_HEADER))
    vector = fb.target(given, fb.field(given, batch, fb.BATCH_BUFFERS))
    metadata, body = bytearray(given), bytearray(message.body)
    count = struct.unpack_from("<I", metadata, vector)[0]
    at_last = vector + 4 + 16 * (count - 1)
    place = struct.unpack_from("<q", metadata, at_last)[0]
    struct.pack_into("<q", metadata, at_last + 8, -(10**12))
    struct.pack_into("<q", body, place, -1)  # so long as its place says
    metadata += bytes(-len(metadata) % 8)
    head: bytes = pa.schema([("value", pa.binary())]).serialize().to_pybytes()
    return head + struct.pack("<Ii", 0xFFFFFFFF, len(metadata)) + bytes(metadata + body)


def test_a_buffer_of_less_than_no_bytes_makes_up_for_no_other() -> None:
    """G6 Bounded: what a body says of itself counts, and cannot be talked down."""
    decoder = TopicDecoder.of(TopicSpec(), Limits())
    body = _with_a_negative_buffer([bytes(1024 * 1024)] * 64)
    assert len(body) < 100_000
    with pytest.raises(Invalid) as refused:
        decoder.decode(ARROW, {}, body)
    assert refused.value.reason == "InvalidArrow"
    assert "impossible place" in refused.value.message
