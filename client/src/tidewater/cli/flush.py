"""`tidewater flush`: make everything stored so far visible in the table."""

import argparse
import sys

import msgspec

from tidewater.cli.options import add_server, add_topic, client_of

NAME = "flush"
HELP = """Make everything stored so far visible in the table, and wait for it.

Prints the snapshot that holds it and, per partition, the offset below which nothing is missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_topic(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Flush and print what is visible."""
    with client_of(args) as client:
        flushed = client.admin.flush(args.topic)
    if args.json:
        sys.stdout.write(msgspec.json.encode(flushed).decode() + "\n")
        return 0
    snapshot = flushed.snapshot_id if flushed.snapshot_id is not None else "(table is empty)"
    sys.stdout.write(f"snapshot {snapshot}\n")
    for partition, offset in sorted(flushed.frontier.items()):
        sys.stdout.write(f"partition {partition}: every offset below {offset}\n")
    return 0
