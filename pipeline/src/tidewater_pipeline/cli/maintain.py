"""`tidewater-pipeline maintain`: a topic's whole upkeep in one session, as the operator runs it."""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from tidewater_core.errors import TidewaterError
from tidewater_core.names import HOLD, ORPHANS_AT, TopicName
from tidewater_pipeline.cli.run import (
    EXIT_AGAIN,
    EXIT_GOOD,
    EXIT_PERSON,
    EXIT_STOPPED,
    EXIT_WRONG,
    Run,
    StoppedError,
    cores_of,
    failure,
    stopped_by_sigterm,
    timed,
)
from tidewater_pipeline.holding import release
from tidewater_pipeline.jobs import compact, expire, manifests, orphans, retention
from tidewater_pipeline.places import StoreSettings
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.state import Size
from tidewater_pipeline.termination import RunResult, TopicResult
from tidewater_pipeline.upkeep import (
    STEPS,
    UpkeepOptions,
    UpkeepPlan,
    Verdict,
    orphans_due,
    plan_upkeep,
    skipped,
    verdict,
)

Step = Callable[[Session, TopicTable, Any], Report]
RUNNERS: Final[dict[str, Step]] = {
    "retention": retention.run,
    "compact": compact.run,
    "manifests": manifests.run,
    "expire": expire.run,
    "orphans": orphans.run,
}
TERMINATION_LOG: Final = Path("/dev/termination-log")
assert tuple(RUNNERS) == STEPS


def execute(session: Session, store: StoreSettings | None, args: argparse.Namespace) -> int:
    """Run the upkeep of every topic and leave the message; return the exit code."""
    began = time.monotonic()
    cores = cores_of(args.master, args.executors, args.executor_cores)
    done: list[TopicResult] = []

    def result(error: Verdict | None = None) -> RunResult:
        seconds = time.monotonic() - began
        return RunResult(
            topics=tuple(done), seconds=seconds, core_seconds=seconds * cores, error=error
        )

    def stopped() -> RunResult:
        return result(Verdict(Outcome.FAILED, True, "stopped by SIGTERM"))

    try:
        with stopped_by_sigterm(lambda: leave(stopped(), args)):
            with session:
                run = Run(session, args, store)
                done.extend(_topics(run))
            whole = result()
    except StoppedError:
        return EXIT_STOPPED
    except TidewaterError as error:
        said = failure("maintain", "", error)
        whole = result(Verdict(Outcome.FAILED, said.retry, said.message))
    except Exception as error:
        leave(result(Verdict(Outcome.FAILED, True, f"unexpected: {error!r}")), args)
        raise
    leave(whole, args)
    text = whole.report() + "\n"
    if args.report is not None:
        args.report.write_text(text)
    else:
        sys.stdout.write(text)
    return exit_code(whole)


def exit_code(result: RunResult) -> int:
    """Say by a number whether running it again makes sense."""
    if result.ok:
        return EXIT_GOOD
    return EXIT_AGAIN if result.retry else EXIT_PERSON


def refuse(error: TidewaterError, args: argparse.Namespace) -> int:
    """Leave a message for a command line or settings that cannot be used."""
    leave(RunResult(error=Verdict(Outcome.FAILED, False, str(error))), args)
    sys.stderr.write(f"tidewater-pipeline: {error}\n")
    return EXIT_WRONG


def leave(result: RunResult, args: argparse.Namespace) -> None:
    """Write the message where Kubernetes finds it, if there is such a place."""
    place: Path = args.termination_log or TERMINATION_LOG
    if args.termination_log is not None or place.exists():
        try:
            place.write_text(result.message())
        except OSError as error:
            sys.stderr.write(f"tidewater-pipeline: {place}: {error}\n")


def _topics(run: Run) -> list[TopicResult]:
    return [maintain(run, TopicName.parse(text)) for text in run.args.topic]


def maintain(run: Run, topic: TopicName) -> TopicResult:
    """Do the steps for one topic; what failed would fail again, so the rest is left to a retry."""
    began = time.monotonic()
    steps: list[Report] = []
    sizes: list[Size] = []
    try:
        with run.turn(str(topic), "maintain"):
            _all_steps(run, topic, steps, sizes)
        judged = verdict(steps)
    except TidewaterError as error:
        said = failure("maintain", str(topic), error)
        judged = Verdict(Outcome.FAILED, said.retry, said.message)
    return TopicResult(
        topic=str(topic),
        verdict=judged,
        steps=steps,
        before=sizes[0] if sizes else None,
        after=sizes[-1] if sizes else None,
        seconds=time.monotonic() - began,
    )


def _all_steps(run: Run, topic: TopicName, steps: list[Report], sizes: list[Size]) -> None:
    known = run.subscribers(str(topic))
    table = run.table(topic, known)
    options = upkeep_options(run.args)
    plan = plan_upkeep(options, known)
    state = table.load()
    sizes.append(state.size)
    if HOLD in state.properties:
        release(table)
    for step in STEPS:
        if step in options.skip:
            continue
        work = partial(_step, run, table, step, plan, options)
        report = timed(run, step, str(topic), work)
        steps.append(report)
        if report.outcome is Outcome.FAILED and not report.is_partial:
            break
    sizes.append(table.load().size)


def _step(
    run: Run, table: TopicTable, step: str, plan: UpkeepPlan, options: UpkeepOptions
) -> Report:
    chosen = plan.option(step)
    if chosen is None:
        return skipped(step, str(table.topic), "the topic keeps everything")
    if step != "orphans":
        return RUNNERS[step](run.session, table, chosen)
    now_ms = run.session.clock.now_us() // 1000
    if not orphans_due(table.load().properties, options.orphans_every, now_ms):
        return skipped(step, str(table.topic), f"looked for less than {options.orphans_every} ago")
    report = RUNNERS[step](run.session, table, chosen)
    if report.outcome is not Outcome.FAILED:
        table.set_properties({ORPHANS_AT: str(now_ms)})
    return report


def upkeep_options(args: argparse.Namespace) -> UpkeepOptions:
    """Return what the command line says."""
    orphans.checked(
        orphans.OrphanOptions(grace=args.grace, settle=args.settle, delete=True), args.force
    )
    return UpkeepOptions(
        keep=args.keep,
        force=True if args.force else None,
        target=args.target_size,
        older_than=args.older_than,
        retain_last=args.retain_last,
        lateness=args.lateness,
        files_min=args.min_files,
        include_open=args.open,
        budget=args.budget,
        manifests_min=args.min_manifests,
        grace=args.grace,
        settle=args.settle,
        orphans_every=args.orphans_every,
        pins=frozenset(args.pin),
        skip=frozenset(args.skip),
    )
