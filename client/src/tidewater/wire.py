"""What requests and answers hold: messages as JSON, NDJSON and Arrow, acks, pages, errors.

    message  := {"key"?, "value"?, "headers"?}     bytes that are not UTF-8: "key_b64", "value_b64"
    JSON     := {"messages": [message …]}
    NDJSON   := (message LF)*
    Arrow    := IPC stream with the columns value (or those of a typed topic), tw_key, tw_headers

pyarrow is imported only by the functions that speak Arrow: a program that does not use it neither
needs it nor waits for it.
"""

import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidewater.http1 import Head, Response
from tidewater_core import names
from tidewater_core.errors import Invalid, OutcomeUnknown, TidewaterError

if TYPE_CHECKING:
    import pyarrow as pa

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
RAW: Final = "application/octet-stream"
GAPS_HEADER: Final = "Tidewater-Gaps"
"""`start-end,…`"""


class Message(msgspec.Struct, frozen=True):
    """A message to be sent."""

    value: Any = None
    """Bytes or text; on a typed topic a mapping of its columns."""
    key: bytes | str | None = None
    """Messages of one key go to one partition, in order."""
    headers: Mapping[str, str] | None = None


class Received(msgspec.Struct, frozen=True):
    """A message that was read."""

    partition: int
    offset: int
    time: datetime | None
    """When the worker took it in."""
    key: bytes | None
    value: Any
    """Bytes; on a typed topic a dict of its columns."""
    headers: dict[str, str | None]
    """None: a header without a value. It is refused now; tables of before may hold some."""


class Ack(msgspec.Struct, frozen=True):
    """Messages that are stored: `count` offsets of one partition, from `offset` on."""

    partition: int
    offset: int
    count: int
    duplicate: bool = False
    """The batch had been stored by an earlier attempt."""


class Produced(msgspec.Struct, frozen=True):
    """The answer to a produce request."""

    acks: list[Ack]
    snapshot_id: int | None = None
    """The table snapshot that holds the messages, when `ack="table"` was asked for."""


class Gap(msgspec.Struct, frozen=True):
    """Offsets from `start` to before `end`, whose messages were lost with a volume."""

    start: int
    end: int


class Page(msgspec.Struct, frozen=True):
    """Messages of one partition, in offset order."""

    messages: list[Received]
    next_offset: int
    """Where to read on."""
    end_offset: int
    """Where the partition ended when the page was read."""
    gaps: list[Gap] = []
    """What was lost between where the page begins and `next_offset`."""


class _Outgoing(msgspec.Struct, omit_defaults=True):
    value: Any = msgspec.UNSET
    value_b64: str | msgspec.UnsetType = msgspec.UNSET
    key: str | msgspec.UnsetType = msgspec.UNSET
    key_b64: str | msgspec.UnsetType = msgspec.UNSET
    headers: Mapping[str, str] | None = None


class Incoming(msgspec.Struct):
    """A message as JSON has it."""

    partition: int
    offset: int
    time: datetime | int | None = None
    key: str | None = None
    key_b64: str | None = None
    value: Any = None
    value_b64: str | None = None
    headers: dict[str, str | None] | None = None


class _IncomingPage(msgspec.Struct):
    messages: list[Incoming]
    next_offset: int
    end_offset: int
    gaps: list[Gap] = []


_encoder = msgspec.json.Encoder()
_produced = msgspec.json.Decoder(Produced)
_incoming = msgspec.json.Decoder(Incoming)
_page = msgspec.json.Decoder(_IncomingPage)


def encode_json(messages: Iterable[Message]) -> bytes:
    """Return the JSON body of a batch."""
    out = [_outgoing(m) for m in messages]
    body = _encode({"messages": out})
    return _encode({"messages": out}) if b"null" in body and _tell_floats(out) else body


def encode_ndjson(messages: Iterable[Message]) -> bytes:
    """Return the NDJSON body of a batch."""
    out = [_outgoing(m) for m in messages]
    lines = [_encode(m) for m in out]
    if any(b"null" in line for line in lines) and _tell_floats(out):
        lines = [_encode(m) for m in out]
    return b"".join(line + b"\n" for line in lines)


def encode_arrow(messages: Iterable[Message]) -> bytes:
    """Return the Arrow body of a batch of a raw topic."""
    import pyarrow as pa

    rows = list(messages)
    columns: dict[str, pa.Array] = {
        names.VALUE: pa.array([_as_bytes("value", m.value) for m in rows], pa.binary())
    }
    if any(m.key is not None for m in rows):
        keys = [_as_bytes("key", m.key) for m in rows]
        columns[names.TW_KEY] = pa.array(keys, pa.binary())
    if any(m.headers for m in rows):
        headers = [list((m.headers or {}).items()) for m in rows]
        columns[names.TW_HEADERS] = pa.array(headers, pa.map_(pa.string(), pa.string()))
    return arrow_body(pa.record_batch(columns))


def arrow_body(data: "pa.RecordBatch | pa.Table") -> bytes:
    """Return the Arrow body that holds a batch or a table, with its columns as they are."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write(data)
    return bytes(sink.getvalue())


def decode_produced(response: Response) -> Produced:
    """Return the acks of a produce request, or raise what the server answered."""
    check(response)
    try:
        return _produced.decode(response.body)
    except msgspec.DecodeError as error:
        # The status said that it is stored, so this is not a failed produce.
        raise OutcomeUnknown("BadAnswer", f"unreadable answer to a produce: {error}") from error


def decode_page(response: Response) -> Page:
    """Return the messages of a JSON read, or raise what the server answered."""
    check(response)
    try:
        page = _page.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OutcomeUnknown("BadAnswer", f"unreadable answer to a read: {error}") from error
    messages = [received(m) for m in page.messages]
    return Page(messages, page.next_offset, page.end_offset, page.gaps)


def gaps_of(head: Head) -> list[Gap]:
    """Return what the head of an NDJSON or Arrow answer says was lost, from its offset on."""
    text = head.header(GAPS_HEADER) or ""
    pairs = [gap.split("-") for gap in text.split(",") if gap]
    return [Gap(int(start), int(end)) for start, end in pairs]


def decode_ndjson(body: bytes) -> list[Received]:
    """Return the messages of an NDJSON read."""
    try:
        lines = _incoming.decode_lines(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OutcomeUnknown("BadAnswer", f"unreadable answer to a read: {error}") from error
    return [received(m) for m in lines]


def decode_object(response: Response) -> dict[str, Any]:
    """Return a JSON object, or raise what the server answered."""
    check(response)
    try:
        return msgspec.json.decode(response.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OutcomeUnknown("BadAnswer", f"unreadable answer: {error}") from error


def check(response: Response) -> None:
    """Raise the error that a response carries, if it carries one."""
    if response.head.status >= 300:
        raise error_of(response)


def error_of(response: Response) -> TidewaterError:
    """Return the error that a response with a status of 300 or more stands for."""
    status = response.head.status
    try:
        data = msgspec.json.decode(response.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        data = {}
    if not isinstance(data.get("error"), dict):
        # Not ours: a proxy on the way, or another server altogether.
        text = response.body[:200].decode("utf-8", "replace").strip()
        data = {"error": {"reason": f"Http{status}", "message": text or "no message"}}
    error = TidewaterError.from_json(data, status)
    if error.retry_after_ms is None:
        after = response.header("Retry-After")
        if after is not None and after.isascii() and after.isdigit():
            error.retry_after_ms = int(after) * 1000
    return error


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid("BadMessage", f"cannot be written as JSON: {error}") from error


def _tell_floats(messages: list[_Outgoing]) -> bool:
    """Write NaN and the infinities as text, as the server reads them; tell if there were any.

    JSON has none of them and the encoder makes them null: only who wrote a null is looked at.
    """
    try:
        found = [message for message in messages if _has_untold(message.value)]
        for message in found:
            message.value = _told(message.value)
    except RecursionError as error:  # the encoder goes deeper than we do
        raise Invalid("BadMessage", f"cannot be written as JSON: {error}") from error
    return bool(found)


def _has_untold(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_untold, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_untold, value))
    return _is_record(value) and _has_untold(msgspec.to_builtins(value))


def _told(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _told(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_told(each) for each in value]
    return _told(msgspec.to_builtins(value)) if _is_record(value) else value


def _is_record(value: Any) -> bool:
    """Tell whether it is one of the classes with fields that msgspec writes as an object."""
    return any(
        hasattr(type(value), name)
        for name in ("__struct_fields__", "__dataclass_fields__", "__attrs_attrs__")
    )


def _outgoing(message: Message) -> _Outgoing:
    out = _Outgoing(headers=message.headers or None)
    value = message.value
    if isinstance(value, bytes):
        text = _utf8(value)
        if text is None:
            out.value_b64 = b64encode(value).decode("ascii")
        else:
            out.value = text
    else:
        out.value = value
    key = message.key
    if isinstance(key, bytes):
        text = _utf8(key)
        if text is None:
            out.key_b64 = b64encode(key).decode("ascii")
        else:
            out.key = text
    elif key is not None:
        out.key = key
    return out


def received(message: Incoming) -> Received:
    """Return a message with its bytes as bytes."""
    time = message.time
    return Received(
        partition=message.partition,
        offset=message.offset,
        time=msgspec.convert(time / 1e6, datetime, strict=False) if isinstance(time, int) else time,
        key=_bytes_of(message.key, message.key_b64),
        value=_bytes_of(message.value, message.value_b64),
        headers=message.headers or {},
    )


def _bytes_of(plain: Any, encoded: str | None) -> Any:
    if encoded is not None:
        return b64decode(encoded)
    return plain.encode() if isinstance(plain, str) else plain


def texts(name: str, data: Any) -> dict[str, Any]:
    """Return a key or value as the fields of a JSON message."""
    if not isinstance(data, bytes):
        return {name: data}
    text = _utf8(data)
    return {f"{name}_b64": b64encode(data).decode()} if text is None else {name: text}


def _as_bytes(what: str, data: object) -> bytes | None:
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    raise Invalid("BadMessage", f"a {what} sent as Arrow is bytes or text, not {type(data)}")


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
