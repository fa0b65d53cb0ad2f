"""The `tidewater-pipeline` command: jobs over topics in one session, one JSON report at the end."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Final

from tidewater_core.errors import TidewaterError
from tidewater_core.names import TopicName
from tidewater_pipeline.cli import options as given
from tidewater_pipeline.jobs import (
    audit,
    compact,
    expire,
    ingest,
    manifests,
    orphans,
    replay,
    retention,
)
from tidewater_pipeline.report import GOOD, Outcome, Progress, Report, summary
from tidewater_pipeline.session import ConflictError, Session, TopicTable

Job = Callable[[Session, TopicTable, argparse.Namespace], Report]

EXIT_NOT_GOOD: Final = 1
EXIT_WRONG: Final = 2


def _audit(session: Session, table: TopicTable, _args: argparse.Namespace) -> Report:
    return audit.run(session, table, audit.AuditOptions())


def _compact(session: Session, table: TopicTable, args: argparse.Namespace) -> Report:
    return compact.run(session, table, given.compact_options(args))


def _expire(session: Session, table: TopicTable, args: argparse.Namespace) -> Report:
    chosen = expire.ExpireOptions(
        older_than=args.older_than, retain_last=args.retain_last, pins=frozenset(args.pin)
    )
    return expire.run(session, table, chosen)


def _orphans(session: Session, table: TopicTable, args: argparse.Namespace) -> Report:
    chosen = orphans.OrphanOptions(grace=args.grace, settle=args.settle, delete=args.delete)
    return orphans.run(session, table, chosen)


def _manifests(session: Session, table: TopicTable, args: argparse.Namespace) -> Report:
    return manifests.run(
        session, table, manifests.ManifestOptions(manifests_min=args.min_manifests)
    )


def _retention(session: Session, table: TopicTable, args: argparse.Namespace) -> Report:
    return retention.run(session, table, given.retention_options(args))


def _import(session: Session, table: TopicTable, args: argparse.Namespace) -> Report:
    return ingest.run(session, table, given.import_options(args))


def _replay(session: Session, table: TopicTable, args: argparse.Namespace) -> Report:
    return replay.run(session, table, given.replay_options(args))


RUNNERS: Final[dict[str, Job]] = {
    "audit": _audit,
    "compact": _compact,
    "expire": _expire,
    "orphans": _orphans,
    "manifests": _manifests,
    "retention": _retention,
    "import": _import,
    "replay": _replay,
}
CHECKS: Final[dict[str, Callable[[argparse.Namespace], object]]] = {
    "retention": given.retention_options,
    "import": given.import_options,
    "replay": given.replay_options,
}
"""What can be wrong with a job's arguments, found before Spark takes its time to start."""


def run_jobs(
    session: Session, jobs: list[str], topics: list[TopicName], args: argparse.Namespace
) -> list[Report]:
    """Run every job on every topic; what fails on one does not stop the others."""
    reports: list[Report] = []
    for topic in topics:
        table = session.table(topic, args.table)
        for job in jobs:
            began = time.monotonic()
            report = _one(session, table, job, args)
            report.seconds = time.monotonic() - began
            session.progress.say(f"{topic}: {job}: {report.outcome} {report.message}".rstrip())
            reports.append(report)
    return reports


def _one(session: Session, table: TopicTable, job: str, args: argparse.Namespace) -> Report:
    try:
        return RUNNERS[job](session, table, args)
    except ConflictError as error:
        return Report(job, str(table.topic), outcome=Outcome.CONFLICT, message=str(error))
    except TidewaterError as error:
        return Report(job, str(table.topic), outcome=Outcome.FAILED, message=str(error))


def cores_of(master: str) -> int:
    """Count the cores of a local master, for the cost in the report."""
    number = re.fullmatch(r"local\[(\d+)\]", master)
    if number:
        return int(number.group(1))
    return os.cpu_count() or 1 if master == "local[*]" else 1


def execute(jobs: list[str], args: argparse.Namespace) -> int:
    """Open the session, run the jobs, write the report."""
    topics = [TopicName.parse(text) for text in args.topic]
    session = Session(
        given.catalog_settings(args),
        given.spark_settings(args),
        Progress(quiet=args.quiet),
    )
    with session:
        reports = run_jobs(session, jobs, topics, args)
    text = summary(reports, session.start_seconds, cores_of(args.master))
    if args.report is not None:
        args.report.write_text(text + "\n")
    else:
        sys.stdout.write(text + "\n")
    return 0 if all(report.outcome in GOOD for report in reports) else EXIT_NOT_GOOD


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 not all good, 2 wrong usage."""
    args = given.build_parser().parse_args(argv)
    try:
        jobs = given.parse_jobs(args.jobs)
        for job in jobs:
            if job in CHECKS:
                CHECKS[job](args)
        return execute(jobs, args)
    except TidewaterError as error:
        sys.stderr.write(f"tidewater-pipeline: {error}\n")
        return EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
