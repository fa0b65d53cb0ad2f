"""Whatever is stored can be read as JSON, and dead letters say it the same way (G2, G4)."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest

from tidewater_worker.api import encode, subscriptions
from tidewater_worker.api.subscriptions import given_back
from tidewater_worker.dispatch.deadletter import _raw_values
from tidewater_worker.dispatch.part import Delivered

UTC_US = pa.timestamp("us", "UTC")
UID = UUID("12345678-1234-5678-1234-567812345678")


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    rows = len(next(iter(columns.values())))
    own = {
        "tw_partition": pa.array([0] * rows, pa.int32()),
        "tw_offset": pa.array(range(rows), pa.int64()),
        "tw_time": pa.array([0] * rows, UTC_US),
    }
    return pa.record_batch(own | columns)


def read(**columns: pa.Array) -> list[dict[str, Any]]:
    text = msgspec.json.encode(encode.to_messages(batch_of(**columns)))
    letters = _raw_values(batch_of(**columns), list(columns))
    values = [message["value"] for message in json.loads(text)]
    assert [json.loads(letter or b"") for letter in letters] == values, "one way to JSON"
    return values


def test_times_outside_the_years_are_told_all_the_same() -> None:
    numbers = pa.array([0, 2**60, None, -(2**60)])
    found = read(
        at=numbers.view(UTC_US),
        plain=numbers.view(pa.timestamp("us")),
        day=pa.array([0, 2**30, None, -(2**30)], pa.int32()).view(pa.date32()),
        nested=pa.ListArray.from_arrays([0, 1, 2, 3, 4], numbers).cast(pa.list_(UTC_US)),
    )
    assert found[0] == {
        "at": "1970-01-01T00:00:00Z", "plain": "1970-01-01T00:00:00", "day": "1970-01-01",
        "nested": ["1970-01-01T00:00:00Z"],
    }  # fmt: skip
    assert found[1]["at"] == "38504-08-17T21:30:06.846976Z"
    assert found[1]["nested"] == [found[1]["at"]]
    assert found[1]["plain"] == "38504-08-17T21:30:06.846976"
    assert found[1]["day"] == "2941775-04-07"
    assert found[2] == {"at": None, "plain": None, "day": None, "nested": [None]}
    assert found[3]["at"].startswith("-34565-")


def test_times_of_no_day_are_told_all_the_same() -> None:
    clock = pa.time64("us")
    numbers = pa.array([0, 2**62, None, -(2**62)])
    nested = pa.ListArray.from_arrays([0, 1, 2, 3, 4], numbers.view(clock))
    found = read(at=numbers.view(clock), nested=nested)
    assert found[0] == {"at": "00:00:00", "nested": ["00:00:00"]}
    assert found[1] == {"at": f"{2**62} microseconds", "nested": [f"{2**62} microseconds"]}
    assert found[2] == {"at": None, "nested": [None]}


def test_the_last_of_a_key_twice_counts() -> None:
    pairs = pa.array([[("a", 1.5), ("a", None)], None], pa.map_(pa.string(), pa.float64()))
    assert read(c=pairs) == [{"c": {"a": None}}, {"c": None}]


def test_uuids_and_numbers_without_a_word_in_json() -> None:
    found = read(
        uid=pa.array([UID.bytes, None], pa.binary(16)),
        more=pa.array([[UID.bytes], []], pa.list_(pa.binary(16))),
        ratio=pa.array([float("nan"), float("inf")], pa.float32()),
        low=pa.array([[("a", float("-inf"))], []], pa.map_(pa.string(), pa.float64())),
    )
    assert found == [
        {"uid": str(UID), "more": [str(UID)], "ratio": "NaN", "low": {"a": "-Infinity"}},
        {"uid": None, "more": [], "ratio": "Infinity", "low": {}},
    ]


class Subscription:
    """Gives one message out, and notes what comes back."""

    name = "shop/s"

    def __init__(self) -> None:
        self.back: list[tuple[str, list[str]]] = []
        self.topic = SimpleNamespace(spec=None)

    async def give_back(self, consumer: str, ids: list[str]) -> None:
        self.back.append((consumer, ids))

    async def pull(self, *_: object) -> list[Delivered]:
        return []


def unreadable(_delivered: list[Delivered]) -> bytes:
    raise ValueError("cannot be told")


async def test_what_cannot_be_written_is_given_back() -> None:
    found: Any = Subscription()
    delivered = [Delivered(batch_of(value=pa.array([b"x"])), ["id-0"], [1])]
    with pytest.raises(ValueError, match="told"):
        async with given_back(found, "c", delivered):
            unreadable(delivered)
    following: AsyncIterator[bytes] = subscriptions._follow(
        found, "d", 10, delivered, unreadable, b"", lambda _error: b"", leaves=False
    )
    with pytest.raises(ValueError, match="told"):
        await anext(following)
    assert found.back == [("c", ["id-0"]), ("d", ["id-0"])]
