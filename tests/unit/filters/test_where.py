"""`filter.where`: what it finds, and how it tells mistakes."""

import datetime
import decimal
import uuid
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from tidewater_core.errors import Invalid
from tidewater_worker.filters.where import parse_where

UID = uuid.UUID("12345678-1234-5678-1234-567812345678")
SCHEMA = pa.schema(
    [
        ("region", pa.string()),
        ("amount", pa.int64()),
        ("ratio", pa.float64()),
        ("price", pa.decimal128(10, 2)),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("ok", pa.bool_()),
        ("uid", pa.binary(16)),
        ("tags", pa.list_(pa.string())),
    ]
)
BATCH = pa.RecordBatch.from_pylist(
    [
        {
            "region": "eu", "amount": 100, "ratio": 0.5, "price": decimal.Decimal("1.50"),
            "day": datetime.date(2026, 1, 31), "ok": True, "uid": UID.bytes,
            "at": datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC),
        },
        {"region": "us", "amount": -1, "ratio": 2.0, "price": decimal.Decimal("20"), "ok": False},
        {"region": "it's"},
    ],
    SCHEMA,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("region = 'eu'", [0]),
        ("region <> 'eu'", [1, 2]),
        ("region = 'it''s'", [2]),
        ('"amount" >= 100', [0]),
        ("amount < -0.5", [1]),
        ("amount IS NULL", [2]),
        ("amount is not null", [0, 1]),
        ("NOT amount = 100", [1]),
        ("region IN ('eu', 'us') AND ratio > 1", [1]),
        ("region NOT IN ('eu')", [1, 2]),
        ("region = 'eu' OR region = 'us' AND ok = TRUE", [0]),
        ("(region = 'eu' OR region = 'us') AND ok = false", [1]),
        ("price > 1.49 AND price < '2.00'", [0]),
        ("day = '2026-01-31'", [0]),
        ("at >= '2026-01-31T12:00:00Z'", [0]),
        (f"uid = '{UID}'", [0]),
    ],
)
def test_finds(text: str, rows: list[int]) -> None:
    mask = parse_where(text, {field.name: field.type for field in SCHEMA}).mask(BATCH)
    assert [i for i, found in enumerate(mask.to_pylist()) if found] == rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "ends where a column is expected"),
        ("colour = 'red'", "there is no column 'colour'; there are region,"),
        ("amount = 'x'", "'x' cannot be compared with 'amount'"),
        ("ok = 1", "'1' cannot be compared with 'ok'"),
        ("amount", "expected a comparison after 'amount'"),
        ("amount = 1 amount", "did not expect 'amount'"),
        ("(amount = 1", "expected ')' at the end"),
        ("amount = ", "ends where a value is expected"),
        ("amount ; 1", "cannot read '; 1'"),
        ("amount IS 1", "expected NULL before '1'"),
        ("tags = 'x'", "is a list or map"),
        ("1 = 1", "expected a column, not '1'"),
        ("NOT " * 60 + "ok = TRUE", "nested more than 50 deep"),
    ],
)
def test_mistakes(text: str, told: str) -> None:
    fields: dict[str, Any] = {field.name: field.type for field in SCHEMA}
    with pytest.raises(Invalid) as caught:
        parse_where(text, fields)
    assert told in caught.value.message


LARGE = (1 << 53) + 1
"""The first integer that a float does not have."""


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (f"amount = {LARGE}", [1]),
        (f"amount = {LARGE}.0", [1]),
        (f"amount > {LARGE - 1}.5", [1]),
        (f"amount >= {LARGE}.5", []),
        (f"amount < {LARGE}.5", [0, 1]),
        (f"amount <= {LARGE - 1}.5", [0]),
        ("amount = 0.5", []),
        ("amount != 0.5", [0, 1]),
        ("amount > -1e40", [0, 1]),
        ("amount < 1e40 AND amount > -1e-400", [0, 1]),
        ("amount = 99999999999999999999", []),
        ("NOT amount = 99999999999999999999", [0, 1]),
        ("amount <= -99999999999999999999", []),
    ],
)
def test_integers_are_compared_exactly(text: str, rows: list[int]) -> None:
    values = pa.array([LARGE - 1, LARGE, None], pa.int64())
    batch = pa.RecordBatch.from_arrays([values], ["amount"])
    mask = parse_where(text, {"amount": pa.int64()}).mask(batch)
    assert [i for i, found in enumerate(mask.to_pylist()) if found] == rows


@pytest.mark.parametrize(
    "number", ["1e-999999999", "5e-49", "1e30", "1e99999999999999999999", "NaN"]
)
@pytest.mark.parametrize("name", ["price", "amount", "ratio"])
def test_numbers_out_of_reach_are_refused_or_compared(name: str, number: str) -> None:
    # Arrow's own cast to a decimal ends the process at the first.
    fields = {field.name: field.type for field in SCHEMA}
    for literal in (number, f"'{number}'"):
        if name == "price":
            with pytest.raises(Invalid, match="InvalidFilter"):
                parse_where(f"price > {literal}", fields)
        else:
            with suppress(Invalid):
                parse_where(f"{name} > {literal}", fields).mask(BATCH)
