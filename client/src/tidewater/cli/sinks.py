"""How `tidewater consume` prints: one class per format, fed with the bodies of answers."""

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

import msgspec

from tidewater import wire
from tidewater_core import names
from tidewater_core.errors import Invalid

if TYPE_CHECKING:
    import pyarrow as pa


class Sink(Protocol):
    """Where messages go."""

    accept: str
    """The content type that the sink wants to be fed."""

    def __init__(self, out: BinaryIO) -> None:
        """Write to `out`."""

    def take(self, body: bytes, room: int) -> tuple[int, int | None]:
        """Write at most `room` messages; return their number and the offset after the last."""

    def flush(self) -> None:
        """Hand on what was written."""

    def close(self) -> None:
        """End the output."""


class _Lines(ABC):
    """Base of the formats that are fed with NDJSON."""

    accept = wire.NDJSON

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def take(self, body: bytes, room: int) -> tuple[int, int | None]:
        """Write the messages of an NDJSON body."""
        lines = body.splitlines()[:room]
        if not lines:
            return 0, None
        self._write(lines)
        return len(lines), _offset.decode(lines[-1]).offset + 1

    @abstractmethod
    def _write(self, lines: list[bytes]) -> None:
        """Write messages in the format."""

    def flush(self) -> None:
        """Hand on what was written."""
        self._out.flush()

    def close(self) -> None:
        """End the output."""
        self.flush()


class NdjsonSink(_Lines):
    """A message per line, as the server wrote it."""

    def _write(self, lines: list[bytes]) -> None:
        self._out.write(b"\n".join(lines) + b"\n")


class JsonSink(_Lines):
    """One indented array."""

    def __init__(self, out: BinaryIO) -> None:
        """Begin the array."""
        super().__init__(out)
        self._lead = b"[\n"

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            self._out.write(self._lead + msgspec.json.format(line, indent=2))
            self._lead = b",\n"

    def close(self) -> None:
        """End the array."""
        self._out.write(b"\n]\n" if self._lead == b",\n" else b"[]\n")
        self.flush()


class RawSink(_Lines):
    """The values alone, each with a line feed after it."""

    def _write(self, lines: list[bytes]) -> None:
        for message in wire.decode_ndjson(b"\n".join(lines)):
            self._out.write(_text(message.value) + b"\n")


class ArrowSink:
    """An Arrow IPC stream of all that was read."""

    accept = wire.ARROW

    def __init__(self, out: BinaryIO) -> None:
        """Refuse to write bytes to a terminal."""
        if out is sys.stdout.buffer and sys.stdout.isatty():
            raise Invalid("BadArguments", "Arrow is not for a terminal: redirect the output")
        self._out = out
        self._writer: pa.RecordBatchStreamWriter | None = None

    def take(self, body: bytes, room: int) -> tuple[int, int | None]:
        """Write the rows of an Arrow body."""
        import pyarrow as pa

        count, following = 0, None
        with pa.ipc.open_stream(body) as batches:
            if self._writer is None:
                self._writer = pa.ipc.new_stream(self._out, batches.schema)
            for batch in batches:
                rows = batch.slice(0, room - count)
                if rows.num_rows:
                    self._writer.write_batch(rows)
                    count += rows.num_rows
                    following = rows.column(names.TW_OFFSET)[-1].as_py() + 1
        return count, following

    def flush(self) -> None:
        """Hand on what was written."""
        self._out.flush()

    def close(self) -> None:
        """End the stream."""
        if self._writer is not None:
            self._writer.close()
        self.flush()


SINKS: Final[dict[str, type[Sink]]] = {
    "ndjson": NdjsonSink,
    "json": JsonSink,
    "raw": RawSink,
    "arrow": ArrowSink,
}


class _Offset(msgspec.Struct):
    offset: int


_offset = msgspec.json.Decoder(_Offset)


def _text(value: Any) -> bytes:
    if value is None:
        return b""
    return value if isinstance(value, bytes) else msgspec.json.encode(value)
