"""How rows become Parquet: the Arrow schema with Iceberg's field ids, encodings, statistics.

Everything here is decided once per table schema and reused for every file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    StatisticsCollector,
    compute_statistics_plan,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from tidewater_core import names
from tidewater_core.errors import Corrupt, Invalid
from tidewater_worker.log.reader import LogBatch

FIELD_ID: Final = b"PARQUET:field_id"
SMALL_BATCH_ROWS: Final = 256
COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1
SAMPLE_BYTES: Final = 64 * 1024
WORTH_COMPRESSING: Final = 0.9
"""A column whose sample shrinks less than this is stored as it is: compressing random bytes
would take more than half of the CPU that a row costs, and reading them back more still."""

_PRIMITIVES: Final[dict[IcebergType, pa.DataType]] = {
    BooleanType(): pa.bool_(),
    IntegerType(): pa.int32(),
    LongType(): pa.int64(),
    FloatType(): pa.float32(),
    DoubleType(): pa.float64(),
    DateType(): pa.date32(),
    TimeType(): pa.time64("us"),
    TimestampType(): pa.timestamp("us"),
    TimestamptzType(): pa.timestamp("us", "UTC"),
    StringType(): pa.string(),
    UUIDType(): pa.uuid(),
    BinaryType(): pa.binary(),
}


def arrow_type(iceberg: IcebergType) -> pa.DataType:
    """Map an Iceberg type to the Arrow type that is written, with field ids inside."""
    if iceberg in _PRIMITIVES:
        return _PRIMITIVES[iceberg]
    if isinstance(iceberg, DecimalType):
        return pa.decimal128(iceberg.precision, iceberg.scale)
    if isinstance(iceberg, FixedType):
        return pa.binary(len(iceberg))
    if isinstance(iceberg, ListType):
        return pa.list_(arrow_field(iceberg.element_field, "element"))
    if isinstance(iceberg, MapType):
        return pa.map_(arrow_field(iceberg.key_field), arrow_field(iceberg.value_field))
    if isinstance(iceberg, StructType):
        return pa.struct([arrow_field(field) for field in iceberg.fields])
    raise Invalid("UnsupportedColumn", f"columns of type {iceberg} cannot be written")


def arrow_field(field: NestedField, name: str | None = None) -> pa.Field:
    """Map an Iceberg field, with its id in the metadata that Parquet takes it from."""
    return pa.field(
        name or field.name,
        arrow_type(field.field_type),
        nullable=not field.required,
        metadata={FIELD_ID: str(field.field_id).encode()},
    )


def _leaves(name: str, kind: pa.DataType) -> Iterator[str]:
    """Yield the Parquet paths of a column's leaves."""
    if pa.types.is_map(kind):
        yield from _leaves(f"{name}.key_value.key", kind.key_type)
        yield from _leaves(f"{name}.key_value.value", kind.item_type)
    elif pa.types.is_list(kind):
        yield from _leaves(f"{name}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind.fields:
            yield from _leaves(f"{name}.{field.name}", field.type)
    else:
        yield name


@dataclass(frozen=True, slots=True)
class Shape:
    """What the files of one table schema look like."""

    schema_id: int
    arrow: pa.Schema
    """Columns of the table in order, with field ids."""
    statistics: Mapping[int, StatisticsCollector]
    """Which bounds a file's entry carries, by field id."""
    paths: Mapping[str, int]
    """Parquet path to field id."""
    opaque: frozenset[str]
    """Columns without statistics and dictionary: raw payloads."""

    def writer_options(self, sample: pa.Table) -> dict[str, Any]:
        """Choose encodings for a file, looking at some of its rows."""
        codecs: dict[str, str] = {}
        dictionaries: list[str] = []
        for field in self.arrow:
            codec = COMPRESSION if _compresses(sample.column(field.name)) else "NONE"
            for path in _leaves(field.name, field.type):
                codecs[path] = codec
                # Partition and time repeat over whole batches; an offset never does.
                if field.name not in self.opaque and field.name != names.TW_OFFSET:
                    dictionaries.append(path)
        return {
            "compression": codecs,
            "compression_level": {
                path: COMPRESSION_LEVEL for path, codec in codecs.items() if codec == COMPRESSION
            },
            "use_dictionary": dictionaries,
            "write_statistics": [p for p in codecs if p.split(".")[0] not in self.opaque],
            "store_schema": False,
            "version": "2.6",
        }


def _compresses(column: pa.ChunkedArray) -> bool:
    """Say if a column of plain bytes is worth compressing, from its first bytes."""
    if not (pa.types.is_binary(column.type) or pa.types.is_string(column.type)):
        return True
    for chunk in column.iterchunks():
        buffers = chunk.buffers()
        if len(chunk) == 0 or buffers[2] is None:
            continue
        ends = np.frombuffer(buffers[1], np.int32)
        start, end = int(ends[chunk.offset]), int(ends[chunk.offset + len(chunk)])
        sample = buffers[2].slice(start, min(end - start, SAMPLE_BYTES))
        if sample.size == 0:
            continue
        codec = pa.Codec(COMPRESSION, compression_level=COMPRESSION_LEVEL)
        return bool(codec.compress(sample).size < WORTH_COMPRESSING * sample.size)
    return True


def shape_of(schema: Schema, properties: Mapping[str, str]) -> Shape:
    """Decide what the files of a table schema look like."""
    arrow = pa.schema([arrow_field(field) for field in schema.fields])
    opaque = frozenset(field.name for field in schema.fields if field.name == names.VALUE)
    statistics = dict(compute_statistics_plan(schema, dict(properties)))
    for field in schema.fields:
        if field.name in opaque:
            plan = statistics[field.field_id]
            statistics[field.field_id] = StatisticsCollector(
                plan.field_id,
                plan.iceberg_type,
                MetricsMode(MetricModeTypes.NONE),
                plan.column_name,
            )
    return Shape(
        schema_id=schema.schema_id,
        arrow=arrow,
        statistics=statistics,
        paths=parquet_path_to_id_mapping(schema),
        opaque=opaque,
    )


def table_rows(
    shape: Shape, partition: int, offset: int, end: int, batches: Sequence[LogBatch]
) -> pa.Table:
    """Turn frames of the log into rows [offset, end) of the table; they must be exactly there."""
    expected = batches[0].base_offset
    parts: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.base_offset != expected:
            raise Corrupt(
                "LogGap",
                f"partition {partition}: offset {batch.base_offset} follows {expected} in the log",
            )
        expected += batch.rows
        skip = max(0, offset - batch.base_offset)
        rows = batch.batch
        if skip or expected > end:
            rows = rows.slice(skip, min(batch.rows, end - batch.base_offset) - skip)
        parts.append(rows)
    tables: list[pa.Table] = []
    first = offset
    for run in _runs(parts):
        table = number_rows(shape, partition, first, run)
        first += table.num_rows
        tables.append(table)
    if batches[0].base_offset > offset or first != min(expected, end):
        raise Corrupt("LogGap", f"partition {partition}: offset {offset} is not in the log")
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def _runs(parts: list[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Join consecutive batches of one schema: the log's schema changes between segments only."""
    run: list[pa.RecordBatch] = []
    for part in parts:
        if run and part.schema is not run[0].schema and part.schema != run[0].schema:
            yield _joined(run)
            run = []
        run.append(part)
    if run:
        yield _joined(run)


def _joined(run: list[pa.RecordBatch]) -> pa.Table:
    """Make one table of batches, and few chunks of many small ones: encoding pays per chunk."""
    rows = pa.Table.from_batches(run)
    rows = rows.drop_columns([name for name in names.LOG_ONLY if name in rows.schema.names])
    return rows.combine_chunks() if rows.num_rows < SMALL_BATCH_ROWS * len(run) else rows


def number_rows(shape: Shape, partition: int, first: int, rows: pa.Table) -> pa.Table:
    """Give rows their partition and offsets and the columns of the table, in its order."""
    count = rows.num_rows
    columns: list[pa.Array | pa.ChunkedArray] = []
    for field in shape.arrow:
        if field.name == names.TW_PARTITION:
            columns.append(pa.repeat(pa.scalar(partition, pa.int32()), count))
        elif field.name == names.TW_OFFSET:
            columns.append(pa.array(np.arange(first, first + count, dtype=np.int64)))
        else:
            position = rows.schema.get_field_index(field.name)
            if position < 0:
                columns.append(pa.nulls(count, field.type))
            else:
                column = rows.column(position)
                columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=shape.arrow)
