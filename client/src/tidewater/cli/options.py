"""Arguments that the commands share, and the client they make."""

import argparse
import math
import os
from pathlib import Path
from typing import Final

from tidewater.client import Client
from tidewater.credentials import Token
from tidewater.origin import DEFAULT_URL
from tidewater_core.errors import Invalid
from tidewater_core.names import TopicName

SECONDS_MAX: Final = 1_000_000.0
"""Eleven days: what is far longer no system call takes."""


def add_server(parser: argparse.ArgumentParser) -> None:
    """Declare where the server is and how to speak to it."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default=os.environ.get("TIDEWATER_URL", DEFAULT_URL),
        help=f"address of a worker (default: $TIDEWATER_URL or {DEFAULT_URL})",
    )
    token = group.add_mutually_exclusive_group()
    token.add_argument(
        "--token",
        default=os.environ.get("TIDEWATER_TOKEN"),
        help="bearer token to send (default: $TIDEWATER_TOKEN; other users of the machine may see "
        "an argument)",
    )
    token.add_argument(
        "--token-file",
        metavar="PATH",
        default=os.environ.get("TIDEWATER_TOKEN_FILE"),
        help="file that holds the bearer token, read again when it changes "
        "(default: $TIDEWATER_TOKEN_FILE)",
    )
    group.add_argument(
        "--ca",
        metavar="PATH",
        default=os.environ.get("TIDEWATER_CA"),
        help="file of the CA that signed the server's certificate (default: $TIDEWATER_CA, else "
        "those that the machine trusts)",
    )
    group.add_argument(
        "--timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="give up on an answer after this long (default: 30)",
    )


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Declare the topic."""
    parser.add_argument(
        "topic",
        type=topic_name,
        metavar="[NAMESPACE/]TOPIC",
        help="the topic; a bare name means default/TOPIC",
    )


def topic_name(text: str) -> TopicName:
    """Read a topic's name for argparse."""
    try:
        return TopicName.parse(text if "/" in text else f"default/{text}")
    except Invalid as error:
        raise argparse.ArgumentTypeError(error.message) from error


def positive(text: str) -> int:
    """Read a number above zero for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return int(text)


def seconds(text: str) -> float:
    """Read a time above zero for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= SECONDS_MAX:  # NaN is neither
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds above zero, and {SECONDS_MAX:,.0f} at most"
        )
    return found


def partition_number(text: str) -> int:
    """Read a partition's number for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a partition: 0, 1, 2 …")
    return int(text)


def token_of(args: argparse.Namespace) -> Token | None:
    """Return the token that the arguments name; the command line wins over the environment."""
    if args.token_file is not None and args.token == os.environ.get("TIDEWATER_TOKEN"):
        return Path(args.token_file)
    token: str | None = args.token
    return token


def client_of(args: argparse.Namespace) -> Client:
    """Return a client of the server that the arguments name."""
    return Client(args.url, token=token_of(args), ca=args.ca, timeout_s=args.timeout)
