"""`tidewater stats`: show how a topic is doing."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from tidewater.cli.options import add_server, add_topic, client_of

NAME = "stats"
HELP = "Show how a topic is doing: offsets, lag, latency, and the health of its table."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_topic(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Print the measurements."""
    with client_of(args) as client:
        stats = client.admin.stats(args.topic)
    if args.json:
        sys.stdout.write(msgspec.json.encode(stats).decode() + "\n")
        return 0
    rows = list(flatten("", stats))
    width = max([len(name) for name, _ in rows], default=0)
    for name, value in rows:
        sys.stdout.write(f"{name:<{width}}  {value}\n")
    return 0


def flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Return the leaves of a JSON value with their dotted names, in order."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flatten(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flatten(f"{prefix}.{index}" if prefix else str(index), inner)
    else:
        yield prefix, _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)
