"""What is refused at the door since nobody could read it, and what passes unaltered (G2, G6)."""

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, TooLarge
from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_worker.api import cells
from tidewater_worker.api.decode import ARROW, JSON, TopicDecoder
from tidewater_worker.log.group import Rows
from tidewater_worker.schema import HEADERS_TYPE

UTC_US = pa.timestamp("us", "UTC")
CE = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t"}
LIMITS = Limits(message_bytes_max=ByteSize("1Mi"), headers_max=8)


def decoder(**columns: str) -> TopicDecoder:
    fields = [{"name": name, "type": kind} for name, kind in columns.items()]
    spec = {"schema": {"fields": fields}} if fields else {}
    return TopicDecoder.of(TopicSpec.model_validate(spec), LIMITS)


def as_json(kind: str, *values: object) -> pa.Array:
    body = json.dumps({"messages": [{"value": {"c": value}} for value in values]})
    found = decoder(c=kind).decode(JSON, {}, body.encode())
    assert isinstance(found, pa.RecordBatch)
    return found.column("c")


def as_arrow(kind: str, column: pa.Array) -> pa.RecordBatch:
    return decoder(c=kind).batch(pa.record_batch({"c": column}))


def raw(kind: pa.DataType, *values: int | None) -> pa.Array:
    width = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    return pa.array(values, width).view(kind)


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-01:00"])
@pytest.mark.parametrize("kind", ["timestamptz", "list<timestamptz>", "map<string,timestamptz>"])
def test_a_time_outside_the_years_is_refused_in_json(kind: str, text: str) -> None:
    shapes: dict[str, Any] = {"t": text, "l": [None, text], "m": {"a": None, "b": text}}
    with pytest.raises(Invalid, match=r"\$\.messages\[1\], column 'c': a time is outside"):
        as_json(kind, None, shapes[kind[0]])


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("timestamptz", raw(UTC_US, 0, 2**60)),
        ("timestamptz", raw(UTC_US, 0, cells.MICROS[0] - 1)),
        ("timestamp", raw(pa.timestamp("us"), None, cells.MICROS[1] + 1)),
        ("date", raw(pa.date32(), 0, 2**30)),
        ("date", raw(pa.date32(), None, cells.DAYS[0] - 1)),
        ("time", pa.array([0, 86_400_000_000])),
        ("time", pa.array([None, -1])),
        ("list<time>", pa.array([[0], [0, None, 2**62]])),
        ("map<string,time>", pa.array([[("a", 0)], [("a", 2**62)]],
                                      pa.map_(pa.string(), pa.int64()))),
        ("list<date>", pa.ListArray.from_arrays([0, 1, 3], raw(pa.date32(), 0, 0, 2**30))),
        (
            "map<string,timestamptz>",
            pa.MapArray.from_arrays([0, 1, 3], ["a", "a", "b"], raw(UTC_US, 0, None, -(2**60))),
        ),
        ("map<string,long>", pa.array([[("a", 1)], [("a", 1), ("b", 2), ("a", 3)]],
                                      pa.map_(pa.string(), pa.int64()))),
        ("list<map<string,long>>", pa.array([[[("a", 1)]], [[("b", 1)], [("a", 2), ("a", 3)]]],
                                            pa.list_(pa.map_(pa.string(), pa.int64())))),
    ],
)  # fmt: skip
def test_what_readers_cannot_be_told_is_refused_in_arrow(kind: str, column: pa.Array) -> None:
    with pytest.raises(Invalid, match="InvalidValue: column 'c', row 1: "):
        as_arrow(kind, column)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("c", column.type)])) as stream:
        stream.write_batch(pa.record_batch({"c": column}))
    with pytest.raises(Invalid, match="InvalidValue"):
        decoder(c=kind).decode(ARROW, {}, sink.getvalue().to_pybytes())


def test_the_ends_of_the_years_pass() -> None:
    ends = raw(UTC_US, *cells.MICROS)
    assert as_arrow("timestamptz", ends).column("c").equals(ends)
    days = raw(pa.date32(), *cells.DAYS)
    assert [str(day) for day in days.to_pylist()] == ["0001-01-01", "9999-12-31"]
    assert as_arrow("date", days).column("c").equals(days)
    times = pa.array([*cells.DAY_MICROS])
    assert [str(time) for time in as_arrow("time", times).column("c").to_pylist()] == [
        "00:00:00", "23:59:59.999999"
    ]  # fmt: skip


lists = st.lists(
    st.none() | st.lists(st.none() | st.sampled_from([0, 5, 2**60]), max_size=3), max_size=5
)
maps = st.lists(
    st.none() | st.lists(st.tuples(st.sampled_from("ab"), st.none()), max_size=3), max_size=5
)


@given(lists, st.integers(0, 3))
def test_the_row_is_the_one_that_a_reader_would_meet(found: Any, begin: int) -> None:
    column = pa.array(found, pa.list_(pa.int64())).cast(pa.list_(UTC_US)).slice(begin)
    bad = [i for i, row in enumerate(found[begin:]) if row and 2**60 in row]
    problem = cells.problem(column)
    assert (problem and problem[0]) == (bad[0] if bad else None)


@given(maps, st.integers(0, 3))
def test_a_key_twice_is_found_in_its_row(found: Any, begin: int) -> None:
    column = pa.array(found, pa.map_(pa.string(), pa.int64())).slice(begin)
    bad = [i for i, row in enumerate(found[begin:]) if row and len(dict(row)) < len(row)]
    problem = cells.problem(column)
    assert (problem and problem[0]) == (bad[0] if bad else None)


def test_what_a_null_hides_is_not_looked_at() -> None:
    values = raw(UTC_US, 2**60, 0)
    hidden = pa.ListArray.from_arrays([0, 1, 2], values, mask=pa.array([True, False]))
    assert as_arrow("list<timestamptz>", hidden).num_rows == 2


# ---- values that were altered


def test_a_cloud_event_keeps_the_digits_of_a_decimal() -> None:
    value = b'{"c":12345678901234567890.12}'
    event = b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":%b}' % value
    for kind, headers, body in (
        (JSON, CE, value),
        ("application/cloudevents+json", {}, event),
        ("application/cloudevents-batch+json", {}, b"[%b]" % event),
    ):
        found = decoder(c="decimal(38,2)").decode(kind, headers, body)
        assert isinstance(found, pa.RecordBatch)
        assert str(found.column("c")[0]) == "12345678901234567890.12"


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"x"',
        b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":[]',
        b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":{"c":"\xff"}}',
    ],
)
def test_a_bad_structured_event_is_refused(body: bytes) -> None:
    for one in (decoder(), decoder(c="string")):
        with pytest.raises(Invalid):
            one.decode("application/cloudevents+json", {}, body)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(Invalid, match=r"\$\.messages\[1\], column 'c': a number is too large"):
        as_json("float", 1.5, 1e300)
    with pytest.raises(Invalid, match="column 'c', row 1"):
        as_arrow("list<float>", pa.array([[1.5], [None, -1e300]]))
    assert as_arrow("float", pa.array([1.5, np.inf])).column("c").to_pylist() == [1.5, np.inf]


def test_a_time_of_day_has_no_zone() -> None:
    with pytest.raises(Invalid, match="no timezone"):
        as_json("time", "10:00:00+05:00")
    assert str(as_json("time", "10:00:00")[0]) == "10:00:00"


@pytest.mark.parametrize("text", ["23:59:59.9999995", "23:59:59.999999999"])
def test_a_time_of_day_that_rounds_into_the_next_day_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"\$\.messages\[1\], column 'c': 23:59:59\.99"):
        as_json("time", "10:00:00", text)
    with pytest.raises(Invalid, match="no time of that day"):
        as_json("list<time>", ["10:00:00", text])
    fine = as_json("time", "00:00:00", "23:59:59.9999994", "10:59:59.9999999").to_pylist()
    assert [str(time) for time in fine] == ["00:00:00", "23:59:59.999999", "11:00:00"]


@pytest.mark.parametrize("kind", ["float", "double"])
def test_numbers_that_json_has_no_word_for(kind: str) -> None:
    found = as_json(kind, "NaN", "Infinity", "-Infinity", 1, None).to_pylist()
    assert str(found) == "[nan, inf, -inf, 1.0, None]"
    (nested,) = as_json(f"map<string,list<{kind}>>", {"a": ["Infinity", None, 2]}).to_pylist()
    assert nested == [("a", [np.inf, None, 2.0])]
    with pytest.raises(Invalid):
        as_json(kind, "1.5")


def test_a_list_of_uuids_is_taken() -> None:
    text = "7c1d3a52-6f0e-4f6b-9a55-0d7d5d6c0001"
    (found,) = as_json("list<uuid>", [text, None]).to_pylist()
    assert found == [bytes.fromhex(text.replace("-", "")), None]


# ---- attributes in HTTP headers


def test_attributes_are_decoded_as_the_http_binding_says() -> None:
    own = {
        "ce-subject": "Z%C3%BCrich%20%25",
        "ce-note": '"a \\"b\\" %41"',
        "ce-partitionkey": "%E2%98%83",
    }
    found = decoder().decode("text/plain", CE | own, b"x")
    assert isinstance(found, Rows)
    headers = dict(found.headers[0] or ())
    assert headers["ce-subject"] == "Zürich %"
    assert headers["ce-note"] == 'a "b" A'
    assert found.keys == ["☃".encode()]
    with pytest.raises(Invalid, match="ce-subject"):
        decoder().decode("text/plain", CE | {"ce-subject": "%FF"}, b"x")


# ---- headers of messages


def many(count: int, size: int = 1) -> dict[str, str]:
    return {f"h{number}": "x" * size for number in range(count)}


@pytest.mark.parametrize(
    ("headers", "reason"),
    [(many(9), "TooManyHeaders"), (many(2, 600_000), "MessageTooLarge")],
)
def test_headers_are_bounded_by_whichever_door_they_come(
    headers: dict[str, str], reason: str
) -> None:
    column = pa.array([None, [("a", "1")], list(headers.items())], HEADERS_TYPE)
    for one, name, value in ((decoder(), "value", b"x"), (decoder(c="long"), "c", 1)):
        batch = pa.record_batch({name: [value] * 3, "headers": column})
        with pytest.raises(TooLarge, match=f"{reason}: message 2"):
            one.batch(batch)
        one.batch(batch.slice(0, 2))
    body = json.dumps({"messages": [{"value": {"c": 1}, "headers": headers}]})
    with pytest.raises(TooLarge, match=reason):
        decoder(c="long").decode(JSON, {}, body.encode())


def test_headers_of_many_small_messages_pass() -> None:
    column = pa.array([list(many(8, 20_000).items())] * 20, HEADERS_TYPE)
    batch = pa.record_batch({"value": [b"x"] * 20, "headers": column})
    assert decoder().batch(batch).num_rows == 20


def _headers(*rows: object) -> pa.RecordBatch:
    headers = pa.array(list(rows), HEADERS_TYPE)
    return pa.record_batch({"value": [b"v"] * len(rows), "headers": headers})


BAD_HEADERS = {
    "the header 'a' has no value": [("b", "1"), ("a", None)],
    "the header 'b' is there twice": [("b", "1"), ("a", "2"), ("b", "1")],
}


@pytest.mark.parametrize("said", BAD_HEADERS)
def test_a_header_that_nobody_could_read_is_refused(said: str) -> None:
    """G4: one message must not stop those who read a subscription. HTTP, then Flight."""
    batch = _headers([("a", "x")], None, BAD_HEADERS[said], [("a", "y")])
    with pytest.raises(Invalid, match=f"InvalidHeader: message 2: {said}"):
        decoder().decode(ARROW, {}, _stream(batch))
    with pytest.raises(Invalid, match=f"InvalidHeader: message 2: {said}"):
        decoder().batch(batch)


def test_a_header_without_a_name_is_refused() -> None:
    """Arrow makes none itself, so its bytes are changed: of three names one is said to be null."""
    data = _stream(_headers([("a", "1"), ("b", "2"), ("c", "3")], *[None] * 6))
    pairs = struct.pack("<qq", 3, 0)
    at = data.index(pairs) + len(pairs)
    assert data[at:].startswith(pairs), "the names come after the pairs"
    data = data[:at] + struct.pack("<qq", 3, 1) + data[at + len(pairs) :]
    with pytest.raises(Invalid, match=r"InvalidArrow.*no nulls"):
        decoder().decode(ARROW, {}, data)


def test_what_a_slice_leaves_out_does_not_count() -> None:
    batch = _headers([("a", None)], [("a", "1"), ("b", "")], [], None, [("c", "2"), ("c", "2")])
    taken = decoder().batch(batch.slice(1, 3)).column("tw_headers").to_pylist()
    assert taken == [[("a", "1"), ("b", "")], [], None]


def _stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _with_more_bytes(column: pa.Array) -> pa.Array:
    """Lengthen a column's second buffer by two bytes, which nobody looks at."""
    valid, given, *rest = column.buffers()
    buffers = [valid, pa.py_buffer(given.to_pybytes() + b"zz")]
    if not pa.types.is_map(column.type):
        return pa.Array.from_buffers(column.type, len(column), [*buffers, *rest])
    kind = column.type
    inside = pa.StructArray.from_arrays(
        [column.keys, column.items], fields=[kind.key_field, kind.item_field]
    )
    return pa.Array.from_buffers(kind, len(column), buffers, children=[inside])


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("timestamptz", raw(UTC_US, 0, 1, 2)),
        ("date", raw(pa.date32(), 0, 1, 2)),
        ("map<string,string>", pa.array([[("a", "b")]] * 3, pa.map_(pa.string(), pa.string()))),
    ],
)
def test_a_buffer_of_an_odd_length_is_no_fault(kind: str, column: pa.Array) -> None:
    """Arrow takes more bytes than a column needs; they were a 500 that said nothing was known."""
    longer = _with_more_bytes(column)
    longer.validate(full=True)
    assert as_arrow(kind, longer).column("c").equals(column)
    assert as_arrow(kind, longer.slice(1)).column("c").equals(column.slice(1))


def test_headers_in_a_buffer_of_an_odd_length_are_no_fault() -> None:
    given = pa.array([[("a", "b")], [("c", "d")]], HEADERS_TYPE)
    batch = pa.record_batch({"value": [b"x", b"y"], "headers": _with_more_bytes(given)})
    assert decoder().batch(batch).column(1).equals(given)
