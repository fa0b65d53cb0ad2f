"""`tidewater consume --subscription`: print what a subscription delivers, and acknowledge it."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidewater import wire
from tidewater.cli.options import client_of
from tidewater.cli.progress import Progress
from tidewater.cli.sinks import SINKS
from tidewater.consumer import Consumer
from tidewater.deliveries import ArrowDelivery, Delivery
from tidewater.pulling import ConsumerOptions
from tidewater_core.errors import Invalid

if TYPE_CHECKING:
    from tidewater.cli.sinks import Sink

BATCH: Final = 1_000
"""Messages that are printed, and then acknowledged, at a time."""
LOOK_S: Final = 0.5
"""How often a quiet subscription is looked after."""
QUIET_S: Final = 2.0
"""Without --follow: it ends when nothing has come for this long."""
EXIT_INTERRUPTED: Final = 130


def run(args: argparse.Namespace) -> int:
    """Print until nothing more comes, the limit is reached, or somebody interrupts."""
    if args.partition is not None or args.start != "earliest":
        raise Invalid(
            "BadArguments", "a subscription knows where it is: no --from or --partition with it"
        )
    options = ConsumerOptions(
        name=args.consumer, prefetch=min(args.limit or BATCH, BATCH), timeout_s=args.timeout
    )
    progress = Progress("read", quiet=args.quiet or sys.stdout.isatty())
    with client_of(args) as client:
        consumer = client.consumer(args.topic, args.subscription, options)
        with _interruptible(consumer) as caught, consumer:
            sink = SINKS[args.format](sys.stdout.buffer)
            try:
                _print(args, consumer, sink, progress)
            finally:
                # What was printed is acknowledged, the rest goes to others: closing sees to it.
                sink.close()
        note = "" if args.no_ack else f"{consumer.tally.acked:,} acknowledged"
        progress.finish(note)
    return EXIT_INTERRUPTED if signal.SIGINT in caught else 0


def _print(args: argparse.Namespace, consumer: Consumer, sink: "Sink", progress: Progress) -> None:
    quiet_s = 0.0
    told = ""
    while not consumer.is_closed:
        room = BATCH if args.limit is None else min(BATCH, args.limit - progress.messages)
        if room <= 0:
            return
        found = _receive(consumer, args.format, room)
        if not found:
            quiet_s += LOOK_S
            told = _tell_trouble(consumer, told)
            if not args.follow and quiet_s >= QUIET_S and consumer.trouble is None:
                return
            continue
        quiet_s = 0.0
        body = _body(found, args.format)
        count, _ = sink.take(body, room)
        # Printed first, acknowledged then: what nobody saw comes again.
        sink.flush()
        progress.add(count, len(body))
        if not args.no_ack:
            _ack(found, count)


def _receive(consumer: Consumer, style: str, room: int) -> list[Any]:
    if style != "arrow":
        return list(consumer.receive_many(room, LOOK_S))
    batch = consumer.receive_arrow(LOOK_S)
    return [] if batch is None else [batch]


def _body(found: list[Any], style: str) -> bytes:
    """Return messages as a worker would have sent them to be printed."""
    if style == "arrow":
        batch: ArrowDelivery = found[0]
        return wire.arrow_body(batch.batch)
    return msgspec.json.Encoder().encode_lines([_line(message) for message in found])


def _line(message: Delivery) -> dict[str, Any]:
    line: dict[str, Any] = {
        "partition": message.partition,
        "offset": message.offset,
        "time": message.time,
        **wire.texts("key", message.key),
        **wire.texts("value", message.value),
        "headers": message.headers,
        "delivery": message.attempt,
    }
    return line


def _ack(found: list[Any], count: int) -> None:
    for item in found:
        if isinstance(item, ArrowDelivery):
            item.ack(slice(0, count))
        else:
            item.ack()


def _tell_trouble(consumer: Consumer, told: str) -> str:
    now = str(consumer.trouble or "")
    if now and now != told:
        sys.stderr.write(f"tidewater: {now}; going on\n")
    return now


@contextmanager
def _interruptible(consumer: Consumer) -> Iterator[set[int]]:
    """Let Ctrl-C and SIGTERM end the loop rather than the program; a second one ends that too."""
    caught: set[int] = set()

    def stop(number: int, _frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.add(number)
        consumer.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
