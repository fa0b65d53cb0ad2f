"""Conditions on history: row groups that cannot hold a wanted row are not read.

Parquet keeps the least and the greatest value of each column per row group. A condition that no
value between them can meet skips the group; what is read is then filtered row by row.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidewater_core import names
from tidewater_core.errors import Invalid
from tidewater_worker.ports import Condition

CONDITIONS_MAX: Final = 64
_HEADER_KEY: Final = f"{names.TW_HEADERS}.key_value.key"
_HEADER_VALUE: Final = f"{names.TW_HEADERS}.key_value.value"
_COMPARE: Final[dict[str, Callable[..., pa.Array]]] = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Test:
    """A condition in the terms of one table."""

    column: str
    op: str
    value: Any
    """A Python value of the column's type; of a header, text."""
    header: str
    scalar: pa.Scalar

    def mask(self, rows: pa.Table) -> pa.ChunkedArray:
        """Tell row by row; null where nobody can say."""
        column = rows.column(self.column)
        if self.header:
            # A name that is there twice counts with its last value, as everywhere in the API.
            chunks = [
                pc.map_lookup(chunk, query_key=self.header, occurrence="last")
                for chunk in column.iterchunks()
            ]
            column = pa.chunked_array(chunks, type=pa.string())
        if self.op == "prefix":
            return pc.starts_with(column, pattern=self.value)
        return _COMPARE[self.op](column, self.scalar)


def tests_of(conditions: Sequence[Condition], schema: pa.Schema) -> tuple[Test, ...]:
    """Read conditions on a table's columns, or raise what is wrong with one."""
    if len(conditions) > CONDITIONS_MAX:
        raise Invalid("InvalidFilter", f"{len(conditions)} conditions; at most {CONDITIONS_MAX}")
    return tuple(_test_of(condition, schema) for condition in conditions)


def _test_of(condition: Condition, schema: pa.Schema) -> Test:
    name, op = condition.column, condition.op
    at = schema.get_field_index(name)
    if at < 0:
        raise Invalid("InvalidFilter", f"there is no column {name!r}")
    is_header = name == names.TW_HEADERS
    if is_header != bool(condition.header) or (is_header and op not in ("=", "prefix")):
        raise Invalid("InvalidFilter", f"{name}: a header has a name, and is compared with =")
    kind = pa.string() if is_header else schema.field(at).type
    texts = pa.types.is_string(kind) or pa.types.is_binary(kind)
    if op not in (*_COMPARE, "prefix") or (op == "prefix" and not texts):
        raise Invalid("InvalidFilter", f"{name}: {op!r} is no comparison for {kind}")
    try:
        value: Any = condition.value
        if pa.types.is_decimal(kind) and isinstance(value, (int, float)):
            value = str(value)  # Arrow gives a number more digits than it needs
        if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
            value = base64.b64decode(condition.value_b64, validate=True)
        scalar = pa.scalar(value) if value is not None else pa.scalar(None, kind)
        scalar = scalar.cast(kind)
    except (pa.ArrowException, binascii.Error, ValueError, TypeError) as error:
        raise Invalid("InvalidFilter", f"{name}: {condition.value!r} is no {kind}") from error
    if not scalar.is_valid:
        raise Invalid("InvalidFilter", f"{name}: nothing equals null")
    return Test(name, op, scalar.as_py(), condition.header, scalar)


def may_match(low: Any, high: Any, op: str, value: Any) -> bool:
    """Say if a value between `low` and `high` can meet a condition."""
    match op:
        case "=":
            return bool(low <= value <= high)
        case "<":
            return bool(low < value)
        case "<=":
            return bool(low <= value)
        case ">":
            return bool(high > value)
        case ">=":
            return bool(high >= value)
        case _:
            return bool(low[: len(value)] <= value <= high[: len(value)])


def group_may_match(
    group: pq.RowGroupMetaData, paths: dict[str, int], tests: Sequence[Test]
) -> bool:
    """Say if a row group can hold a row that meets all conditions.

    `paths` tells the column of each Parquet path. Where statistics are missing, or of another
    kind than the column is now, it can.
    """
    for test in tests:
        if test.header:
            meets = _column_may(group, paths, _HEADER_KEY, "=", test.header) and _column_may(
                group, paths, _HEADER_VALUE, test.op, test.value
            )
        else:
            meets = _column_may(group, paths, test.column, test.op, test.value)
        if not meets:
            return False
    return True


def _column_may(
    group: pq.RowGroupMetaData, paths: dict[str, int], path: str, op: str, value: Any
) -> bool:
    at = paths.get(path)
    if at is None:
        return True
    statistics = group.column(at).statistics
    if statistics is None or not statistics.has_min_max:
        nulls = statistics.null_count if statistics and statistics.has_null_count else -1
        return bool(nulls < 0 or nulls < group.column(at).num_values)
    try:
        return may_match(statistics.min, statistics.max, op, value)
    except TypeError:
        return True


def filtered(rows: pa.Table, tests: Sequence[Test]) -> pa.Table:
    """Keep the rows that meet all conditions; what is neither true nor false is not kept."""
    for test in tests:
        if rows.num_rows == 0:
            break
        rows = rows.filter(pc.fill_null(test.mask(rows), False))
    return rows


@dataclass(frozen=True, slots=True)
class Picking:
    """Which columns and rows of the table a reader wants."""

    read: pa.Schema
    give: tuple[str, ...]
    tests: tuple[Test, ...]

    @classmethod
    def of(
        cls, schema: pa.Schema, columns: Sequence[str] | None, where: Sequence[Condition]
    ) -> "Picking":
        """Check what is wanted against the topic's columns."""
        tests = tests_of(where, schema)
        if columns is None:
            return cls(schema, tuple(schema.names), tests)
        unknown = sorted(set(columns) - set(schema.names))
        if unknown:
            raise Invalid("UnknownColumn", f"there is no column {', '.join(unknown)}")
        give = {names.TW_OFFSET, *columns}
        read = {names.TW_PARTITION, *give, *(test.column for test in tests)}
        return cls(
            pa.schema([field for field in schema if field.name in read]),
            tuple(name for name in schema.names if name in give),
            tests,
        )

    def given(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return only what is wanted of a batch."""
        return batch if len(self.give) == len(self.read) else batch.select(list(self.give))
