import dataclasses
import json
from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater import wire
from tidewater.deliveries import Pulls
from tidewater.http1 import Head, Response
from tidewater.wire import Ack, Message
from tidewater_core.errors import (
    Invalid,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Retryable,
    TidewaterError,
    TooLarge,
)

payloads = st.one_of(st.binary(max_size=20), st.text(max_size=20))
messages = st.builds(
    Message,
    value=st.one_of(st.none(), payloads),
    key=st.one_of(st.none(), payloads),
    headers=st.one_of(st.none(), st.dictionaries(st.text(max_size=5), st.text(max_size=5))),
)


def response(status: int, body: bytes = b"", headers: bytes = b"") -> Response:
    return Response(Head(b"HTTP/1.1 %d X\r\n%bA: b" % (status, headers)), body)


def as_bytes(data: bytes | str | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


@given(st.lists(messages, max_size=5))
def test_what_is_sent_is_what_is_read(sent: list[Message]) -> None:
    """A server that stores a message and gives it back in the same form changes nothing."""
    stored = json.loads(wire.encode_json(sent))["messages"]
    assert stored == [json.loads(line) for line in wire.encode_ndjson(sent).splitlines()]
    page = {
        "messages": [{"partition": 0, "offset": i, **m} for i, m in enumerate(stored)],
        "next_offset": len(stored),
        "end_offset": len(stored),
    }
    read = wire.decode_page(response(200, json.dumps(page).encode())).messages
    assert [(m.key, m.value) for m in read] == [(as_bytes(m.key), as_bytes(m.value)) for m in sent]
    assert [m.headers for m in read] == [m.headers or {} for m in sent]


@given(st.lists(messages, min_size=1, max_size=5))
def test_arrow_holds_the_same_messages(sent: list[Message]) -> None:
    with pa.ipc.open_stream(wire.encode_arrow(sent)) as stream:
        rows = stream.read_all().to_pylist()
    assert [row["value"] for row in rows] == [as_bytes(m.value) for m in sent]
    assert [row.get("tw_key") for row in rows] == [as_bytes(m.key) for m in sent]
    assert [dict(row.get("tw_headers") or []) for row in rows] == [m.headers or {} for m in sent]


def test_values_that_are_json_stay_json() -> None:
    body = wire.encode_json([Message({"a": [1, 2.5, None]}), Message([1])])
    assert json.loads(body) == {"messages": [{"value": {"a": [1, 2.5, None]}}, {"value": [1]}]}


def test_what_json_cannot_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(Invalid, match="BadMessage"):
        wire.encode_json([Message(object())])
    with pytest.raises(Invalid, match="BadMessage"):
        wire.encode_arrow([Message({"a": 1})])


@pytest.mark.parametrize("depth", [950, 100_000])
def test_what_is_nested_too_deeply_is_refused_before_it_is_sent(depth: int) -> None:
    value: object = None
    for _ in range(depth):
        value = [value]
    with pytest.raises(Invalid, match="BadMessage"):
        wire.encode_json([Message(value)])
    with pytest.raises(Invalid, match="BadMessage"):
        wire.encode_ndjson([Message(value)])
    while isinstance(value, list):  # freed one by one
        value = value.pop()


def test_times_are_read_as_text_or_microseconds() -> None:
    at = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    line = b'{"partition":1,"offset":2,"value":{"amount":3},"time":%b}\n'
    text = wire.decode_ndjson(line % b'"2026-01-31T12:00:00.25Z"')
    number = wire.decode_ndjson(line % b"%d" % int(at.timestamp() * 1_000_000))
    assert text == number
    assert (text[0].time, text[0].value) == (at, {"amount": 3})


def test_acks_are_read() -> None:
    body = b'{"acks":[{"partition":1,"offset":5,"count":3,"duplicate":true}],"snapshot_id":9}'
    produced = wire.decode_produced(response(200, body))
    assert (produced.acks, produced.snapshot_id) == ([Ack(1, 5, 3, duplicate=True)], 9)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Invalid), (404, NotFound), (413, TooLarge), (429, Overloaded), (503, Retryable)],
)
def test_errors_become_what_the_caller_must_do(status: int, kind: type[TidewaterError]) -> None:
    body = b'{"error":{"reason":"Because","message":"of that","retry_after_ms":70}}'
    with pytest.raises(kind) as caught:
        wire.decode_produced(response(status, body))
    error = caught.value
    assert (error.reason, error.message, error.retry_after_ms) == ("Because", "of that", 70)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"error":"plain"}', b'{"a":"\xff"}'])
def test_errors_of_others_keep_their_status_and_text(body: bytes) -> None:
    error = wire.error_of(response(503, body, b"Retry-After: 2\r\n"))
    assert isinstance(error, Retryable)
    assert (error.reason, error.retry_after_ms) == ("Http503", 2000)


def test_an_unreadable_answer_is_not_a_failed_produce() -> None:
    with pytest.raises(OutcomeUnknown, match="BadAnswer"):
        wire.decode_produced(response(200, b"surprise"))


@pytest.mark.parametrize("body", [b"surprise", b'{"a":"\xff"}'])
def test_an_unreadable_object_is_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(OutcomeUnknown, match="BadAnswer"):
        wire.decode_object(response(200, body))


def test_a_header_without_a_value_is_read() -> None:
    """G4: tables of before hold some, and one must not stop a consumer."""
    body = b'{"partition":0,"offset":7,"headers":{"a":null,"b":"1"},"value":"v"}'
    page = b'{"messages":[%b],"next_offset":8,"end_offset":8}' % body
    assert wire.decode_page(response(200, page)).messages[0].headers == {"a": None, "b": "1"}
    assert wire.decode_ndjson(body + b"\n")[0].headers == {"a": None, "b": "1"}
    pulled = msgspec.json.decode(
        b'{"messages":[%b,"ack_id":"i"}]}' % body[:-1], type=Pulls
    ).messages
    assert pulled[0].headers == {"a": None, "b": "1"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages":[{"partition":"x"}]}', b'"\xff"'])
def test_an_unreadable_page_is_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(OutcomeUnknown, match="BadAnswer"):
        wire.decode_page(response(200, body))
    if body:
        with pytest.raises(OutcomeUnknown, match="BadAnswer"):
            wire.decode_ndjson(body + b"\n")


NAN, INF = float("nan"), float("inf")


@dataclasses.dataclass
class Reading:
    """A value of a program's own class."""

    degrees: float
    place: str | None = None


class Packed(msgspec.Struct, array_like=True):
    """One that is written as a list."""

    degrees: float


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"d": NAN, "f": 1.5, "n": None}, {"d": "NaN", "f": 1.5, "n": None}),
        ({"d": INF, "f": -INF}, {"d": "Infinity", "f": "-Infinity"}),
        ({"l": [1.0, NAN, [INF]], "t": (NAN,)}, {"l": [1.0, "NaN", ["Infinity"]], "t": ["NaN"]}),
        ({"m": {"a": {"b": -INF}}, "d": Decimal(1)}, {"m": {"a": {"b": "-Infinity"}}, "d": "1"}),
        (Reading(NAN), {"degrees": "NaN", "place": None}),
        ({"r": [Reading(1.0), Reading(INF, "null")]},
         {"r": [{"degrees": 1.0, "place": None}, {"degrees": "Infinity", "place": "null"}]}),
        ([Packed(NAN)], [["NaN"]]),
        (NAN, "NaN"),
        ({"d": 1.5, "n": None, "s": "null"}, {"d": 1.5, "n": None, "s": "null"}),
        (None, None),
    ],
)  # fmt: skip
def test_floats_that_json_has_not_are_told_by_name(value: object, said: object) -> None:
    """G7: they were stored as NULL. A message beside is left as it is, and so is the caller's."""
    before = repr(value)
    both = [Message({"x": 1}, key="k"), Message(value, headers={"h": "v"})]
    expected = [{"value": {"x": 1}, "key": "k"}, {"value": said, "headers": {"h": "v"}}]
    assert json.loads(wire.encode_json(both)) == {"messages": expected}
    assert [json.loads(line) for line in wire.encode_ndjson(both).splitlines()] == expected
    assert repr(value) == before
