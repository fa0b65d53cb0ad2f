"""`tidewater produce`: send lines, NDJSON messages or whole files to a topic."""

import argparse
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tidewater import wire
from tidewater.cli.options import (
    add_server,
    add_topic,
    client_of,
    partition_number,
    positive,
)
from tidewater.cli.progress import Progress
from tidewater.producer import Producer
from tidewater.wire import Message, Produced
from tidewater_core.errors import Invalid, OutcomeUnknown, TidewaterError

NAME = "produce"
HELP = """Send messages to a topic.

Messages are taken from the command line, from files, or from standard input. They are sent in
batches; each batch is stored whole or not at all, and once even if it has to be sent again."""

INTERMIXED = True
"""Options may stand before, between and behind the messages."""

EPILOG = """examples:
  tidewater produce default/quickstart hello world
  seq 1000000 | tidewater produce default/quickstart
  tidewater produce shop/orders --format ndjson < orders.ndjson
  tidewater produce shop/photos --format raw --file a.jpg --file b.jpg
  tidewater produce shop/orders --key-separator : 'alice:{"amount": 3}'

An NDJSON line is one message: {"key": "…", "value": …, "headers": {"…": "…"}}; all parts are
optional, and bytes that are not UTF-8 go into key_b64 and value_b64."""

READ_BYTES: Final = 1 << 20
LINE_BYTES_MAX: Final = 64 << 20
BATCH_BYTES_MAX: Final = 4 << 20
"""A batch is sent when it has this many bytes, however few messages it holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = EPILOG
    add_topic(parser)
    parser.add_argument("messages", nargs="*", metavar="MESSAGE", help="messages to send")
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="PATH",
        help="read messages from a file, '-' for standard input; may be repeated",
    )
    parser.add_argument(
        "--format",
        choices=("lines", "ndjson", "raw"),
        default="lines",
        help="lines: each line is a value (default); ndjson: each line is a message as JSON; "
        "raw: each file is one value",
    )
    parser.add_argument("--key", help="key of every message")
    parser.add_argument(
        "--key-separator",
        metavar="TEXT",
        help="with --format lines: a line is KEY, this text, VALUE",
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="header of every message; may be repeated",
    )
    parser.add_argument("--partition", type=partition_number, help="send to this partition")
    parser.add_argument(
        "--ack",
        choices=("log", "table"),
        default="log",
        help="log: stored once fsynced in the log (default); table: once it is a row of the table",
    )
    parser.add_argument(
        "--batch", type=positive, default=1000, metavar="N", help="messages per batch (1000)"
    )
    parser.add_argument("--print-acks", action="store_true", help="print each ack as a JSON line")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Send everything, then tell what was stored."""
    plan = Plan.of(args)
    with client_of(args) as client:
        # A server that is down or a topic that is missing is told at once, not after retries.
        client.admin.topic(args.topic)
        producer = client.producer(args.topic, ack=args.ack, partition=args.partition)
        progress = Progress("stored", quiet=args.quiet)
        tally = Tally(print_acks=args.print_acks)
        try:
            for batch in plan.batches():
                if not batch.count:
                    continue
                produced = batch.send(producer)
                progress.add(batch.count, batch.nbytes)
                tally.add(produced)
        except BrokenPipeError:
            raise
        except (TidewaterError, OSError, UnicodeError) as error:
            progress.finish(tally.text())
            if progress.messages:
                raise _partly(error, progress.messages) from error
            raise
        except KeyboardInterrupt:
            progress.finish(tally.text())
            raise
        progress.finish(tally.text())
    return 0


@dataclass(frozen=True, slots=True)
class Batch:
    """An encoded batch."""

    body: bytes
    content_type: str
    count: int
    nbytes: int
    is_unkeyed: bool = False
    """No message has a key, for certain."""

    def send(self, producer: Producer) -> Produced:
        """Send it."""
        return producer.send_body(
            self.body, self.content_type, (None,) if self.is_unkeyed else None
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Where messages come from and what is added to them."""

    values: list[str]
    paths: list[str]
    style: str
    key: str | None
    separator: bytes | None
    headers: dict[str, str]
    batch_max: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Plan":
        """Check the arguments against each other."""
        if args.messages and args.file:
            raise Invalid("BadArguments", "give messages or files, not both")
        if args.key is not None and args.key_separator is not None:
            raise Invalid("BadArguments", "give --key or --key-separator, not both")
        if args.key_separator is not None and args.format != "lines":
            raise Invalid("BadArguments", "--key-separator goes with --format lines")
        headers = {}
        for text in args.header:
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise Invalid("BadArguments", f"--header {text!r} must be written NAME=VALUE")
            headers[name] = value
        if args.format == "ndjson" and (args.key is not None or headers):
            raise Invalid("BadArguments", "NDJSON messages carry their own key and headers")
        return cls(
            values=args.messages,
            paths=args.file or ([] if args.messages else ["-"]),
            style=args.format,
            key=args.key,
            separator=args.key_separator.encode() if args.key_separator else None,
            headers=headers,
            batch_max=args.batch,
        )

    def batches(self) -> Iterator[Batch]:
        """Return everything to be sent, in order."""
        if self.values:
            lines = [value.encode() for value in self.values]
            for at in range(0, len(lines), self.batch_max):
                yield self.encode(lines[at : at + self.batch_max])
        for path in self.paths:
            descriptor = sys.stdin.fileno() if path == "-" else _open(path)
            try:
                if self.style == "raw":
                    yield self.encode([_read_all(descriptor)])
                else:
                    for lines in line_batches(descriptor, self.batch_max):
                        yield self.encode(lines)
            finally:
                if path != "-":
                    os.close(descriptor)

    def encode(self, lines: list[bytes]) -> Batch:
        """Encode one batch."""
        nbytes = sum(map(len, lines))
        if self.style == "ndjson":
            lines = [line for line in lines if line.strip()]
            return Batch(b"\n".join(lines) + b"\n", wire.NDJSON, len(lines), nbytes)
        is_unkeyed = self.key is None and self.separator is None
        body = wire.encode_json(map(self._message, lines))
        return Batch(body, wire.JSON, len(lines), nbytes, is_unkeyed)

    def _message(self, line: bytes) -> Message:
        if self.separator is None:
            return Message(line, self.key, self.headers)
        key, found, value = line.partition(self.separator)
        if not found:
            raise Invalid("BadLine", f"no {self.separator!r} in the line {line[:80]!r}")
        return Message(value, key, self.headers)


@dataclass(slots=True)
class Tally:
    """Where the messages went."""

    print_acks: bool
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Per partition: first and last offset."""

    def add(self, produced: Produced) -> None:
        """Note the acks of one batch."""
        for ack in produced.acks:
            first, last = self.ranges.get(ack.partition, (ack.offset, ack.offset))
            end = ack.offset + ack.count - 1
            self.ranges[ack.partition] = (min(first, ack.offset), max(last, end))
            if self.print_acks:
                sys.stdout.buffer.write(msgspec.json.encode(ack) + b"\n")

    def text(self) -> str:
        """Return the ranges for people."""
        parts = [f"partition {p}: {a}…{b}" for p, (a, b) in sorted(self.ranges.items())]
        return ", ".join(parts[:8]) + (" …" if len(parts) > 8 else "")


def line_batches(descriptor: int, count_max: int) -> Iterator[list[bytes]]:
    """Cut input into lines; what has arrived is handed on, not held back to fill a batch."""
    rest = b""
    lines: list[bytes] = []
    nbytes = 0
    while chunk := os.read(descriptor, READ_BYTES):
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        if len(rest) > LINE_BYTES_MAX:
            raise Invalid("BadLine", f"a line of more than {LINE_BYTES_MAX} bytes")
        for line in parts:
            lines.append(line)
            nbytes += len(line)
            if len(lines) >= count_max or nbytes >= BATCH_BYTES_MAX:
                yield lines
                lines, nbytes = [], 0
        if lines and not select.select([descriptor], [], [], 0)[0]:
            yield lines
            lines, nbytes = [], 0
    if rest:
        lines.append(rest)
    if lines:
        yield lines


def _read_all(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, READ_BYTES), b""))


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise Invalid("BadFile", f"cannot read {path}: {error.strerror}") from error


def _partly(error: Exception, stored: int) -> OutcomeUnknown:
    """Say how far it came: to run it again as a whole would store the first messages twice."""
    return OutcomeUnknown("PartlyStored", f"the first {stored:,} messages are stored; then {error}")
