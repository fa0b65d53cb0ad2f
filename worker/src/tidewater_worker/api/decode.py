"""From a request's body to a payload for the log: one place for every content type.

JSON, NDJSON, Arrow IPC, raw bytes and CloudEvents all end as the same thing: columns `tw_key`,
`tw_headers` and the topic's payload. A request is taken whole or refused whole, and the error says
which message was wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidewater_core import names
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Invalid, TooLarge, Unsupported
from tidewater_core.settings import Limits
from tidewater_worker.api import cloudevents
from tidewater_worker.api.messages import MessageDecoder, RawMessage
from tidewater_worker.log.group import Headers, Rows
from tidewater_worker.schema import HEADERS_TYPE, payload_fields
from tidewater_worker.topic import Payload

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
BYTES: Final = "application/octet-stream"
KEY_HEADER: Final = "tidewater-key"
HEADER_PREFIX: Final = "tidewater-header-"
ROWS_AS_PYTHON_MAX: Final = 64
"""Up to this many messages are joined with others' in the group commit; more are a batch of
their own."""
_IGNORED: Final = frozenset({names.TW_PARTITION, names.TW_OFFSET, names.TW_TIME})
_ALIASES: Final = {"key": names.TW_KEY, "headers": names.TW_HEADERS}


@dataclass(slots=True)
class TopicDecoder:
    """Everything about a topic that decoding needs, made once."""

    spec: TopicSpec
    limits: Limits
    messages: MessageDecoder
    schema: pa.Schema

    @classmethod
    def of(cls, spec: TopicSpec, limits: Limits) -> "TopicDecoder":
        """Prepare for a topic."""
        fields = [
            pa.field(names.TW_KEY, pa.binary()),
            pa.field(names.TW_HEADERS, HEADERS_TYPE),
            *payload_fields(spec),
        ]
        return cls(spec, limits, MessageDecoder(spec), pa.schema(fields))

    def decode(self, content_type: str, headers: Mapping[str, str], body: bytes) -> Payload:
        """Decode a request's messages; raise Invalid with what is wrong."""
        kind = content_type.partition(";")[0].strip().lower()
        try:
            if "ce-specversion" in headers:
                return self._cloudevents([cloudevents.binary(headers, content_type, body)])
            match kind:
                case "application/json" | "":
                    return self._python(self.messages.json(body), "$.messages[{}]")
                case "application/x-ndjson" | "application/jsonlines" | "application/jsonl":
                    return self._python(self.messages.ndjson(body), "line {}", first=1)
                case "application/vnd.apache.arrow.stream":
                    return self._arrow(body)
                case "application/octet-stream":
                    return self._bytes(headers, body)
                case "application/cloudevents+json":
                    return self._cloudevents([cloudevents.structured(body)])
                case "application/cloudevents-batch+json":
                    return self._cloudevents(cloudevents.batch(body))
        except msgspec.DecodeError as error:
            raise Invalid("InvalidMessages", str(error)) from None
        except UnicodeDecodeError as error:
            raise Invalid("InvalidMessages", f"text that is not UTF-8: {error}") from None
        except RecursionError:
            raise Invalid("InvalidMessages", "JSON that is nested too deeply") from None
        raise Unsupported(
            "UnsupportedContentType",
            f"{kind!r} is not taken; send {JSON}, {NDJSON}, {ARROW}, {BYTES} or CloudEvents",
        )

    def decoded(self, messages: list[Any]) -> Payload:
        """Take messages that were decoded with this topic's message type."""
        return self._python(messages, "$.messages[{}]")

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Take a batch that came as Arrow; any thread may call."""
        try:
            # Offsets that point outside their buffers must not reach the log.
            batch.validate(full=True)
            batch = self._fit(batch)
        except pa.ArrowException as error:
            raise Invalid("InvalidArrow", f"not a batch that can be stored: {error}") from None
        self._check_count(batch.num_rows)
        self._check_batch(batch)
        return batch

    # ---- bytes and CloudEvents

    def _bytes(self, headers: Mapping[str, str], body: bytes) -> Payload:
        if self.spec.schema_ is not None:
            raise Unsupported(
                "TypedTopic", f"a typed topic takes {JSON}, {NDJSON} or {ARROW}, not raw bytes"
            )
        key = headers.get(KEY_HEADER)
        own = [
            (name[len(HEADER_PREFIX) :], value)
            for name, value in headers.items()
            if name.startswith(HEADER_PREFIX)
        ]
        rows = Rows([key.encode() if key is not None else None], [own or None], [body])
        self._check_rows(rows, "the message{}")
        return rows

    def _cloudevents(self, events: list[cloudevents.Event]) -> Payload:
        if self.spec.schema_ is None:
            rows = Rows(
                [event.key for event in events],
                [event.headers for event in events],
                [event.data_bytes() for event in events],
            )
            self._check_rows(rows, "event {}")
            return rows
        messages = [
            {"value": event.data_object(), "headers": dict(event.headers)} for event in events
        ]
        typed = msgspec.convert(messages, list[self.messages.message_type])  # type: ignore[name-defined]
        batch = self._typed(typed, "event {}", first=0)
        keys = pa.array([event.key for event in events], pa.binary())
        return batch.set_column(0, self.schema.field(0), keys)

    # ---- JSON

    def _python(self, messages: list[Any], where: str, first: int = 0) -> Payload:
        if not messages:
            raise Invalid("NoMessages", "the request holds no message")
        self._check_count(len(messages))
        if self.spec.schema_ is not None:
            return self._typed(messages, where, first)
        rows = Rows(
            self._keys(messages, where, first),
            _headers(messages),
            self._values(messages, where, first),
        )
        self._check_rows(rows, where, first)
        if rows.num_rows <= ROWS_AS_PYTHON_MAX:
            return rows
        return pa.RecordBatch.from_arrays(
            [
                pa.array(rows.keys, pa.binary()),
                pa.array(rows.headers, HEADERS_TYPE),
                pa.array(rows.values, pa.binary()),
            ],
            schema=self.schema,
        )

    def _keys(self, messages: list[Any], where: str, first: int) -> list[bytes | None]:
        keys: list[bytes | None] = []
        for i, message in enumerate(messages, first):
            if message.key is not None:
                if message.key_b64 is not None:
                    raise Invalid("InvalidMessages", f"{where.format(i)} has both key and key_b64")
                keys.append(message.key.encode())
            else:
                keys.append(message.key_b64)
        return keys

    def _values(self, messages: list[RawMessage], where: str, first: int) -> list[bytes | None]:
        values: list[bytes | None] = []
        for i, message in enumerate(messages, first):
            value = message.value
            if type(value) is str:
                if message.value_b64 is None:
                    values.append(value.encode())
                    continue
            elif value is msgspec.UNSET:
                if message.value_b64 is not None:
                    values.append(message.value_b64)
                    continue
                raise Invalid("InvalidMessages", f"{where.format(i)} has no value")
            elif message.value_b64 is None:
                values.append(None if value is None else msgspec.json.encode(value))
                continue
            raise Invalid("InvalidMessages", f"{where.format(i)} has both value and value_b64")
        return values

    def _typed(self, messages: list[Any], where: str, first: int) -> pa.RecordBatch:
        keys = self._keys(messages, where, first)
        headers = _headers(messages)
        values = [message.value for message in messages]
        columns = [pa.array(keys, pa.binary()), pa.array(headers, HEADERS_TYPE)]
        for field in self.schema.names[2:]:
            cells = [getattr(value, field) for value in values]
            type_ = self.schema.field(field).type
            if pa.types.is_fixed_size_binary(type_):
                cells = [cell.bytes if cell is not None else None for cell in cells]
            try:
                columns.append(pa.array(cells, type_))
            except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
                raise Invalid("InvalidMessages", f"column {field!r}: {error}") from None
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        self._check_batch(batch)
        return batch

    # ---- Arrow

    def _arrow(self, body: bytes) -> pa.RecordBatch:
        try:
            with pa.ipc.open_stream(body) as reader:
                batches = list(reader)
                schema = reader.schema
            for batch in batches:
                # Offsets that point outside their buffers must not reach the log.
                batch.validate(full=True)
            batch = batches[0] if len(batches) == 1 else _concat(schema, batches)
            batch = self._fit(batch)
        except (pa.ArrowException, OSError, EOFError) as error:
            raise Invalid("InvalidArrow", f"not an Arrow IPC stream: {error}") from None
        self._check_count(batch.num_rows)
        self._check_batch(batch)
        return batch

    def _fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Bring columns into the log's order and types; refuse what would be lost."""
        if batch.num_rows == 0:
            raise Invalid("NoMessages", "the request holds no message")
        there = {_ALIASES.get(name, name): i for i, name in enumerate(batch.schema.names)}
        unknown = there.keys() - _IGNORED - set(self.schema.names)
        if unknown:
            raise Invalid(
                "UnknownColumn",
                f"no column {sorted(unknown)[0]!r} in this topic; it has "
                + ", ".join(self.schema.names),
            )
        columns = []
        for field in self.schema:
            if field.name not in there:
                if not field.nullable or field.name == names.VALUE:
                    raise Invalid("MissingColumn", f"column {field.name!r} is required")
                columns.append(pa.nulls(batch.num_rows, field.type))
                continue
            column = batch.column(there[field.name])
            if column.type != field.type:
                try:
                    column = column.cast(field.type)
                except pa.ArrowException as error:
                    raise Invalid("WrongType", f"column {field.name!r}: {error}") from None
            if column.null_count and not field.nullable:
                raise Invalid("NullInRequired", f"column {field.name!r} has nulls")
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    # ---- limits

    def _check_count(self, count: int) -> None:
        if count > self.limits.batch_rows_max:
            raise TooLarge(
                "TooManyMessages",
                f"{count} messages in one request; at most {self.limits.batch_rows_max} are taken",
            )

    def _check_rows(self, rows: Rows, where: str, first: int = 0) -> None:
        limits = self.limits
        for i, (key, headers, value) in enumerate(
            zip(rows.keys, rows.headers, rows.values, strict=True), first
        ):
            size = len(value) if value is not None else 0
            if key is not None:
                if len(key) > limits.key_bytes_max:
                    raise TooLarge(
                        "KeyTooLarge",
                        f"{where.format(i)}: a key has at most {limits.key_bytes_max} bytes",
                    )
                size += len(key)
            if headers:
                if len(headers) > limits.headers_max:
                    raise TooLarge(
                        "TooManyHeaders",
                        f"{where.format(i)}: at most {limits.headers_max} headers are taken",
                    )
                size += sum(len(name) + len(text) for name, text in headers)
            if size > limits.message_bytes_max:
                raise TooLarge(
                    "MessageTooLarge",
                    f"{where.format(i)} has {size} bytes; at most {limits.message_bytes_max} "
                    "are taken",
                )

    def _check_batch(self, batch: pa.RecordBatch) -> None:
        limits = self.limits
        for i, field in enumerate(batch.schema):
            most = limits.key_bytes_max if i == 0 else limits.message_bytes_max
            if not _is_bytes(field.type):
                continue
            # A column with few bytes has no large cell: that settles nearly all of them.
            cells = batch.column(i).buffers()[-1]
            if cells is None or cells.size <= most:
                continue
            longest = pc.max(pc.binary_length(batch.column(i))).as_py() or 0
            if longest > most:
                raise TooLarge(
                    "MessageTooLarge",
                    f"column {field.name!r} has a cell of {longest} bytes; at most {most} "
                    "are taken",
                )


def _is_bytes(type_: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type_) or pa.types.is_string(type_))


def _headers(messages: list[Any]) -> list[Headers | None]:
    return [list(m.headers.items()) if m.headers else None for m in messages]


def _concat(schema: pa.Schema, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return pa.concat_batches(batches)
