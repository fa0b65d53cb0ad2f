"""`tidewater compact`: compact topics of an embedded worker, with Spark on this machine.

PySpark is large and few need it, so it has an environment of its own, made by `make
setup-pipeline`: in a checkout the command makes it when it is first used. Where this Python has
PySpark, that is used.
"""

import argparse
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tidewater_core.errors import Invalid, Retryable
from tidewater_pipeline.cli.arguments import (
    FORCE_HELP,
    add_compact_arguments,
    add_session_arguments,
)

NAME = "compact"
HELP = "Join the small files of a topic's table into large ones, in order, with Spark."
INTERMIXED = True

ENVIRONMENT: Final = ".venv-pipeline"
TARGET: Final = "setup-pipeline"
DATA: Final = "data"
"""Where `make run` has it."""
PYTHON_VARIABLE: Final = "TIDEWATER_PIPELINE_PYTHON"
PASSED_ON: Final = (
    "settings",
    "coordination",
    "coordination_prefix",
    "master",
    "memory",
    "report",
    "target_size",
    "min_files",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "topic",
        nargs="+",
        metavar="NS/NAME",
        help="the topics to compact; a bare name means default/NAME",
    )
    add_compact_arguments(parser)
    parser.add_argument("--force", action="store_true", help=FORCE_HELP)
    parser.add_argument(
        "--then",
        default="",
        metavar="JOB[,JOB…]",
        help="further jobs in the same session, such as expire or audit (default: none)",
    )
    add_session_arguments(parser, data=f"./{DATA}")


def run(args: argparse.Namespace) -> int:
    """Run it here or in the environment that has PySpark."""
    words = command_words(args)
    if find_spec("pyspark") is not None:
        from tidewater_pipeline.cli.main import main

        return main(words)
    environment = dict(os.environ)
    python = find_python(environment, Path(sys.prefix))
    if python is None:
        make_environment(Path(sys.prefix).parent)
        python = find_python(environment, Path(sys.prefix))
    if python is None:
        raise Invalid("SparkMissing", f"`make {TARGET}` has made no {ENVIRONMENT}")
    return subprocess.run([python, "-m", "tidewater_pipeline", *words], check=False).returncode


def command_words(args: argparse.Namespace) -> list[str]:
    """Write the command line of `tidewater-pipeline` that does the same."""
    words = [",".join(["compact", *filter(None, args.then.split(","))])]
    for topic in args.topic:
        # `orders` alone is a topic of the namespace that `tidewater dev` uses.
        words += ["--topic", topic if "/" in topic else f"default/{topic}"]
    if not args.catalog and args.settings is None:
        words += ["--data", str(args.data or Path(DATA))]
    for option in PASSED_ON:
        value = getattr(args, option)
        if value is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    words += ["--lateness", str(args.lateness), "--budget", str(args.budget)]
    for option in ("catalog", "conf"):
        for pair in getattr(args, option):
            words += [f"--{option}", pair]
    return [*words, *(f"--{flag}" for flag in ("open", "quiet", "force") if getattr(args, flag))]


def find_python(environment: dict[str, str], prefix: Path) -> str | None:
    """Return a Python that has PySpark; None: there is none yet."""
    if named := environment.get(PYTHON_VARIABLE):
        return named
    for folder in (prefix.parent, Path.cwd()):
        python = folder / ENVIRONMENT / "bin" / "python"
        if (folder / ENVIRONMENT / ".ready").exists() and python.exists():
            return str(python)
    return None


def make_environment(root: Path) -> None:
    """Make the environment with PySpark, if this is a checkout; else say how to get one."""
    if not (root / "mk" / "pipeline.mk").exists() or shutil.which("make") is None:
        raise Invalid(
            "SparkMissing",
            f"PySpark is not installed here. In a checkout run `make {TARGET}` once (it makes "
            f"{ENVIRONMENT}), or let {PYTHON_VARIABLE} name a Python with tidewater-pipeline",
        )
    sys.stderr.write(f"PySpark is needed (450 MB, once): make {TARGET}\n")
    made = subprocess.run(["make", "-C", str(root), TARGET], check=False)  # noqa: S607
    if made.returncode != 0:
        raise Retryable("SparkMissing", f"`make {TARGET}` failed: what it said stands above")
