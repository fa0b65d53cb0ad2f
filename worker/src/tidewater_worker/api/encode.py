"""From batches to what a reader asked for: JSON, NDJSON or Arrow."""

import base64
from typing import Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core import names


def _texts(column: pa.Array) -> list[str | None] | None:
    """Return a binary column as text if all of it is UTF-8, else None."""
    try:
        texts: list[str | None] = column.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        return None
    return texts


def _put_bytes(messages: list[dict[str, Any]], name: str, column: pa.Array) -> None:
    """Add a binary column as `name`, or as `name_b64` where it is not UTF-8."""
    texts = _texts(column)
    if texts is not None:
        for message, text in zip(messages, texts, strict=True):
            message[name] = text
        return
    for message, data in zip(messages, column.to_pylist(), strict=True):
        try:
            message[name] = None if data is None else data.decode()
        except UnicodeDecodeError:
            message[f"{name}_b64"] = base64.b64encode(data).decode()


def _times(column: pa.Array) -> list[str]:
    text: list[str] = pc.strftime(column, format="%Y-%m-%dT%H:%M:%SZ").to_pylist()
    return text


def to_messages(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the JSON values of a batch in the table's columns, or in some of them."""
    there = set(batch.schema.names)
    offsets = batch.column(names.TW_OFFSET).to_pylist()
    partition = batch.column(names.TW_PARTITION)[0].as_py()
    times = _times(batch.column(names.TW_TIME))
    messages: list[dict[str, Any]] = [
        {"partition": partition, "offset": offset, "time": time}
        for offset, time in zip(offsets, times, strict=True)
    ]
    if names.TW_KEY in there:
        _put_bytes(messages, "key", batch.column(names.TW_KEY))
    payload = [name for name in batch.schema.names if not name.startswith(names.RESERVED_PREFIX)]
    if not payload:
        pass
    elif payload == [names.VALUE] and pa.types.is_binary(batch.schema.field(names.VALUE).type):
        _put_bytes(messages, "value", batch.column(names.VALUE))
    else:
        rows = batch.select(payload).to_pylist(maps_as_pydicts="strict")
        for field in payload:
            if pa.types.is_fixed_size_binary(batch.schema.field(field).type):
                for row in rows:
                    row[field] = None if row[field] is None else UUID(bytes=row[field])
        for message, row in zip(messages, rows, strict=True):
            message["value"] = row
    if names.TW_HEADERS not in there:
        return messages
    headers = batch.column(names.TW_HEADERS)
    if headers.null_count == len(headers):
        for message in messages:
            message["headers"] = {}
    else:
        for message, pairs in zip(messages, headers.to_pylist(), strict=True):
            message["headers"] = dict(pairs or ())
    return messages


def ndjson(batch: pa.RecordBatch) -> bytes:
    """Return one JSON message a line."""
    return msgspec.json.Encoder().encode_lines(to_messages(batch))


def arrow_schema_message(schema: pa.Schema) -> bytes:
    """Begin an Arrow IPC stream."""
    return bytes(memoryview(schema.serialize()))


def arrow_batch_message(batch: pa.RecordBatch) -> bytes:
    """Go on with an Arrow IPC stream."""
    return bytes(memoryview(batch.serialize()))


ARROW_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Ends an Arrow IPC stream."""
