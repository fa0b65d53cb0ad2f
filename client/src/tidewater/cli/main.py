"""The `tidewater` command: finds the chosen subcommand and runs it, loading nothing else.

Further packages add subcommands through the entry-point group `tidewater.commands`; each is a
module with `NAME`, `HELP`, `add_arguments(parser)` and `run(args)`. Only the chosen one is
imported, so that `tidewater produce` does not wait for the engine's imports.
"""

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast

from tidewater_core.errors import (
    Corrupt,
    Fenced,
    Invalid,
    OutcomeUnknown,
    Overloaded,
    Retryable,
    TidewaterError,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "tidewater.commands"

BUILT_IN: Final = {
    "produce": "send messages to a topic",
    "consume": "read messages of a topic, or of a subscription",
    "topics": "list the topics",
    "stats": "show a topic's offsets, lag, latency and table",
    "flush": "bring everything stored so far into the table now",
}
DESCRIPTIONS: Final = {
    "dev": "run a worker on this machine, with catalog and warehouse embedded",
    "worker": "run a worker from a settings file",
    "log": "inspect or verify log directories",
    "table": "import Parquet files into a topic's table",
    "compact": "compact a topic's table with Spark",
}
"""What commands of our other packages do, so that `--help` need not import them."""

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
EXIT_CODES: Final[tuple[tuple[type[TidewaterError], int, str], ...]] = (
    (OutcomeUnknown, 4, "no answer came, or a part was stored: look before trying again"),
    (Retryable, 3, "the server cannot be reached or cannot do it now: try again"),
    (Overloaded, 3, ""),
    (Fenced, 5, "another owner has taken over"),
    (Corrupt, 6, "stored data is damaged"),
    (Invalid, 1, "the request is wrong: nothing was done"),
)


class Command(Protocol):
    """What a subcommand's module provides."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        (sys.stdout if arguments else sys.stderr).write(overview())
        return 0 if arguments else 2
    if arguments[0] in {"-V", "--version"}:
        sys.stdout.write(f"tidewater {_version()}\n")
        return 0
    name, rest = arguments[0], arguments[1:]
    command = find(name)
    if command is None:
        known = ", ".join([*BUILT_IN, *_added()])
        sys.stderr.write(f"tidewater: no command {name!r} (there are: {known})\n")
        return 2
    parser = argparse.ArgumentParser(
        prog=f"tidewater {name}",
        description=command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    # argparse otherwise wants all positional arguments of a list side by side.
    intermixed = getattr(command, "INTERMIXED", False)
    return _run(command, (parser.parse_intermixed_args if intermixed else parser.parse_args)(rest))


def find(name: str) -> Command | None:
    """Import the module of a subcommand; None if there is no such command."""
    if name in BUILT_IN:
        return cast("Command", import_module(f"tidewater.cli.{name}"))
    entry = _added().get(name)
    return cast("Command", entry.load()) if entry is not None else None


def overview() -> str:
    """Return the text of `tidewater --help`."""
    added = {name: DESCRIPTIONS.get(name, f"(from {e.value})") for name, e in _added().items()}
    lines = ["usage: tidewater COMMAND [...]", "", "Pub/sub whose storage is Apache Iceberg."]
    for title, commands in (("commands", BUILT_IN), ("commands of installed packages", added)):
        if commands:
            lines += ["", f"{title}:", *(f"  {name:<10} {text}" for name, text in commands.items())]
    codes = {0: "done", 2: "wrong usage"} | {code: text for _, code, text in EXIT_CODES if text}
    lines += ["", "exit codes:", *(f"  {code:<3} {text}" for code, text in sorted(codes.items()))]
    lines += [f"  {EXIT_INTERRUPTED} interrupted", ""]
    lines += ["'tidewater COMMAND --help' tells more. TIDEWATER_URL names a worker's address."]
    return "\n".join(lines) + "\n"


def _run(command: Command, args: argparse.Namespace) -> int:
    try:
        code = command.run(args)
        sys.stdout.flush()
    except TidewaterError as error:
        sys.stderr.write(f"tidewater: {error}\n")
        return next((code for kind, code, _ in EXIT_CODES if isinstance(error, kind)), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough (`| head`). Python would complain again at exit.
        _drop_output()
        return EXIT_BROKEN_PIPE
    except (OSError, UnicodeError) as error:
        sys.stderr.write(f"tidewater: {type(error).__name__}: {error}\n")
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return EXIT_FAILED
    return code


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _added() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    return dict(sorted(found.items()))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tidewater")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
