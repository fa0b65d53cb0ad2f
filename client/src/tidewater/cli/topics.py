"""`tidewater topics`: list the topics of a server."""

import argparse
import sys

import msgspec

from tidewater.cli.options import add_server, client_of

NAME = "topics"
HELP = "List the topics of a server."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--namespace", "-n", help="only those of one namespace")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line per topic."""
    with client_of(args) as client:
        topics = client.admin.topics()
    if args.namespace is not None:
        topics = [topic for topic in topics if topic.namespace == args.namespace]
    if args.json:
        sys.stdout.write(msgspec.json.encode(topics).decode() + "\n")
        return 0
    width = max([len(f"{t.namespace}/{t.name}") for t in topics], default=0)
    for topic in topics:
        name = f"{topic.namespace}/{topic.name}"
        count = "1 partition" if topic.partitions == 1 else f"{topic.partitions} partitions"
        sys.stdout.write(f"{name:<{width}}  {count}\n")
    if not topics:
        sys.stderr.write("no topics\n")
    return 0
