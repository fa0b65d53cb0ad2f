"""`tidewater consume`: print the messages of a topic."""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from tidewater.admin import Bounds
from tidewater.cli import subscribe
from tidewater.cli.options import add_server, add_topic, client_of, partition_number, positive
from tidewater.cli.progress import Progress
from tidewater.cli.sinks import SINKS, Sink
from tidewater.client import Client
from tidewater.reader import AsyncReader
from tidewater.transport_async import AsyncTransport
from tidewater.wire import Gap
from tidewater_core.errors import Invalid, OutcomeUnknown, Overloaded, Retryable, TidewaterError

NAME = "consume"
HELP = """Print the messages of a topic.

Reads from a position of your choice to where the topic ends now, partition after partition, and
stops; with --follow it goes on with new messages as they arrive.

With --subscription it takes what the subscription delivers, acknowledges what it has printed, and
gives the rest back at once when it ends or is interrupted (Ctrl-C)."""

EPILOG = """examples:
  tidewater consume default/quickstart
  tidewater consume default/quickstart --from latest --follow --format raw
  tidewater consume shop/orders --from 2026-01-31T12:00:00Z --partition 2 --limit 100
  tidewater consume shop/orders --format arrow > orders.arrows
  tidewater consume shop/orders --subscription billing --follow"""

PAGE: Final = 10_000
"""Messages asked for at once."""
FOLLOW_WAIT_MS: Final = 10_000
"""How long one request waits for new messages."""

Position = int | datetime | str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = EPILOG
    add_topic(parser)
    parser.add_argument(
        "--from",
        dest="start",
        type=position,
        default="earliest",
        metavar="POSITION",
        help="earliest (default), latest, an offset, or a time like 2026-01-31T12:00:00Z",
    )
    parser.add_argument("--partition", type=partition_number, help="read only this partition")
    parser.add_argument("--subscription", "-s", metavar="NAME", help="consume this subscription")
    parser.add_argument("--consumer", metavar="NAME", help="with --subscription: who you are")
    parser.add_argument(
        "--no-ack", action="store_true", help="with --subscription: look, and leave all there"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after N messages")
    parser.add_argument("--follow", "-f", action="store_true", help="wait for new messages")
    parser.add_argument(
        "--format",
        choices=tuple(SINKS),
        default="ndjson",
        help="ndjson: a message per line (default); json: one indented array; raw: only the "
        "values, one per line; arrow: an Arrow IPC stream",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    add_server(parser)


def position(text: str) -> Position:
    """Read a position for argparse."""
    if text in {"earliest", "latest"}:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a position: earliest, latest, an offset or a time"
        ) from error
    # A time without a zone would mean something else on the next machine: it is UTC.
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def starts(
    wanted: Position, partition: int | None, bounds: dict[int, Bounds]
) -> dict[int, int | datetime]:
    """Return where to begin in each partition that is to be read."""
    if partition is not None and partition not in bounds:
        known = f"it has 0 to {max(bounds)}" if bounds else "it has none"
        raise Invalid("UnknownPartition", f"the topic has no partition {partition}; {known}")
    chosen = bounds if partition is None else {partition: bounds[partition]}
    if wanted == "latest":
        return {p: b.end for p, b in chosen.items()}
    if wanted == "earliest" or isinstance(wanted, str):
        return {p: b.start for p, b in chosen.items()}
    if isinstance(wanted, int) and all(wanted > b.end for b in chosen.values()):
        ends = ", ".join(f"partition {p} at {b.end}" for p, b in list(chosen.items())[:8])
        raise Invalid("OffsetInFuture", f"there is no offset {wanted} yet; the next are {ends}")
    return dict.fromkeys(chosen, wanted)


def run(args: argparse.Namespace) -> int:
    """Print everything from the start position on."""
    if args.subscription is not None:
        return subscribe.run(args)
    if args.consumer is not None or args.no_ack:
        raise Invalid("BadArguments", "--consumer and --no-ack go with --subscription")
    with client_of(args) as client:
        bounds = client.admin.bounds(args.topic)
        begin = starts(args.start, args.partition, bounds)
        out = Output(SINKS[args.format](sys.stdout.buffer), args.limit, quiet=args.quiet)
        try:
            if args.follow:
                asyncio.run(_follow(args, client, begin, out))
            else:
                _replay(args, client, begin, bounds, out)
        finally:
            out.close()
    return 0


class Output:
    """Hands answers to a sink until the limit is reached."""

    def __init__(self, sink: Sink, limit: int | None, *, quiet: bool) -> None:
        """Begin with nothing printed."""
        self.sink = sink
        self._limit = limit
        # A progress line among messages on one terminal would only spoil both.
        self._progress = Progress("read", quiet=quiet or sys.stdout.isatty())
        self._lost: set[tuple[int, Gap]] = set()

    @property
    def room(self) -> int:
        """Return how many messages may be asked for next."""
        return PAGE if self._limit is None else min(PAGE, self._limit - self._progress.messages)

    def take(self, body: bytes) -> int | None:
        """Print an answer; return the offset to read on from, None if it was empty."""
        count, next_offset = self.sink.take(body, self.room)
        self._progress.add(count, len(body))
        return next_offset

    def tell_lost(self, gaps: Mapping[int, list[Gap]]) -> None:
        """Say once of each gap that was read over that no message has its offsets."""
        found = {(partition, gap) for partition, each in gaps.items() for gap in each}
        for partition, gap in sorted(found - self._lost, key=lambda one: (one[0], one[1].start)):
            offsets = f"offsets {gap.start} to {gap.end - 1} of partition {partition}"
            sys.stderr.write(f"tidewater: {offsets} were lost with a volume\n")
        self._lost |= found

    def close(self) -> None:
        """End the output."""
        self.sink.close()
        self._progress.finish()


def _replay(
    args: argparse.Namespace,
    client: Client,
    begin: dict[int, int | datetime],
    bounds: dict[int, Bounds],
    out: Output,
) -> None:
    reader = client.reader(args.topic)
    for partition, start in begin.items():
        at: int | datetime = start
        end = bounds[partition].end
        while out.room > 0 and (isinstance(at, datetime) or at < end):
            room = out.room if isinstance(at, datetime) else min(out.room, end - at)
            answer = reader.response(partition, at, limit=room, accept=out.sink.accept)
            following = out.take(answer.body)
            out.tell_lost(reader.gaps)
            if following is None:
                break
            at = following


async def _follow(
    args: argparse.Namespace, client: Client, begin: dict[int, int | datetime], out: Output
) -> None:
    async with AsyncTransport(
        client.transport.origin,
        timeout_s=args.timeout + FOLLOW_WAIT_MS / 1000,
        connections_max=len(begin),
        # A long poll blocks those that are pipelined behind it.
        pipeline_max=1,
    ) as transport:
        reader = AsyncReader(transport, args.topic)
        running = [asyncio.ensure_future(_tail(reader, p, at, out)) for p, at in begin.items()]
        try:
            # The limit counts over all partitions: whoever reaches it ends the others.
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in running:
                task.cancel()


async def _tail(reader: AsyncReader, partition: int, at: int | datetime, out: Output) -> None:
    while out.room > 0:
        try:
            answer = await reader.response(
                partition, at, limit=out.room, wait_ms=FOLLOW_WAIT_MS, accept=out.sink.accept
            )
        except (Retryable, OutcomeUnknown, Overloaded) as error:
            # Following means to outlive a restart of the server, however long it takes.
            _note(error)
            await asyncio.sleep(1)
            continue
        if out.room <= 0:
            return
        following = out.take(answer.body)
        out.tell_lost(reader.gaps)
        if following is not None:
            at = following
            out.sink.flush()


def _note(error: TidewaterError) -> None:
    sys.stderr.write(f"tidewater: {error}; going on\n")
