"""Arguments that the commands share, and the client they make."""

import argparse
import os

from tidewater.client import Client
from tidewater.origin import DEFAULT_URL
from tidewater_core.errors import Invalid
from tidewater_core.names import TopicName


def add_server(parser: argparse.ArgumentParser) -> None:
    """Declare where the server is and how to speak to it."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default=os.environ.get("TIDEWATER_URL", DEFAULT_URL),
        help=f"address of a worker (default: $TIDEWATER_URL or {DEFAULT_URL})",
    )
    group.add_argument(
        "--token-file",
        metavar="PATH",
        help="file that holds the bearer token to send",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="give up on an answer after this long (default: 30)",
    )


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Declare the topic."""
    parser.add_argument("topic", type=topic_name, metavar="NAMESPACE/TOPIC", help="the topic")


def topic_name(text: str) -> TopicName:
    """Read a topic's name for argparse."""
    try:
        return TopicName.parse(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(error.message) from error


def positive(text: str) -> int:
    """Read a number above zero for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return int(text)


def partition_number(text: str) -> int:
    """Read a partition's number for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a partition: 0, 1, 2 …")
    return int(text)


def client_of(args: argparse.Namespace) -> Client:
    """Return a client of the server that the arguments name."""
    token = None
    if args.token_file is not None:
        try:
            with open(args.token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError as error:
            raise Invalid("BadTokenFile", f"cannot read {args.token_file}: {error}") from error
    return Client(args.url, token=token, timeout_s=args.timeout)
