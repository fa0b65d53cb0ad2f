"""`tidewater log`: look at a log directory without a worker."""

import argparse
import datetime
import sys
from pathlib import Path

from tidewater_core.errors import NotFound
from tidewater_worker.log.inspect import (
    SegmentReport,
    broken_files,
    inspect_partition,
    partitions_below,
)

NAME = "log"
HELP = "Inspect or verify the segments of a log directory. Nothing is changed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("inspect", "show the segments, offsets and times of every partition below a directory"),
        ("verify", "read and check every frame; exit code 1 if one is damaged"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("directory", type=Path, help="a partition, a topic or the whole log")


def run(args: argparse.Namespace) -> int:
    """Print a report for each partition."""
    partitions = partitions_below(args.directory)
    if not partitions:
        raise NotFound("NoLog", f"there are no segments below {args.directory}")
    damaged = 0
    for number, directory in enumerate(partitions, 1):
        if sys.stderr.isatty():
            print(f"\r{number}/{len(partitions)} {directory}", end="", file=sys.stderr)
        reports = list(inspect_partition(directory))
        bad = [report for report in reports if report.problem and not report.is_torn]
        damaged += len(bad)
        if args.action == "inspect":
            _show(directory, reports)
        else:
            _verdict(directory, reports)
    return 1 if damaged and args.action == "verify" else 0


def _time(time_us: int) -> str:
    if not time_us:
        return "-"
    moment = datetime.datetime.fromtimestamp(time_us / 1e6, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _show(directory: Path, reports: list[SegmentReport]) -> None:
    print(f"{directory}")
    print(f"  {'segment':>20} {'end':>20} {'frames':>8} {'bytes':>12}  first … last")
    for report in reports:
        print(
            f"  {report.base_offset:>20} {report.end_offset:>20} {report.frames:>8} "
            f"{report.bytes_used:>12}  {_time(report.first_time_us)} … {_time(report.last_time_us)}"
        )
        if report.problem:
            print(f"    {'torn tail' if report.is_torn else 'DAMAGED'}: {report.problem}")
    for path in broken_files(directory):
        print(f"  kept from an earlier repair: {path.name} ({path.stat().st_size} bytes)")


def _verdict(directory: Path, reports: list[SegmentReport]) -> None:
    frames = sum(report.frames for report in reports)
    begin, end = reports[0].base_offset, reports[-1].end_offset
    problems = [report for report in reports if report.problem]
    verdict = (
        "ok" if not problems else "torn tail" if all(p.is_torn for p in problems) else "DAMAGED"
    )
    print(f"{directory}: {verdict}, offsets {begin} to {end}, {frames} frames")
    for report in problems:
        print(f"  {report.path.name}: {report.problem}")
