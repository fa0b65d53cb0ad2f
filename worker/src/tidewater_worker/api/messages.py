"""The JSON of a message, checked by msgspec against the topic's schema.

A raw topic's `value` may be anything; a typed topic's is an object of its columns. What does not
fit is refused with the path of the message and field (`$.messages[3].value.amount`).
"""

import datetime
import decimal
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa

from tidewater_core.crd.columns import ColumnType
from tidewater_core.crd.topic import SchemaSpec, TopicSpec
from tidewater_worker import decimals
from tidewater_worker.plain import INFINITY, MINUS_INFINITY, NAN

Cell = Callable[[Any], Any]
_Float = float | Literal["NaN", "Infinity", "-Infinity"]
assert {NAN, INFINITY, MINUS_INFINITY} == {"NaN", "Infinity", "-Infinity"}

_PYTHON: Final[dict[str, Any]] = {
    "boolean": bool,
    "int": Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)],
    "long": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "float": _Float,
    "double": _Float,
    "date": datetime.date,
    "time": str,  # `_time` reads it: where it rounds up to midnight, the day would be lost
    "timestamp": Annotated[datetime.datetime, msgspec.Meta(tz=False)],
    "timestamptz": Annotated[datetime.datetime, msgspec.Meta(tz=True)],
    "string": str,
    "uuid": uuid.UUID,
    "binary": bytes,
    "decimal": decimal.Decimal,
}


_Time = Annotated[datetime.time, msgspec.Meta(tz=False)]
_MIDNIGHT: Final = datetime.time()


class RawMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message of a raw topic."""

    value: Any = msgspec.UNSET
    value_b64: bytes | None = None
    key: str | None = None
    key_b64: bytes | None = None
    headers: dict[str, str] | None = None


class RawBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a produce call sends."""

    messages: list[RawMessage]


def python_type(column: ColumnType) -> Any:
    """Map a column's type to what JSON must hold."""
    if column.element is None:
        return _PYTHON[column.name]
    element = python_type(column.element) | None
    return list[element] if column.name == "list" else dict[str, element]  # type: ignore[valid-type]


def _value_type(schema: SchemaSpec) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for field in schema.fields:
        kind = python_type(field.column_type)
        fields.append((field.name, kind) if field.required else (field.name, kind | None, None))
    return msgspec.defstruct("Value", fields, forbid_unknown_fields=True, kw_only=True, gc=False)


def cell_of(kind: pa.DataType) -> Cell | None:
    """Return what makes a cell for Arrow of a value that is not null; None: it is one already.

    It raises ValueError of what Arrow must not be asked to make.
    """
    if pa.types.is_floating(kind):
        return float  # also of "NaN" and its like
    if pa.types.is_fixed_size_binary(kind):
        return lambda value: value.bytes
    if pa.types.is_time(kind):
        return _time
    if pa.types.is_decimal(kind):
        scale = kind.scale
        return lambda value: decimals.checked(value, scale)
    if pa.types.is_list(kind):
        inner = cell_of(kind.value_type)
        return None if inner is None else _each(inner)
    if pa.types.is_map(kind):
        inner = cell_of(kind.item_type)
        return None if inner is None else _values(inner)
    return None


def _time(text: str) -> datetime.time:
    """Read a time of day; what is finer than a microsecond is rounded."""
    found: datetime.time = msgspec.convert(text, _Time)
    if found == _MIDNIGHT and text.startswith("23"):
        raise ValueError(f"{text[:80]} is, to the microsecond, no time of that day any more")
    return found


def _each(inner: Cell) -> Cell:
    return lambda items: [None if v is None else inner(v) for v in items]


def _values(inner: Cell) -> Cell:
    return lambda items: {key: None if v is None else inner(v) for key, v in items.items()}


class MessageDecoder:
    """Decodes the JSON and NDJSON of one topic's messages."""

    def __init__(self, spec: TopicSpec) -> None:
        self.columns: list[str] | None = None
        message: type[msgspec.Struct] = RawMessage
        body: type[msgspec.Struct] = RawBody
        value: Any = Any
        if spec.schema_ is not None:
            self.columns = [field.name for field in spec.schema_.fields]
            value = _value_type(spec.schema_)
            message = msgspec.defstruct(
                "Message",
                [
                    ("value", value),
                    ("key", str | None, None),
                    ("key_b64", bytes | None, None),
                    ("headers", dict[str, str] | None, None),
                ],
                forbid_unknown_fields=True,
                gc=False,
            )
            body = msgspec.defstruct(
                "Body",
                [("messages", list[message])],  # type: ignore[valid-type]
                forbid_unknown_fields=True,
            )
        self._body = msgspec.json.Decoder(body)
        self._message = msgspec.json.Decoder(message)
        self._value = msgspec.json.Decoder(value)
        self.message_type = message

    def json(self, body: bytes) -> list[Any]:
        """Decode `{"messages": […]}`."""
        messages: list[Any] = self._body.decode(body).messages  # type: ignore[attr-defined]
        return messages

    def ndjson(self, body: bytes) -> list[Any]:
        """Decode one message a line."""
        return list(self._message.decode_lines(body))

    def event(self, data: bytes, headers: dict[str, str]) -> Any:
        """Make a typed topic's message of the JSON of its value."""
        return self.message_type(value=self._value.decode(data), headers=headers)
