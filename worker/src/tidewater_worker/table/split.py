"""Splitting rows by the table's partitioning: one group of rows per partition value."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, Transform
from pyiceberg.types import IcebergType, UUIDType

Key = tuple[Any, ...]
"""The partition values of a file, as Iceberg stores them."""


@dataclass(frozen=True, slots=True)
class SplitField:
    """One field of the partitioning."""

    column: str
    kind: IcebergType
    transform: "Transform[Any, Any]"

    def apply(self, value: Any) -> Any:
        """Transform one value."""
        if value is None:
            return None
        if isinstance(self.kind, UUIDType) and isinstance(value, bytes):
            value = UUID(bytes=value)
        result = self.transform.transform(self.kind)(value)
        return result.bytes if isinstance(result, UUID) else result

    @property
    def ordered(self) -> bool:
        """Say if equal results at both ends of a range mean equal results within it."""
        return not isinstance(self.transform, BucketTransform)


def split_fields(spec: PartitionSpec, schema: Schema) -> tuple[SplitField, ...]:
    """Prepare a partitioning for `split`."""
    fields = []
    for field in spec.fields:
        source = schema.find_field(field.source_id)
        fields.append(SplitField(source.name, source.field_type, field.transform))
    return tuple(fields)


def split(fields: tuple[SplitField, ...], rows: pa.Table) -> Iterator[tuple[Key, pa.Table]]:
    """Yield the rows of each partition value, in their order.

    Nearly always all rows of a chunk fall into one hour, which the least and the greatest time
    already tell; only a chunk that crosses a border is looked at row by row.
    """
    key: list[Any] = []
    mixed: list[tuple[int, np.ndarray[Any, Any], list[Any]]] = []
    for position, field in enumerate(fields):
        column = _physical(rows.column(field.column))
        single = _single_value(field, column)
        if single is not None:
            key.append(single)
            continue
        key.append(None)
        codes, values = _codes(field, column)
        if len(values) == 1:
            key[position] = values[0]
        else:
            mixed.append((position, codes, values))
    if not mixed:
        yield tuple(key), rows
        return
    combined = np.zeros(rows.num_rows, dtype=np.int64)
    for _, codes, values in mixed:
        combined = combined * len(values) + codes
    order = np.argsort(combined, kind="stable")
    edges = np.flatnonzero(np.diff(combined[order])) + 1
    for group in np.split(order, edges):
        own = list(key)
        for position, codes, values in mixed:
            own[position] = values[int(codes[group[0]])]
        contiguous = int(group[-1]) - int(group[0]) + 1 == len(group)
        part = rows.slice(int(group[0]), len(group)) if contiguous else rows.take(pa.array(group))
        yield tuple(own), part


def _physical(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strip logical types: Iceberg transforms times as integers."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return column.cast(pa.int64())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32())
    if isinstance(kind, pa.UuidType):
        return column.cast(pa.binary(16))
    return column


def _single_value(field: SplitField, column: pa.ChunkedArray) -> Any:
    """Return the value that all rows share; None if that is not plain to see."""
    if column.null_count or not field.ordered or not pa.types.is_integer(column.type):
        return None
    ends = pc.min_max(column)
    low, high = field.apply(ends["min"].as_py()), field.apply(ends["max"].as_py())
    return low if low == high else None


def _codes(field: SplitField, column: pa.ChunkedArray) -> tuple[np.ndarray[Any, Any], list[Any]]:
    """Return the number of each row's partition value, and the values by number."""
    encoded = column.dictionary_encode("encode").combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    numbers: dict[Any, int] = {}
    translate = np.array(
        [
            numbers.setdefault(field.apply(value), len(numbers))
            for value in encoded.dictionary.to_pylist()
        ],
        dtype=np.int64,
    )
    indices = encoded.indices.to_numpy(zero_copy_only=False)
    return translate[indices], list(numbers)
