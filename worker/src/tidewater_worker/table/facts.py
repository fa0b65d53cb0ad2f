"""What manifests and Parquet footers tell about the values of files and row groups.

Only for passing rows over: whatever is missing, damaged or of another kind than the column is now
is taken as unknown, and the rows are read.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.types import PrimitiveType

from tidewater_worker.filters.conditions import ALL_NULL, UNKNOWN, Facts, FactsOf

_UNREADABLE: Final = (
    pa.ArrowException, ValueError, TypeError, OverflowError, ArithmeticError, struct.error
)  # fmt: skip


class ColumnBounds(NamedTuple):
    """A column in one data file, as its manifest has it."""

    low: bytes | None
    high: bytes | None
    nulls: int | None
    values: int | None
    """Nulls among them."""


def bounds_by_id(file: DataFile, without: tuple[int, ...]) -> dict[int, ColumnBounds]:
    """Return what a manifest tells about a file's columns."""
    lows, highs = file.lower_bounds or {}, file.upper_bounds or {}
    nulls, values = file.null_value_counts or {}, file.value_counts or {}
    return {
        column: ColumnBounds(
            lows.get(column), highs.get(column), nulls.get(column), values.get(column)
        )
        for column in {*lows, *highs, *nulls}.difference(without)
    }


def facts_of_file(columns: Mapping[int, ColumnBounds], table: Schema, wanted: pa.Schema) -> FactsOf:
    """Tell what a manifest says about the columns of a file."""
    fields = {field.name: field for field in table.fields}

    def facts(name: str) -> Facts:
        field = fields.get(name)
        found = None if field is None else columns.get(field.field_id)
        if field is None or found is None or not isinstance(field.field_type, PrimitiveType):
            return UNKNOWN
        there, kind = field.field_type, wanted.field(name).type

        def bound(encoded: bytes | None) -> pa.Scalar | None:
            if encoded is None or (not encoded and not _may_be_empty(kind)):
                return None
            return _scalar(lambda: from_bytes(there, encoded), kind)

        return Facts(bound(found.low), bound(found.high), *_may(found.nulls, found.values))

    return facts


@dataclass(frozen=True, slots=True)
class FileColumns:
    """Where a Parquet file has the table's columns."""

    names: Mapping[str, str]
    """The table's column → the file's name for it; what a file lacks is null."""
    paths: Mapping[str, int]
    """The table's column, or a part of it → the number of the Parquet column."""
    kinds: Mapping[str, pa.DataType]

    @classmethod
    def of(cls, footer: pq.FileMetaData, columns: Mapping[str, str]) -> "FileColumns":
        """Look into a footer."""
        ours = {there: name for name, there in columns.items()}
        paths: dict[str, int] = {}
        for at in range(footer.num_columns):
            top, dot, rest = footer.schema.column(at).path.partition(".")
            if top in ours:
                paths[f"{ours[top]}{dot}{rest}"] = at
        schema = footer.schema.to_arrow_schema()
        return cls(columns, paths, {n: schema.field(there).type for n, there in columns.items()})

    def bytes_of(self, group: pq.RowGroupMetaData, names: frozenset[str] | set[str]) -> int:
        """Return what some columns of a row group take in the file."""
        return sum(
            group.column(at).total_compressed_size
            for path, at in self.paths.items()
            if path.partition(".")[0] in names
        )


def facts_of_group(group: pq.RowGroupMetaData, columns: FileColumns, wanted: pa.Schema) -> FactsOf:
    """Tell what a footer says about the columns of a row group."""

    def facts(path: str) -> Facts:
        name, dot, _ = path.partition(".")
        if name not in columns.names:
            return ALL_NULL
        at = columns.paths.get(path)
        if at is None:
            return UNKNOWN
        kind = pa.string() if dot else wanted.field(name).type
        if not dot and not _compares(columns.kinds[name], kind):
            return UNKNOWN
        column = group.column(at)
        found = column.statistics
        if found is None:
            return UNKNOWN
        low = high = None
        if found.has_min_max:
            low, high = _scalar(lambda: found.min, kind), _scalar(lambda: found.max, kind)
        nulls = found.null_count if found.has_null_count else None
        return Facts(low, high, *_may(nulls, column.num_values))

    return facts


def _may(nulls: int | None, values: int | None) -> tuple[bool, bool]:
    """Say if there may be nulls, and if there may be anything else."""
    return nulls is None or nulls > 0, nulls is None or values is None or nulls < values


def _may_be_empty(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _scalar(value: Callable[[], Any], kind: pa.DataType) -> pa.Scalar | None:
    """Return a bound as rows would have it; None if it is none."""
    try:
        return pa.scalar(value(), kind)
    except _UNREADABLE:
        return None


def _compares(there: pa.DataType, kind: pa.DataType) -> bool:
    """Say if bounds of one type are bounds of the other: the same values in the same order."""
    if isinstance(there, pa.BaseExtensionType):
        there = there.storage_type
    if there == kind:
        return True
    types = pa.types
    return bool(
        (types.is_signed_integer(there) and types.is_signed_integer(kind))
        or (types.is_floating(there) and types.is_floating(kind))
        or (types.is_decimal(there) and types.is_decimal(kind) and there.scale == kind.scale)
        or (types.is_large_string(there) and types.is_string(kind))
        or (types.is_large_binary(there) and types.is_binary(kind))
    )
