"""Arrow in: whatever hands out an Arrow stream, cut into batches that a request can carry.

pandas, polars, DuckDB and others offer their rows through the Arrow PyCapsule interface
(`__arrow_c_stream__`), so none of them is imported here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from tidewater_core import names
from tidewater_core.errors import Invalid

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_MAX: Final = 50_000
"""Rows of one request; a worker takes 100,000."""
BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of one request; a worker takes 32 MiB."""
KEY_NAMES: Final = (names.TW_KEY, "key")
INDEX_PREFIX: Final = "__index_level_"
"""pandas puts an index without a name into such a column."""


class ArrowStream(Protocol):
    """Anything with rows that Arrow can take: DataFrames of pandas and polars among them."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a PyCapsule of an ArrowArrayStream."""


ArrowData: TypeAlias = "ArrowStream | pa.Table | pa.RecordBatch"


def batches_of(data: ArrowData) -> Iterator["pa.RecordBatch"]:
    """Cut rows into batches of bounded size; a stream is read as it is sent."""
    import pyarrow as pa

    if isinstance(data, pa.RecordBatch):
        reader = pa.RecordBatchReader.from_batches(data.schema, [data])
    elif hasattr(data, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(data)
    else:
        raise Invalid(
            "NotArrow",
            f"{type(data).__name__} has no Arrow stream: a pyarrow Table, a pandas or polars "
            "DataFrame or anything else with __arrow_c_stream__ has",
        )
    for batch in reader:
        plain = _plain(batch)
        step = ROWS_MAX
        if plain.nbytes > BYTES_MAX:
            step = max(1, min(step, plain.num_rows * BYTES_MAX // plain.nbytes))
        for at in range(0, plain.num_rows, step):
            yield plain.slice(at, step)


def has_keys(data: "pa.Table | pa.RecordBatch") -> bool:
    """Tell whether rows have keys, which decide where they go."""
    return any(name in data.schema.names for name in KEY_NAMES)


def _plain(batch: "pa.RecordBatch") -> "pa.RecordBatch":
    """Return the columns in types that every worker knows, without a DataFrame's own notes."""
    import pyarrow as pa

    columns: list[Any] = []
    fields: list[Any] = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name.startswith(INDEX_PREFIX):
            continue
        kind = _plain_type(field.type)
        columns.append(column if kind == field.type else column.cast(kind))
        fields.append(pa.field(field.name, kind))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _plain_type(kind: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    return kind
