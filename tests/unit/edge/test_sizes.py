"""G6 Bounded: a small body does not become much in memory, whatever it says of itself."""

import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, TidewaterError, TooLarge
from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_worker import flatbuffer as fb
from tidewater_worker.api.decode import ARROW, TopicDecoder
from tidewater_worker.api.sizes import cast_bytes

MIB = 1024 * 1024
MOST = 1 << 40
ROWS = 100_000
REFUSED_BYTES_MAX = 24 * MIB
"""What may be made to see that something is too large."""
_POOLS: list[pa.MemoryPool] = []
"""They stay for as long as what was made in them."""
Decode = Callable[[TopicDecoder, pa.RecordBatch], object]


def _stream(*batches: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _by_http(decoder: TopicDecoder, batch: pa.RecordBatch) -> object:
    return decoder.decode(ARROW, {}, _stream(batch))


def _by_flight(decoder: TopicDecoder, batch: pa.RecordBatch) -> object:
    return decoder.batch(batch)


def _decoder(**columns: str) -> TopicDecoder:
    fields = [{"name": name, "type": kind} for name, kind in columns.items()]
    spec = {"schema": {"fields": fields}} if fields else {}
    return TopicDecoder.of(TopicSpec.model_validate(spec), Limits())


def _refused(work: Callable[[], object]) -> TidewaterError:
    """Return why something is refused; it must be before much was made of it."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(TidewaterError) as refused:
            work()
    finally:
        pa.set_memory_pool(before)
    made = pool.max_memory()
    assert made <= REFUSED_BYTES_MAX, f"G6 Bounded: {made} bytes were made of what is refused"
    return refused.value


@pytest.mark.parametrize("decode", [_by_http, _by_flight])
def test_rows_of_nothing_are_counted_before_they_are_made(decode: Decode) -> None:
    """60 million nulls are a body of 224 bytes, and were 600 MB."""
    batch = pa.record_batch([pa.nulls(60_000_000)], names=["value"])
    error = _refused(lambda: decode(_decoder(), batch))
    assert (error.status, error.reason) == (413, "TooManyMessages")


def test_rows_of_several_batches_are_counted_together() -> None:
    body = _stream(*[pa.record_batch([pa.nulls(ROWS)], names=["value"])] * 600)
    error = _refused(lambda: _decoder().decode(ARROW, {}, body))
    assert (error.status, error.reason) == (413, "TooManyMessages")


def _dictionary(rows: int, value: bytes, kind: pa.DataType) -> pa.Array:
    indices = pa.array(np.zeros(rows, np.int8))
    return pa.DictionaryArray.from_arrays(indices, pa.array([value], pa.binary()).cast(kind))


def _views(rows: int, value: bytes, kind: pa.DataType) -> pa.Array:
    one = pa.array([value], kind).buffers()
    return pa.Array.from_buffers(
        kind, rows, [None, pa.py_buffer(one[1].to_pybytes() * rows), one[2]]
    )


def _lists(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _map(items: pa.Array) -> pa.Array:
    keys = pa.array([str(n) for n in range(len(items))])
    return pa.MapArray.from_arrays(pa.array([0, len(items)], pa.int32()), keys, items)


LONG = b"x" * MIB
GROWING = {
    "a dictionary": ("binary", _dictionary(100, LONG, pa.binary())),
    "a dictionary of large text": ("string", _dictionary(100, LONG, pa.large_string())),
    "views": ("binary", _views(100, LONG, pa.binary_view())),
    "views of text": ("string", _views(100, LONG, pa.string_view())),
    "lists of a dictionary": ("list<string>", _lists(_dictionary(100, LONG, pa.string()))),
    "lists of views": ("list<binary>", _lists(_views(100, LONG, pa.binary_view()))),
    "a map of a dictionary": ("map<string,string>", _map(_dictionary(100, LONG, pa.string()))),
    "a list of nothing": ("list<long>", _lists(pa.nulls(60_000_000))),
    "a list of nothing as text": ("list<string>", _lists(pa.nulls(60_000_000))),
    "lists of nothing": ("list<int>", pa.FixedSizeListArray.from_arrays(pa.nulls(60_000_000), 600)),
    "lists in lists": ("list<list<long>>", _lists(_lists(pa.nulls(60_000_000)))),
    "bits": ("list<long>", _lists(pa.array(np.ones(20_000_000, bool)))),
    "an extension": (
        "string",
        pa.ExtensionArray.from_storage(
            pa.json_(pa.string_view()), _views(100, LONG, pa.string_view())
        ),
    ),
}


@pytest.mark.parametrize("decode", [_by_http, _by_flight])
@pytest.mark.parametrize("name", GROWING)
def test_a_cast_makes_no_more_than_the_log_takes(name: str, decode: Decode) -> None:
    kind, column = GROWING[name]
    batch = pa.record_batch([column], names=["c"])
    error = _refused(lambda: decode(_decoder(c=kind), batch))
    assert (error.status, error.reason) == (413, "RequestTooLarge"), error


def test_columns_are_counted_together() -> None:
    """Each of them is not too large."""
    columns = [_dictionary(50, LONG, pa.binary())] * 4
    batch = pa.record_batch(columns, names=list("abcd"))
    decoder = _decoder(a="binary", b="binary", c="binary", d="binary")
    assert _refused(lambda: decoder.batch(batch)).reason == "RequestTooLarge"


CASTS = {
    "a dictionary": (pa.array(["a", None, "bcd", "a"]).dictionary_encode(), pa.string()),
    "a dictionary of bytes": (pa.array([b"a", b"bcd"]).dictionary_encode(), pa.binary()),
    "a dictionary of numbers": (pa.array([1, 2, 1]).dictionary_encode(), pa.int64()),
    "views": (pa.array(["a", None, "y" * 40], pa.string_view()), pa.string()),
    "a part of views": (pa.array([b"a", None, b"y" * 40], pa.binary_view()).slice(1), pa.binary()),
    "text": (pa.array(["a", None, "bcd"]), pa.binary()),
    "large text": (pa.array(["a", None, "bcd"], pa.large_string()), pa.string()),
    "bytes of one length": (pa.array([b"ab", b"cd"], pa.binary(2)), pa.binary()),
    "numbers": (pa.array([1, None, 3], pa.int8()), pa.int64()),
    "bits": (pa.array([True] * 80), pa.int32()),
    "to bits": (pa.array([1] * 80, pa.int8()), pa.bool_()),
    "nothing": (pa.nulls(3), pa.string()),
    "uuids": (pa.array([b"x" * 16] * 3, pa.binary_view()), pa.binary(16)),
    "lists": (
        pa.array([["a"], None, ["bc", "d"]], pa.large_list(pa.string())),
        pa.list_(pa.string()),
    ),
    "lists of one length": (pa.array([[1], [2]], pa.list_(pa.int8(), 1)), pa.list_(pa.int64())),
    "a map": (
        pa.array([[("a", "b")], []], pa.map_(pa.string_view(), pa.string_view())),
        pa.map_(pa.string(), pa.string()),
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_what_is_counted_is_what_is_made(name: str) -> None:
    given, kind = CASTS[name]
    made = given.cast(kind).nbytes
    counted = cast_bytes(given, kind, MOST)
    # Beside it: an offset more than there are rows, and a bit of each that may be null.
    assert counted <= made <= counted + 16


@pytest.mark.parametrize("given", [pa.array([1, 127], pa.int8()), pa.array([1.5, -2.25])])
def test_of_numbers_as_text_the_least_is_counted(given: pa.Array) -> None:
    made = given.cast(pa.string()).nbytes
    assert cast_bytes(given, pa.string(), MOST) <= made


@pytest.mark.parametrize("kind", [pa.list_view(pa.string()), pa.large_list_view(pa.string())])
def test_list_views_are_refused(kind: pa.DataType) -> None:
    """G7: Arrow's cast of them loses lists, of a large one without a word."""
    batch = pa.record_batch([pa.array([["a"], ["b", "c"]], kind)], names=["c"])
    with pytest.raises(Invalid) as refused:
        _decoder(c="list<string>").batch(batch)
    assert refused.value.reason == "WrongType"


def _pointing_at_one_place(columns: int, value: bytes) -> tuple[pa.Schema, bytes]:
    """Make a message of a batch whose columns are all the same bytes of its body."""
    cells = pa.array([value], pa.binary())
    names = [f"c{n}" for n in range(columns)]
    batch = pa.record_batch([cells] * columns, names=names)
    (_, message) = pa.ipc.MessageReader.open_stream(_stream(batch))
    given = bytes(message.metadata)
    root = fb.target(given, 0)
    header = fb.target(given, fb.field(given, root, fb.MESSAGE_HEADER))
    vector = fb.target(given, fb.field(given, header, fb.BATCH_BUFFERS))
    metadata = bytearray(given)
    own = 3 * 16  # validity, offsets and bytes of the first column
    first = metadata[vector + 4 : vector + 4 + own]
    for n in range(1, columns):
        metadata[vector + 4 + own * n : vector + 4 + own * (n + 1)] = first
    at, size = struct.unpack_from("<2q", first, 32)
    body = message.body.to_pybytes()[: at + size]
    body += bytes(-len(body) % 8)
    struct.pack_into("<q", metadata, fb.field(given, root, fb.MESSAGE_BODY_LENGTH), len(body))
    metadata += bytes(-len(metadata) % 8)
    return batch.schema, struct.pack("<Ii", 0xFFFFFFFF, len(metadata)) + bytes(metadata) + body


def test_columns_at_one_place_are_counted_before_they_are_joined() -> None:
    """Joined, each of them has bytes of its own: 4 MiB were 160 MiB."""
    schema, message = _pointing_at_one_place(40, LONG)
    body = schema.serialize().to_pybytes() + message * 4
    decoder = _decoder(**dict.fromkeys(schema.names, "binary"))
    taken = decoder.decode(ARROW, {}, schema.serialize().to_pybytes() + message)
    assert isinstance(taken, pa.RecordBatch)
    assert taken.column("c39")[0].as_py() == LONG
    error = _refused(lambda: decoder.decode(ARROW, {}, body))
    assert (error.status, error.reason) == (413, "RequestTooLarge")


def test_the_key_of_an_event_has_its_limit_on_a_typed_topic() -> None:
    limits = Limits(key_bytes_max=ByteSize("1Ki"))
    spec = TopicSpec.model_validate({"schema": {"fields": [{"name": "a", "type": "long"}]}})
    decoder = TopicDecoder.of(spec, limits)
    event = b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":{"a":1},'
    event += b'"partitionkey":"%b"}'
    structured = "application/cloudevents+json"
    taken = decoder.decode(structured, {}, event % (b"k" * 1024))
    assert isinstance(taken, pa.RecordBatch)
    assert taken.column(0).to_pylist() == [b"k" * 1024]
    with pytest.raises(TooLarge, match="tw_key"):
        decoder.decode(structured, {}, event % (b"k" * 1025))
