"""Decimals that Arrow must not be asked for: some end the process, some come out as others (G6)."""

import decimal
import json
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid
from tidewater_core.settings import Limits
from tidewater_worker import decimals
from tidewater_worker.api.decode import ARROW, JSON, TopicDecoder

LIMITS = Limits()
FAR = ["1e-999999999", "5e-49", "1.0e-48", "-0.1E-0049", "1." + "0" * 60]


def decoder(kind: str) -> TopicDecoder:
    fields = [{"name": "c", "type": kind}]
    return TopicDecoder.of(TopicSpec.model_validate({"schema": {"fields": fields}}), LIMITS)


def as_json(kind: str, value: str) -> pa.Array:
    body = b'{"messages":[{"value":{"c":%b}}]}' % value.encode()
    found = decoder(kind).decode(JSON, {}, body)
    assert isinstance(found, pa.RecordBatch)
    return found.column("c")


def as_arrow(kind: str, column: pa.Array) -> pa.Array:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("c", column.type)])) as stream:
        stream.write_batch(pa.record_batch({"c": column}))
    found = decoder(kind).decode(ARROW, {}, sink.getvalue().to_pybytes())
    assert isinstance(found, pa.RecordBatch)
    return found.column("c")


def with_scale(scale: int, kind: Any = pa.decimal128, digits: int = 38, size: int = 16) -> pa.Array:
    one = pa.py_buffer((1).to_bytes(size, "little"))
    return pa.Array.from_buffers(kind(digits, scale), 1, [None, one])


@pytest.mark.parametrize("text", FAR)
def test_a_number_with_too_many_places_is_refused_in_json(text: str) -> None:
    for number in (text, json.dumps(text)):
        for kind, value in (
            ("decimal(38,10)", number),
            ("list<decimal(38,10)>", f"[null, {number}]"),
            ("map<string,decimal(38,10)>", f'{{"a": {number}}}'),
        ):
            with pytest.raises(Invalid, match=r"column 'c': a number has .* places behind"):
                as_json(kind, value)


def test_a_number_of_many_digits_is_not_taken_apart() -> None:
    number = decimal.Decimal("9" * 1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a number has more digits than any decimal"):
            decimals.checked(number, 10)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["1e-999999999", "1.234", "1e30", '"NaN"'])
@pytest.mark.parametrize("row", [0, 3, 6])
def test_the_answer_says_which_message_was_wrong(text: str, row: int) -> None:
    texts = ["1.5"] * 7
    texts[row] = text
    messages = ",".join(f'{{"value":{{"c":{each}}}}}' for each in texts)
    with pytest.raises(Invalid, match=rf"\$\.messages\[{row}\], column 'c': "):
        decoder("decimal(9,2)").decode(JSON, {}, b'{"messages":[%b]}' % messages.encode())


@pytest.mark.parametrize("text", ["0", "-0", "0e-999999999", "0e999999999", "0." + "0" * 60])
def test_nothing_is_nothing_however_many_places_it_has(text: str) -> None:
    assert as_json("decimal(38,10)", text).to_pylist() == [decimal.Decimal(0)]


@pytest.mark.parametrize("text", FAR)
def test_a_text_with_too_many_places_is_refused_in_arrow(text: str) -> None:
    texts = pa.array(["1.5", None, text])
    views = texts.cast(pa.string_view())
    docs = pa.ExtensionArray.from_storage(pa.json_(), texts)
    for column in (
        texts, texts.cast(pa.large_string()), texts.cast(pa.binary()), views, docs,
        texts.dictionary_encode(),
    ):  # fmt: skip
        with pytest.raises(Invalid, match="WrongType: column 'c': the number in row 2"):
            as_arrow("decimal(38,10)", column)
    with pytest.raises(Invalid, match="WrongType: column 'c': the number in row 2"):
        as_arrow("list<decimal(38,10)>", pa.ListArray.from_arrays([0, 3], texts))
    pairs = pa.MapArray.from_arrays([0, 3], ["a", "b", "c"], texts)
    with pytest.raises(Invalid, match="WrongType: column 'c': the number in row 2"):
        as_arrow("map<string,decimal(38,10)>", pairs)


def test_texts_that_are_decimals_pass() -> None:
    texts = [".5", "5.", "+1e2", "-1.25E-01", "1" + "0" * 27, "1e-10", "0.0000000001", None]
    want = [None if text is None else decimal.Decimal(text) for text in texts]
    assert as_arrow("decimal(38,10)", pa.array(texts)).to_pylist() == want
    unused = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array(["1.5", "x"]))
    assert as_arrow("decimal(38,10)", unused).to_pylist() == [decimal.Decimal("1.5")]


@pytest.mark.parametrize("text", ["x", "", "1_0", "1e-", "9" * 200])
def test_texts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match="WrongType"):
        as_arrow("decimal(38,10)", pa.array(["1", text]))


@pytest.mark.parametrize("wanted", ["decimal(38,10)", "long", "list<decimal(38,10)>"])
@pytest.mark.parametrize("scale", [10**9, -(10**9), 49, -39])
def test_a_scale_that_is_far_away_is_refused(wanted: str, scale: int) -> None:
    for column in (
        with_scale(scale), with_scale(scale, pa.decimal64, 18, 8),
        with_scale(scale, pa.decimal32, 9, 4),
    ):  # fmt: skip
        given = pa.ListArray.from_arrays([0, 1], column) if "list" in wanted else column
        with pytest.raises(Invalid, match="WrongType: column 'c': decimal"):
            as_arrow(wanted, given)


def test_other_scales_are_taken() -> None:
    assert as_arrow("decimal(38,10)", with_scale(-5)).to_pylist() == [decimal.Decimal(100_000)]
    wide = with_scale(10, pa.decimal256, 76, 32)
    assert as_arrow("decimal(38,10)", wide).to_pylist() == [decimal.Decimal("1e-10")]
