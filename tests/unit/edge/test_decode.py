"""Bodies of produce requests: what is decoded, and what is refused before it is looked at."""

import struct

import pyarrow as pa
import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid
from tidewater_core.settings import Limits
from tidewater_worker import flatbuffer as fb
from tidewater_worker.api.decode import ARROW, TopicDecoder

SCHEMA_FIELDS = 1
"""Of the table of a schema, which fields are its columns."""


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


@pytest.mark.parametrize("kind", [0, 3, 6, 255])
def test_what_is_no_schema_is_not_read_as_one(kind: int) -> None:
    """G6 Bounded: one byte of a body (which message its first one is) ended the process."""
    rows = pa.record_batch({"value": pa.array([b"a"])})
    head, batch = _stream(rows)
    given = bytes(head.metadata)
    metadata, table = bytearray(given), fb.target(given, 0)
    at = fb.field(given, table, fb.MESSAGE_HEADER_TYPE)
    assert metadata[at] == 1, "a schema"
    metadata[at] = kind
    schema = fb.target(given, fb.field(given, table, fb.MESSAGE_HEADER))
    fields = fb.target(given, fb.field(given, schema, SCHEMA_FIELDS))
    struct.pack_into("<I", metadata, fields + 4, 2**31)  # where the first one is
    body = b"".join(
        struct.pack("<Ii", 0xFFFFFFFF, len(head)) + head + body
        for head, body in (
            (bytes(metadata), b""), (bytes(batch.metadata), bytes(batch.body))
        )
    )  # fmt: skip
    with pytest.raises(Invalid, match="InvalidArrow"):
        TopicDecoder.of(TopicSpec(), Limits()).decode(ARROW, {}, body)


def _far_views() -> pa.Array:
    """Return views of which the null one points nowhere: Arrow's own check passes it over."""
    views = struct.pack("<iIII", 1, ord("a"), 0, 0) + struct.pack("<iIii", -(2**31), 0, 9, 2**30)
    return pa.Array.from_buffers(pa.binary_view(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(views)])


@pytest.mark.parametrize("door", ["body", "batch"])
def test_a_view_that_a_null_hides_may_not_point_anywhere(door: str) -> None:
    """G6 Bounded: Arrow's casts follow it, and the process ends."""
    far = _far_views()
    far.validate(full=True)
    cases = {
        None: [far, pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), far)],
        "string": [far], "decimal(9,2)": [far], "list<string>": [
            pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), far)
        ],
        "map<string,string>": [
            pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]), far)
        ],
    }  # fmt: skip
    for kind, columns in cases.items():
        fields = {"fields": [{"name": "value", "type": kind}]}
        spec = TopicSpec.model_validate({"schema": fields} if kind else {})
        decoder = TopicDecoder.of(spec, Limits())
        for column in columns:
            rows = pa.record_batch({"value": column})
            body = _body(rows)
            with pytest.raises(Invalid, match=r"InvalidArrow: .*View at slot 1"):
                _ = decoder.batch(rows) if door == "batch" else decoder.decode(ARROW, {}, body)


def _body(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def test_other_views_pass() -> None:
    views = pa.array(["a" * 50, None, "b"], pa.string_view())
    found = TopicDecoder.of(TopicSpec(), Limits()).decode(
        ARROW, {}, _body(pa.record_batch({"value": views}))
    )
    assert isinstance(found, pa.RecordBatch)
    assert found.column("value").to_pylist() == [b"a" * 50, None, b"b"]
