"""Arrow schemas of a topic: in the log, in the table, on the wire. Pure."""

from typing import Final

import pyarrow as pa

from tidewater_core import names
from tidewater_core.crd.columns import ColumnType
from tidewater_core.crd.topic import TopicSpec

TIME_TYPE: Final = pa.timestamp("us", "UTC")
HEADERS_TYPE: Final = pa.map_(pa.string(), pa.string())
PRODUCER_TYPE: Final = pa.run_end_encoded(pa.int32(), pa.string())
"""`producer/sequence` of each request, one run a request: the log alone can tell a re-send."""
UNSYNCED_TYPE: Final = pa.run_end_encoded(pa.int32(), pa.int64())
"""One run a frame: messages before it that no fsync had covered when it was written."""

_PRIMITIVES: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": TIME_TYPE,
    "string": pa.string(),
    "uuid": pa.binary(16),
    "binary": pa.binary(),
}


def arrow_type(column: ColumnType) -> pa.DataType:
    """Map the type of a schema field to Arrow."""
    if column.name == "decimal":
        return pa.decimal128(column.precision, column.scale)
    if column.element is None:
        return _PRIMITIVES[column.name]
    element = arrow_type(column.element)
    return pa.list_(element) if column.name == "list" else pa.map_(pa.string(), element)


def payload_fields(spec: TopicSpec) -> tuple[pa.Field, ...]:
    """Return the columns that hold what the producer sent: `value`, or the typed columns."""
    if spec.schema_ is None:
        return (pa.field(names.VALUE, pa.binary()),)
    return tuple(
        pa.field(field.name, arrow_type(field.column_type), nullable=not field.required)
        for field in spec.schema_.fields
    )


def _message_fields(spec: TopicSpec) -> list[pa.Field]:
    return [
        pa.field(names.TW_TIME, TIME_TYPE, nullable=False),
        pa.field(names.TW_KEY, pa.binary()),
        pa.field(names.TW_HEADERS, HEADERS_TYPE),
        *payload_fields(spec),
    ]


def log_schema(spec: TopicSpec) -> pa.Schema:
    """Return the columns of a frame. Partition and offset are the frame's, not columns."""
    return pa.schema(
        [
            *_message_fields(spec),
            pa.field(names.TW_PRODUCER, PRODUCER_TYPE),
            pa.field(names.TW_UNSYNCED, UNSYNCED_TYPE),
        ]
    )


def table_arrow_schema(spec: TopicSpec) -> pa.Schema:
    """Return the columns of the topic's table, which are also those of an Arrow read."""
    return pa.schema(
        [
            pa.field(names.TW_PARTITION, pa.int32(), nullable=False),
            pa.field(names.TW_OFFSET, pa.int64(), nullable=False),
            *_message_fields(spec),
        ]
    )
