"""From a request's body to a payload for the log: one place for every content type.

JSON, NDJSON, Arrow IPC, raw bytes and CloudEvents all end as the same thing: columns `tw_key`,
`tw_headers` and the topic's payload. A request is taken whole or refused whole, and the error says
which message was wrong.
"""

import struct
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
from tidewater_worker.api import cells, cloudevents
from tidewater_worker.api.decimal_casts import decimal_problem
from tidewater_worker.api.messages import MessageDecoder, RawMessage, cell_of
from tidewater_worker.api.sizes import cast_bytes, check_log_bytes, held_bytes, log_bytes_max
from tidewater_worker.flatbuffer import uncompressed_bytes
from tidewater_worker.log.group import Headers, Rows, nulls
from tidewater_worker.schema import HEADERS_TYPE, TIME_TYPE, payload_fields
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
_WRONG: Final = (pa.ArrowException, ValueError, OverflowError, TypeError)
_ALIASES: Final = {"key": names.TW_KEY, "headers": names.TW_HEADERS}


@dataclass(frozen=True, slots=True)
class _Fit:
    """How batches of one schema become the log's columns."""

    given: pa.Schema
    sources: list[int | None]
    """Per column of the log the one that is taken; None: it is absent, and all null."""
    casts: bool
    """Whether one of them has another type than the log's."""


@dataclass(slots=True)
class TopicDecoder:
    """Everything about a topic that decoding needs, made once."""

    spec: TopicSpec
    limits: Limits
    messages: MessageDecoder
    schema: pa.Schema
    bounded: list[tuple[int, int]]
    """Columns of bytes, and how long a cell of each may be."""
    doubtful: list[int]
    """Columns that may hold, if they come as Arrow, what nobody could read."""
    fit: _Fit | None = None
    """Of the last batch: those of a stream are all alike."""

    @classmethod
    def of(cls, spec: TopicSpec, limits: Limits) -> "TopicDecoder":
        """Prepare for a topic."""
        fields = [
            pa.field(names.TW_KEY, pa.binary()),
            pa.field(names.TW_HEADERS, HEADERS_TYPE),
            *payload_fields(spec),
        ]
        bounded = [
            (i, int(limits.key_bytes_max if i == 0 else limits.message_bytes_max))
            for i, field in enumerate(fields)
            if pa.types.is_binary(field.type) or pa.types.is_string(field.type)
        ]
        doubtful = [i for i, field in enumerate(fields) if i > 1 and cells.is_doubtful(field.type)]
        return cls(spec, limits, MessageDecoder(spec), pa.schema(fields), bounded, doubtful)

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
        self._check_count(batch.num_rows)
        try:
            # Offsets that point outside their buffers must not reach the log.
            batch.validate(full=True)
            batch = self._fit(batch)
        except pa.ArrowException as error:
            raise Invalid("InvalidArrow", f"not a batch that can be stored: {error}") from None
        self._check_batch(batch)
        self._check_cells(batch)
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
        if HEADER_PREFIX in headers:
            raise Invalid("InvalidHeader", "Tidewater-Header- has no name behind it")
        rows = Rows([key.encode() if key is not None else None], [own or None], [body])
        self._check_rows(rows, "the message{}")
        return rows

    def _cloudevents(self, events: list[cloudevents.Event]) -> Payload:
        if self.spec.schema_ is None:
            rows = Rows(
                [event.key for event in events],
                [event.headers for event in events],
                [event.data for event in events],
            )
            self._check_rows(rows, "event {}")
            return rows
        typed = [self._typed_event(event, i) for i, event in enumerate(events)]
        return self._typed(typed, "event {}", [event.key for event in events])

    def _typed_event(self, event: cloudevents.Event, number: int) -> Any:
        if event.data is None:
            raise Invalid("InvalidCloudEvent", "an event for a typed topic needs JSON data")
        try:
            return self.messages.event(event.data, dict(event.headers))
        except msgspec.DecodeError as error:
            raise Invalid("InvalidMessages", f"event {number}: data: {error}") from None

    # ---- JSON

    def _python(self, messages: list[Any], where: str, first: int = 0) -> Payload:
        if not messages:
            raise Invalid("NoMessages", "the request holds no message")
        self._check_count(len(messages))
        if self.spec.schema_ is not None:
            return self._typed(messages, where, self._keys(messages, where, first), first)
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

    def _typed(
        self, messages: list[Any], where: str, keys: list[bytes | None], first: int = 0
    ) -> pa.RecordBatch:
        headers = _headers(messages)
        values = [message.value for message in messages]
        columns = [pa.array(keys, pa.binary()), pa.array(headers, HEADERS_TYPE)]
        for name in self.schema.names[2:]:
            own = [getattr(value, name) for value in values]
            column, found = _column(own, self.schema.field(name))
            if found is not None:
                row, why = found
                where_ = where.format(first + row)
                raise Invalid("InvalidMessages", f"{where_}, column {name!r}: {why}")
            columns.append(column)
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        self._check_batch(batch)
        return batch

    # ---- Arrow

    def _arrow(self, body: bytes) -> pa.RecordBatch:
        try:
            messages = list(pa.ipc.MessageReader.open_stream(body))
            # Before anything is decompressed: a small body may say that it is a large one.
            nbytes = sum(map(uncompressed_bytes, messages))
            if nbytes > self.limits.request_bytes_max:
                raise TooLarge(
                    "RequestTooLarge",
                    f"{nbytes} bytes when decompressed; a request has at most "
                    f"{self.limits.request_bytes_max}",
                )
            schema, batches = _read(messages, body)
            self._check_batches(batches)
            for batch in batches:
                # Offsets that point outside their buffers must not reach the log.
                batch.validate(full=True)
            batch = batches[0] if len(batches) == 1 else _concat(schema, batches)
            batch = self._fit(batch)
        except (pa.ArrowException, OSError, EOFError, ValueError, struct.error) as error:
            raise Invalid("InvalidArrow", f"not an Arrow IPC stream: {error}") from None
        self._check_batch(batch)
        self._check_cells(batch)
        return batch

    def _fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Bring columns into the log's order and types; refuse what would be lost."""
        if batch.num_rows == 0:
            raise Invalid("NoMessages", "the request holds no message")
        fit = self.fit
        if fit is None or not batch.schema.equals(fit.given):
            self.fit = fit = self._fit_of(batch.schema)
        if fit.casts:
            self._check_casts(batch, fit)
        rows = batch.num_rows
        given = batch.columns
        columns = []
        for i, source in enumerate(fit.sources):
            if source is None:
                columns.append(nulls(rows, self.schema.field(i).type))
                continue
            column = given[source]
            if column.null_count or fit.casts:
                column = self._checked(column, self.schema.field(i))
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _fit_of(self, given: pa.Schema) -> _Fit:
        there = {_ALIASES.get(name, name): i for i, name in enumerate(given.names)}
        if len(there) < len(given.names):
            raise Invalid(
                "ColumnTwice", "a column is there twice; `key` is tw_key, `headers` is tw_headers"
            )
        unknown = there.keys() - _IGNORED - set(self.schema.names)
        if unknown:
            raise Invalid(
                "UnknownColumn",
                f"no column {sorted(unknown)[0]!r} in this topic; it has "
                + ", ".join(self.schema.names),
            )
        for field in self.schema:
            if field.name not in there and (not field.nullable or field.name == names.VALUE):
                raise Invalid("MissingColumn", f"column {field.name!r} is required")
        sources = [there.get(name) for name in self.schema.names]
        casts = any(
            source is not None and given.field(source).type != self.schema.field(i).type
            for i, source in enumerate(sources)
        )
        return _Fit(given, sources, casts)

    def _checked(self, column: pa.Array, field: pa.Field) -> pa.Array:
        if column.type != field.type:
            given = column
            wrong = decimal_problem(given, field.type)
            if wrong is not None:
                raise Invalid("WrongType", f"column {field.name!r}: {wrong}")
            try:
                column = given.cast(field.type)
                found = None
                if cells.leaf_type(field.type) == pa.float32():
                    found = cells.overflow(column, lambda: given.cast(cells.widened(field.type)))
            except pa.ArrowException as error:
                raise Invalid("WrongType", f"column {field.name!r}: {error}") from None
            if found is not None:
                row, why = found
                raise Invalid("WrongType", f"column {field.name!r}, row {row}: {why}")
        if column.null_count and not field.nullable:
            raise Invalid("NullInRequired", f"column {field.name!r} has nulls")
        return column

    # ---- limits

    def _check_batches(self, batches: list[pa.RecordBatch]) -> None:
        """Refuse too many rows, which may take no bytes, before anything is made for them."""
        self._check_count(sum(batch.num_rows for batch in batches))
        # Buffers of a body may all be at one place of it; joined, each has bytes of its own.
        if len(batches) > 1:
            check_log_bytes(sum(map(held_bytes, batches)), log_bytes_max(self.limits))

    def _check_casts(self, batch: pa.RecordBatch, fit: _Fit) -> None:
        """Refuse columns that a cast would make too large, before one is made."""
        most = log_bytes_max(self.limits)
        nbytes = 0
        for source, field in zip(fit.sources, self.schema, strict=True):
            if source is not None and (column := batch.column(source)).type != field.type:
                nbytes += cast_bytes(column, field.type, most)
        check_log_bytes(nbytes, most)

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
        for i, most in self.bounded:
            column = batch.column(i)
            # A column with few bytes has no large cell: that settles nearly all of them.
            cells = column.buffers()[-1]
            if cells is None or cells.size <= most:
                continue
            longest = pc.max(pc.binary_length(column)).as_py() or 0
            if longest > most:
                raise TooLarge(
                    "MessageTooLarge",
                    f"column {self.schema.names[i]!r} has a cell of {longest} bytes; at most "
                    f"{most} are taken",
                )
        headers = batch.column(1)
        if headers.null_count < len(headers):
            self._check_headers(headers)

    def _check_headers(self, headers: pa.Array) -> None:
        limits = self.limits
        counts = cells.entries(headers)
        if counts.max() > limits.headers_max:
            raise TooLarge(
                "TooManyHeaders",
                f"message {counts.argmax()}: at most {limits.headers_max} headers are taken",
            )
        # A column with few bytes has no large cell.
        if cells.texts_bytes(headers) <= limits.message_bytes_max:
            return
        sizes = cells.entries_bytes(headers)
        if sizes.max() > limits.message_bytes_max:
            raise TooLarge(
                "MessageTooLarge",
                f"message {sizes.argmax()} has {sizes.max()} bytes of headers; at most "
                f"{limits.message_bytes_max} are taken",
            )

    def _check_cells(self, batch: pa.RecordBatch) -> None:
        """Refuse what Arrow can say and readers cannot be told."""
        headers = batch.column(1)
        if headers.null_count < len(headers):
            found = cells.header_problem(headers)
            if found is not None:
                raise Invalid("InvalidHeader", f"message {found[0]}: {found[1]}")
        for i in self.doubtful:
            column = batch.column(i)
            found = cells.problem(column) if column.null_count < len(column) else None
            if found is not None:
                row, why = found
                raise Invalid("InvalidValue", f"column {self.schema.names[i]!r}, row {row}: {why}")


def _column(values: list[Any], field: pa.Field) -> tuple[pa.Array | None, cells.Problem | None]:
    """Make a column of what JSON held; also return what is wrong, lost or cannot be told, if any.

    Of Python's own values only times with a zone can be out of range, and floats too large.
    """
    kind = field.type
    cell = cell_of(kind)
    leaf = cells.leaf_type(kind)
    try:
        made = values if cell is None else [v if v is None else cell(v) for v in values]
        column = pa.array(made, kind)
        if leaf == TIME_TYPE:
            return column, cells.problem(column)
        if leaf == pa.float32():
            return column, cells.overflow(column, lambda: pa.array(made, cells.widened(kind)))
    except _WRONG as error:
        return None, (_first_wrong(values, kind), str(error))
    return column, None


def _first_wrong(values: list[Any], kind: pa.DataType) -> int:
    """Return the first row that no column can be made of; there is one."""
    cell = cell_of(kind)
    begin, end = 0, len(values)
    while end - begin > 1:
        middle = (begin + end) // 2
        try:
            half = values[begin:middle]
            pa.array(half if cell is None else [v if v is None else cell(v) for v in half], kind)
        except _WRONG:
            end = middle
        else:
            begin = middle
    return begin


def _headers(messages: list[Any]) -> list[Headers | None]:
    return [list(m.headers.items()) if m.headers else None for m in messages]


def _read(messages: list[pa.Message], body: bytes) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    # Arrow reads what is no schema as one, and the process ends.
    kinds = [message.type for message in messages]
    if kinds[:1] == ["schema"] and all(kind == "record batch" for kind in kinds[1:]):
        schema = pa.ipc.read_schema(messages[0])
        return schema, [pa.ipc.read_record_batch(message, schema) for message in messages[1:]]
    with pa.ipc.open_stream(body) as reader:  # dictionaries belong to a stream
        return reader.schema, list(reader)


def _concat(schema: pa.Schema, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return pa.concat_batches(batches)
