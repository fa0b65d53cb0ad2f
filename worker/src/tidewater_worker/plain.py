"""Rows of a batch as values that JSON can hold: the one way from a typed column to its JSON.

Nothing that is stored may fail here, or it would block every reader: a time outside Python's years
or days is written from its number, of a key that a map has twice the last one counts, and numbers
that JSON has no word for are `"NaN"`, `"Infinity"` and `"-Infinity"`. Pure.
"""

import math
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa

NAN: Final = "NaN"
INFINITY: Final = "Infinity"
MINUS_INFINITY: Final = "-Infinity"
Convert = Callable[[Any], Any]
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - of columns without a zone
_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1)


def rows_of(batch: pa.RecordBatch, columns: list[str]) -> list[dict[str, Any]]:
    """Return the rows of some columns as objects."""
    cells = [_cells(batch.column(name)) for name in columns]
    return [dict(zip(columns, row, strict=True)) for row in zip(*cells, strict=True)]


def _cells(column: pa.Array) -> list[Any]:
    kind = column.type
    try:
        cells: list[Any] = column.to_pylist()
        convert = _convert(kind, from_numbers=False)
    except (OverflowError, ValueError):
        cells = column.cast(_numbers(kind)).to_pylist()
        convert = _convert(kind, from_numbers=True)
    if convert is None:
        return cells
    return [None if cell is None else convert(cell) for cell in cells]


def _numbers(kind: pa.DataType) -> pa.DataType:
    """Return the type with numbers in place of times."""
    if pa.types.is_list(kind):
        return pa.list_(_numbers(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _numbers(kind.item_type))
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date32(kind) else kind


@lru_cache(maxsize=2048)
def _convert(kind: pa.DataType, *, from_numbers: bool) -> Convert | None:
    """Return what becomes of a cell that is not null; None: it stays as it is."""
    if pa.types.is_map(kind):
        inner = _convert(kind.item_type, from_numbers=from_numbers)
        return dict if inner is None else _values(inner)
    if pa.types.is_list(kind):
        inner = _convert(kind.value_type, from_numbers=from_numbers)
        return None if inner is None else _each(inner)
    if pa.types.is_fixed_size_binary(kind):
        return lambda data: UUID(bytes=data)
    if pa.types.is_floating(kind):
        return _number
    if from_numbers and pa.types.is_timestamp(kind):
        return _moment if kind.tz is None else _moment_utc
    if from_numbers and pa.types.is_time64(kind):
        return _time_of_day
    return _day if from_numbers and pa.types.is_date32(kind) else None


def _values(inner: Convert) -> Convert:
    return lambda pairs: {key: None if v is None else inner(v) for key, v in pairs}


def _each(inner: Convert) -> Convert:
    return lambda items: [None if v is None else inner(v) for v in items]


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return NAN
    return INFINITY if value > 0 else MINUS_INFINITY


def _moment(micros: int) -> datetime | str:
    try:
        return _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return str(np.datetime64(micros, "us"))


def _moment_utc(micros: int) -> datetime | str:
    try:
        return _EPOCH_UTC + timedelta(microseconds=micros)
    except OverflowError:
        return f"{np.datetime64(micros, 'us')}Z"


def _day(days: int) -> date | str:
    try:
        return _EPOCH_DAY + timedelta(days=days)
    except OverflowError:
        return str(np.datetime64(days, "D"))


def _time_of_day(micros: int) -> time | str:
    try:
        return (_EPOCH + timedelta(microseconds=micros)).time()
    except OverflowError:
        return str(np.timedelta64(micros, "us"))
