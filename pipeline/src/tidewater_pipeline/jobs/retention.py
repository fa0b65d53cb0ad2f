"""retention: removes rows older than a limit, by whole files.

The order is the promise: first `tidewater.start.<p>` is raised, then files go, so that no reader is
ever told of rows that are gone. Files are named one by one, from the snapshot on which the starts
were decided, and looked for in the newest one: rows that the writer adds meanwhile, however old,
are not touched. A file that still holds younger rows stays whole; its older rows are below the
start and count as removed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tidewater_core.compaction import from_us, period_start
from tidewater_core.names import start_property
from tidewater_core.units import Duration
from tidewater_pipeline.calendar_time import sql_time
from tidewater_pipeline.holding import held
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import ConflictError, Session, SnapshotGoneError, TopicTable
from tidewater_pipeline.state import FileInfo
from tidewater_pipeline.subscribers import Cursor

ATTEMPTS_MAX: Final = 5
REFUSED_SHOWN_MAX: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionOptions:
    """What a person or the Topic can choose."""

    keep: Duration
    """Rows younger than this stay."""
    cursors: tuple[Cursor, ...] = ()
    """Live subscriptions: nothing that one has not read is removed."""
    force: bool = False
    """Remove it all the same."""


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What to do, in this order: raise the starts, then remove the files."""

    starts: Mapping[int, int]
    files: tuple[FileInfo, ...]
    refused: tuple[str, ...]
    """Why nothing may be done."""


def cutoff_us(now_us: int, keep: Duration, time_unit: str | None) -> int:
    """Return the time before which rows go: the edge of a time partition, so that it goes whole."""
    return period_start(now_us - keep.ms * 1000, time_unit)


def plan_retention(
    files: Iterable[FileInfo],
    ends: Mapping[int, int],
    starts: Mapping[int, int],
    options: RetentionOptions,
    *,
    cut_us: int,
) -> RetentionPlan:
    """Decide from the files and, per partition, the end of the offsets that are too old."""
    raised = {p: end for p, end in sorted(ends.items()) if end > starts.get(p, 0)}
    new_starts = {**starts, **raised}
    refused = tuple(
        f"subscription {each.subscription} has read partition {each.partition} up to "
        f"{each.offset}, retention would remove up to {new_starts[each.partition]}"
        for each in options.cursors
        if each.offset < new_starts.get(each.partition, 0)
        and each.partition in raised
        and not options.force
    )
    if refused:
        return RetentionPlan({}, (), refused)
    old = tuple(file for file in files if file.time_high_us < cut_us)
    return RetentionPlan(raised, old, ())


def old_ends_query(
    table: str, snapshot_id: int | None, cut_us: int, starts: Mapping[int, int]
) -> str:
    """Write the query for the end of what is too old, per partition.

    Rows below a start are known to be: of files that hold no others nothing is read.
    """
    kept = "".join(
        f" AND NOT (tw_partition = {partition} AND tw_offset < {start})"
        for partition, start in sorted(starts.items())
        if start > 0
    )
    return (
        f"SELECT tw_partition AS p, max(tw_offset) + 1 AS n FROM {table} "  # noqa: S608 - quoted
        f"VERSION AS OF {snapshot_id} WHERE tw_time < {sql_time(cut_us)}{kept} GROUP BY 1"
    )


@dataclass(slots=True)
class _Done:
    """What a run has done so far, over all attempts."""

    starts: dict[int, int] = field(default_factory=dict)
    removed: int = 0


def run(session: Session, table: TopicTable, options: RetentionOptions) -> Report:
    """Raise the starts and remove the files; a rewrite in between means planning again."""
    state = table.load()
    report = Report("retention", str(table.topic), before=state.size)
    cut = cutoff_us(session.clock.now_us(), options.keep, state.time_unit)
    done = _Done()
    for _attempt in range(ATTEMPTS_MAX):
        try:
            _attempted(session, table, options, cut, report, done)
        except (ConflictError, SnapshotGoneError) as error:
            report.outcome, report.message = Outcome.CONFLICT, error.message
            continue
        break
    report.after = table.settle(state).size
    report.details = {
        "before_time": from_us(cut).isoformat(),
        "starts": {str(p): n for p, n in sorted(done.starts.items())},
        "removed_files": done.removed,
    }
    return report


def _attempted(
    session: Session,
    table: TopicTable,
    options: RetentionOptions,
    cut: int,
    report: Report,
    done: _Done,
) -> None:
    plan = _planned(table, options, cut)
    if plan.refused:
        report.outcome = Outcome.REFUSED
        report.message = "; ".join(plan.refused[:REFUSED_SHOWN_MAX])
        return
    done.starts |= plan.starts
    session.progress.say(f"{table.topic}: removing {len(plan.files)} files before {from_us(cut)}")
    table.set_properties({start_property(p): str(n) for p, n in plan.starts.items()})
    if plan.files:
        table.delete_files({file.path for file in plan.files}, cut)
    done.removed = len(plan.files)
    report.outcome = Outcome.DONE if done.removed or done.starts else Outcome.NOTHING
    report.message = ""


def _planned(table: TopicTable, options: RetentionOptions, cut: int) -> RetentionPlan:
    """Read what is too old from one snapshot, which stays as long as that takes."""
    state, files = table.load_files()
    nbytes = sum(file.nbytes for file in files if file.time_low_us < cut)
    if not nbytes:
        return RetentionPlan({}, (), ())
    with held(table, nbytes):
        state, files = table.load_files()
        query = old_ends_query(table.full_name, state.snapshot_id, cut, state.starts)
        ends = {row["p"]: row["n"] for row in table.session.sql(query)}
    return plan_retention(files, ends, state.starts, options, cut_us=cut)
