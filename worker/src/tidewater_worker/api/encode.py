"""From batches to what a reader asked for: JSON, NDJSON or Arrow.

Messages that are delivered as they come are few at a time. Arrow's functions cost ten microseconds
and more a call, whatever they are given: what is small is done without them.
"""

import base64
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core import names
from tidewater_worker import plain

SMALL_ROWS: Final = 32
US_PER_S: Final = 1_000_000


def _texts(column: pa.Array) -> list[str | None] | None:
    """Return a binary column as text if all of it is UTF-8, else None."""
    try:
        if len(column) <= SMALL_ROWS:
            return [None if data is None else data.decode() for data in column.to_pylist()]
    except UnicodeDecodeError:
        return None
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
    if len(column) <= SMALL_ROWS:
        moments = (divmod(us, US_PER_S) for us in column.view(pa.int64()).to_pylist())
        return [f"{_second(second)}.{us:06d}Z" for second, us in moments]
    text: list[str] = pc.strftime(column, format="%Y-%m-%dT%H:%M:%SZ").to_pylist()
    return text


@lru_cache(maxsize=64)
def _second(second: int) -> str:
    try:
        return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (OverflowError, ValueError):  # of a table that was imported
        return str(np.datetime64(second, "s"))


def to_messages(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the JSON values of a batch in the table's columns, or in some of them."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    offsets = columns[names.TW_OFFSET].to_pylist()
    partition = columns[names.TW_PARTITION][0].as_py()
    times = _times(columns[names.TW_TIME])
    messages: list[dict[str, Any]] = [
        {"partition": partition, "offset": offset, "time": time}
        for offset, time in zip(offsets, times, strict=True)
    ]
    if (keys := columns.get(names.TW_KEY)) is not None:
        _put_bytes(messages, "key", keys)
    payload = [name for name in columns if not name.startswith(names.RESERVED_PREFIX)]
    if payload == [names.VALUE] and pa.types.is_binary(columns[names.VALUE].type):
        _put_bytes(messages, "value", columns[names.VALUE])
    elif payload:
        for message, row in zip(messages, plain.rows_of(batch, payload), strict=True):
            message["value"] = row
    if (headers := columns.get(names.TW_HEADERS)) is None:
        return messages
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
