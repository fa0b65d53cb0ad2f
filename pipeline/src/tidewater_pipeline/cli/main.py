"""The `tidewater-pipeline` command: jobs over topics in one session, one JSON report at the end."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

from tidewater_core.errors import Retryable, TidewaterError
from tidewater_core.names import TopicName
from tidewater_pipeline.cli import maintain
from tidewater_pipeline.cli import options as given
from tidewater_pipeline.cli.arguments import MAINTAIN, build_parser
from tidewater_pipeline.cli.run import (
    EXIT_AGAIN,
    EXIT_GOOD,
    EXIT_PERSON,
    EXIT_STOPPED,
    EXIT_WRONG,
    UPKEEP,
    Run,
    StoppedError,
    cores_of,
    failure,
    stopped_by_sigterm,
    timed,
)
from tidewater_pipeline.executors import VARIABLES, pod_template
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
from tidewater_pipeline.own_pod import own_pod
from tidewater_pipeline.report import GOOD, Progress, Report, summary
from tidewater_pipeline.session import Session, TopicTable

Job = Callable[[Run, TopicTable], Report]


def _audit(run: Run, table: TopicTable) -> Report:
    return audit.run(run.session, table, audit.AuditOptions())


def _compact(run: Run, table: TopicTable) -> Report:
    return compact.run(run.session, table, given.compact_options(run.args))


def _expire(run: Run, table: TopicTable) -> Report:
    args = run.args
    chosen = expire.ExpireOptions(
        older_than=args.older_than or expire.OLDER_THAN,
        retain_last=args.retain_last,
        pins=frozenset(args.pin),
        cursors=run.subscribers(str(table.topic)).cursors,
    )
    return expire.run(run.session, table, chosen)


def _orphans(run: Run, table: TopicTable) -> Report:
    return orphans.run(run.session, table, given.orphan_options(run.args))


def _manifests(run: Run, table: TopicTable) -> Report:
    chosen = manifests.ManifestOptions(manifests_min=run.args.min_manifests)
    return manifests.run(run.session, table, chosen)


def _retention(run: Run, table: TopicTable) -> Report:
    options = given.retention_options(run.args)
    if not options.force:
        known = run.subscribers(str(table.topic))
        options = replace(options, cursors=(*options.cursors, *known.cursors))
    return retention.run(run.session, table, options)


def _import(run: Run, table: TopicTable) -> Report:
    hold = run.hold(str(table.topic), "import")
    return ingest.run(run.session, table, given.import_options(run.args), hold)


def _replay(run: Run, table: TopicTable) -> Report:
    hold = run.hold(str(table.topic), "replay")
    return replay.run(run.session, table, given.replay_options(run.args), hold)


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
    "orphans": given.orphan_options,
    "retention": given.retention_options,
    "import": given.import_options,
    "replay": given.replay_options,
    MAINTAIN: maintain.upkeep_options,
}
"""What can be wrong with a job's arguments, found before Spark takes its time to start."""


def run_jobs(run: Run, jobs: list[str], topics: list[TopicName]) -> list[Report]:
    """Run every job on every topic; what fails on one does not stop the others.

    But for what a disk refused: the job behind it could remove what is nowhere else.
    """
    reports = []
    for topic in topics:
        for job in jobs:
            reports.append(timed(run, job, str(topic), partial(_one, run, topic, job)))
            if reports[-1].is_last:
                break
    return reports


def _one(run: Run, topic: TopicName, job: str) -> Report:
    with run.turn(str(topic), job) if job in UPKEEP else nullcontext():
        return RUNNERS[job](run, run.table(topic))


def exit_code(reports: list[Report]) -> int:
    """Say by a number how it went, the worst of all reports."""
    bad = [report for report in reports if report.outcome not in GOOD]
    if not bad:
        return EXIT_GOOD
    return EXIT_AGAIN if all(report.retry for report in bad) else EXIT_PERSON


def execute(jobs: list[str], args: argparse.Namespace) -> int:
    """Open the session, run the jobs, write the report."""
    topics = [TopicName.parse(text) for text in args.topic]
    where = given.places(args, os.environ)
    given.check_store(jobs, args, where.store)
    progress = Progress(quiet=args.quiet)
    pod = _own_pod(args, progress)
    with _pod_template(args, pod) as template:
        spark = given.spark_settings(args, os.environ, template, pod)
        session = Session(where.catalog, spark, progress)
        if jobs == [MAINTAIN]:
            return maintain.execute(session, where.store, args)
        with stopped_by_sigterm(lambda: None), session:
            reports = run_jobs(Run(session, args, where.store), jobs, topics)
    cores = cores_of(args.master, args.executors, args.executor_cores)
    text = summary(reports, session.start_seconds, cores)
    if args.report is not None:
        args.report.write_text(text + "\n")
    else:
        sys.stdout.write(text + "\n")
    return exit_code(reports)


def _own_pod(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Look at our own pod if there are to be executors; without it they have less."""
    if not args.executors or not all(os.environ.get(name) for name in VARIABLES):
        return {}
    try:
        return own_pod(os.environ)
    except Retryable as error:
        progress.say(f"executors without the driver's secrets and service account: {error}")
        return {}


@contextmanager
def _pod_template(args: argparse.Namespace, pod: Mapping[str, Any]) -> Iterator[str]:
    """Write the pod template of executors while a run needs it."""
    if not args.executors:
        yield ""
        return
    with tempfile.NamedTemporaryFile("w", prefix="executor-", suffix=".yaml") as file:
        file.write(pod_template(pod))
        file.flush()
        yield file.name


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 good, 1 try again, 2 wrong usage, 3 a person must look."""
    args = build_parser().parse_args(argv)
    jobs: list[str] = []
    try:
        jobs = given.parse_jobs(args.jobs)
        given.check_numbers(args)
        given.check_report(args)
        for job in jobs:
            if job in CHECKS:
                CHECKS[job](args)
        return execute(jobs, args)
    except StoppedError:
        return EXIT_STOPPED
    except TidewaterError as error:
        if jobs == [MAINTAIN]:
            return maintain.refuse(error, args)
        sys.stderr.write(f"tidewater-pipeline: {error}\n")
        said = failure("", "", error)
        return EXIT_AGAIN if said.retry else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
