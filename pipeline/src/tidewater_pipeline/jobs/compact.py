"""compact: small files of closed time partitions become files of the target size, in order.

The writer only appends, so a rewrite never contradicts it: all that can happen is that the writer
commits first and Spark has to try again. The table is told to let Spark try often and soon, yet not
for ever. A rewrite is checked against all that came since it began: so the history from there on is
held meanwhile, and each call is short. Only partitions that are closed are taken: what is rewritten
once stays as it is. A range that loses all its races is left to the next run; those before and
after it are done all the same, also if it could not be read or written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from tidewater_core.compaction import (
    FILES_MIN,
    LATENESS_US,
    SMALL_SHARE,
    even_share,
    is_due,
    is_small,
    period_start,
)
from tidewater_core.errors import TidewaterError
from tidewater_core.names import TW_OFFSET, TW_PARTITION
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.calendar_time import sql_time
from tidewater_pipeline.holding import held
from tidewater_pipeline.report import Outcome, Report, passes
from tidewater_pipeline.session import SPARK_GONE, ConflictError, Session, TopicTable
from tidewater_pipeline.state import FileInfo, TableState, sql_text
from tidewater_pipeline.syncing import DISK_REFUSED, local_path, synced_early

LARGE_SHARE: Final = 1.8
"""A file past this share of the target is rewritten, too (Iceberg's own default)."""
GROUP_BYTES_MAX: Final = 2 * 1024**3
"""Bytes that are sorted and committed at once: a large partition makes progress in parts."""
RANGE_BYTES_MAX: Final = 4 * 1024**3
"""Bytes of a range for each task that runs at a time: a few minutes of work."""
COMMITS_MAX: Final = 32
"""Commits of a range: each is a race with the writer."""
BUDGET: Final = Duration("30m")
"""Half of what the operator gives a job: the steps behind this one get their turn."""
STOPS: Final = frozenset({SPARK_GONE, "TableMissing", "OutOfMemory", DISK_REFUSED})
"""Reasons after which no other range can be done either, and no step behind this one."""
RANGES_MAX: Final = 24
"""Ranges of one run; the oldest first, the next run goes on."""
LATENESS: Final = Duration("10m")
assert LATENESS.ms * 1000 == LATENESS_US, "table health counts by the same rule"
ORDER: Final = (TW_PARTITION, TW_OFFSET)
SORT_ORDER: Final = ", ".join(f"{column} ASC NULLS FIRST" for column in ORDER)
PROPERTIES: Final[Mapping[str, str]] = {
    # Against a writer that commits every second the default of 4 tries loses every race.
    "commit.retry.num-retries": "40",
    "commit.retry.min-wait-ms": "50",
    "commit.retry.max-wait-ms": "1000",
    # A range gives up after this long; what it wrote is removed by Iceberg, the next run goes on.
    "commit.retry.total-timeout-ms": "120000",
    # A history reader holds a row group, and a query of a few offsets reads one: 128 MiB, the
    # default, would be a lot of memory and of waste.
    "write.parquet.row-group-size-bytes": str(8 * 1024**2),
}
"""Set on a table that does not say otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactOptions:
    """What a person or the Topic can choose."""

    target: ByteSize | None = None
    """Size of the files to make; None: what the table says."""
    files_min: int = FILES_MIN
    """A partition that closed less than a day ago is left alone with fewer small files."""
    lateness: Duration = LATENESS
    """A time partition is closed this long after its end."""
    include_open: bool = False
    """Take the partition that is being written, too."""
    budget: Duration = BUDGET
    """No further range is begun after this long; the next run goes on."""


@dataclass(frozen=True, slots=True)
class Range:
    """Files of adjacent partitions that one rewrite takes."""

    time_low_us: int
    time_high_us: int
    files: int
    nbytes: int
    groups: int = 1
    """What Iceberg rewrites at a time and can commit by itself."""

    def holds(self, file: FileInfo) -> bool:
        """Say if a file is one of those that the call's filter may choose."""
        return file.time_low_us <= self.time_high_us and file.time_high_us >= self.time_low_us


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of a range."""

    files: int = 0
    added: int = 0
    nbytes: int = 0
    failed: int = 0
    error: TidewaterError | None = None
    """Why files have failed."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read what the procedure returns."""
        return cls(
            row["rewritten_data_files_count"],
            row["added_data_files_count"],
            row["rewritten_bytes_count"],
            row["failed_data_files_count"],
        )

    @property
    def is_lost_race(self) -> bool:
        """Say if another commit came first, which is no failure."""
        return isinstance(self.error, ConflictError)

    def to_json(self) -> dict[str, Any]:
        """Return the values for the report."""
        return {
            "rewritten_files": self.files,
            "added_files": self.added,
            "rewritten_bytes": self.nbytes,
            "failed_files": self.failed,
            **({} if self.error is None else {"error": str(self.error)}),
        }


def plan_compact(
    files: Iterable[FileInfo],
    options: CompactOptions,
    *,
    target_bytes: int,
    now_us: int,
    time_unit: str | None,
    range_bytes_max: int = RANGE_BYTES_MAX,
) -> list[Range]:
    """Choose what to rewrite: ranges of time, oldest first, of partitions that are worth it."""
    groups: dict[str, list[FileInfo]] = {}
    for file in filter(lambda each: each.is_dated, files):  # nobody knows when others are closed
        groups.setdefault(_group(file, time_unit), []).append(file)
    ordered = sorted(groups.values(), key=lambda group: min(f.time_low_us for f in group))
    ranges: list[Range] = []
    adjacent = False
    for group in ordered:
        small = [f for f in group if is_small(f.nbytes, target_bytes)]
        due = is_due(
            len(small),
            sum(f.nbytes for f in small),
            max(f.time_high_us for f in group),
            target_bytes=target_bytes,
            now_us=now_us,
            unit=time_unit,
            files_min=options.files_min,
            lateness_us=options.lateness.ms * 1000,
            include_open=options.include_open,
        )
        if not due:
            adjacent = False
            continue
        low, high = min(f.time_low_us for f in small), max(f.time_high_us for f in small)
        nbytes = sum(f.nbytes for f in small)
        size = Range(low, high, len(small), nbytes, 1 + nbytes // GROUP_BYTES_MAX)
        if ranges and _belongs(ranges[-1], size, adjacent, range_bytes_max):
            ranges[-1] = _joined(ranges[-1], size)
        else:
            ranges.append(size)
        adjacent = True
    return ranges[:RANGES_MAX]


def _group(file: FileInfo, time_unit: str | None) -> str:
    """Name the files that are judged together.

    A table that is not partitioned by time would never be closed as a whole: its hours are.
    """
    if time_unit is not None:
        return file.group
    return f"{file.group} {period_start(file.time_high_us, None)}"


def _belongs(last: Range, size: Range, adjacent: bool, bytes_max: int) -> bool:
    """Say if a partition goes into the range before it.

    Files are chosen by time: what lies mostly in the same time cannot be told apart. Where ranges
    merely touch, the later one meets a file of the earlier one that has its size already.
    """
    overlap_us = last.time_high_us - size.time_low_us
    if last.nbytes + size.nbytes <= bytes_max:
        return adjacent or overlap_us >= 0
    return 2 * overlap_us > size.time_high_us - size.time_low_us


def _joined(one: Range, other: Range) -> Range:
    return Range(
        min(one.time_low_us, other.time_low_us),
        max(one.time_high_us, other.time_high_us),
        one.files + other.files,
        one.nbytes + other.nbytes,
        one.groups + other.groups,
    )


def missing_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return what the table should be told before the first rewrite."""
    return {key: value for key, value in PROPERTIES.items() if key not in properties}


def strategy_of(sort_order: tuple[str, ...]) -> str:
    """Choose how files get their order: within each as it is written, or by a shuffle of all.

    A table that declares our order has every file written in it, whatever the strategy; joining
    files then needs no shuffle. Each file has all partitions of a slice of time, in order.
    """
    if sort_order == ORDER:
        return "strategy => 'binpack'"
    return f"strategy => 'sort', sort_order => {sql_text(SORT_ORDER)}"


def rewrite_call(
    procedure: str,
    table: str,
    chosen: Range,
    target_bytes: int,
    sort_order: tuple[str, ...] = (),
    *,
    whole: bool = False,
) -> str:
    """Write the call that rewrites one range; `whole`: in one commit, or not at all."""
    where = (
        f"tw_time >= {sql_time(chosen.time_low_us)} AND tw_time <= {sql_time(chosen.time_high_us)}"
    )
    share = even_share(chosen.nbytes, target_bytes) if chosen.groups == 1 else target_bytes
    options = {
        "partial-progress.enabled": "false" if whole else "true",
        "partial-progress.max-commits": str(min(chosen.groups, COMMITS_MAX)),
        "max-file-group-size-bytes": str(max(GROUP_BYTES_MAX, 2 * target_bytes)),
        "min-input-files": "2",
        "target-file-size-bytes": str(share),
        # Which files are taken does not depend on what is made of them.
        "min-file-size-bytes": str(int(SMALL_SHARE * target_bytes)),
        "max-file-size-bytes": str(int(LARGE_SHARE * target_bytes)),
    }
    pairs = ", ".join(f"{sql_text(key)}, {sql_text(value)}" for key, value in options.items())
    return (
        f"CALL {procedure}(table => {sql_text(table)}, {strategy_of(sort_order)}, "
        f'where => "{where}", options => map({pairs}))'
    )


def deletes_calls(data_procedure: str, deletes_procedure: str, table: str) -> tuple[str, str]:
    """Write the calls that apply merge-on-read deletes and then remove the files that held them.

    Of data files only those with deletes are taken, whatever their size or time.
    """
    options = {
        "delete-file-threshold": "1",
        "min-file-size-bytes": "0",
        "max-file-size-bytes": str(2**62),
        "min-input-files": str(2**31 - 1),
    }
    pairs = ", ".join(f"{sql_text(key)}, {sql_text(value)}" for key, value in options.items())
    return (
        f"CALL {data_procedure}(table => {sql_text(table)}, options => map({pairs}))",
        f"CALL {deletes_procedure}(table => {sql_text(table)}, "
        "options => map('rewrite-all', 'true'))",
    )


def _apply_deletes(
    session: Session, table: TopicTable, state: TableState
) -> tuple[TableState, TidewaterError | None]:
    """Bring rows that another engine has deleted by merge-on-read out of the data files.

    Where that fails other files are joined all the same; a lost race is left to the next run.
    """
    session.progress.say(f"{table.topic}: applying {state.delete_files} files of deleted rows")
    calls = deletes_calls(
        session.procedure("rewrite_data_files"),
        session.procedure("rewrite_position_delete_files"),
        table.name,
    )
    try:
        with held(table, state.size.nbytes) as since:
            for call in calls:
                session.sql(call)
            return table.settle(since), None
    except TidewaterError as error:
        if error.reason in STOPS:
            raise
        session.progress.say(f"{table.topic}: {error}")
        return table.load(), None if isinstance(error, ConflictError) else error


def run(session: Session, table: TopicTable, options: CompactOptions) -> Report:
    """Rewrite what the plan names."""
    state, files = table.load_files()
    report = Report("compact", str(table.topic), before=state.size)
    applied = state.delete_files
    failed: list[Rewritten] = []
    if applied:
        state, error = _apply_deletes(session, table, state)
        applied -= state.delete_files
        if error is not None:
            failed = [Rewritten(failed=state.delete_files, error=error)]
        state, files = table.load_files()
    target = options.target or ByteSize(
        state.properties.get("write.target-file-size-bytes", str(128 * 1024**2))
    )
    ranges = plan_compact(
        files,
        options,
        target_bytes=int(target),
        now_us=session.clock.now_us(),
        time_unit=state.time_unit,
        range_bytes_max=RANGE_BYTES_MAX * session.parallelism,
    )
    done: list[Rewritten] = []
    if ranges:
        table.set_properties(missing_properties(state.properties))
        rewriting = Rewriting(session, table, int(target), state, files)
        done = rewriting.all(ranges, options.budget)
        state = rewriting.state
    report.after = state.size
    report.details = {
        "ranges": [each.to_json() for each in done],
        "left_ranges": len(ranges) - len(done),
        "applied_delete_files": applied,
    }
    judge(report, failed + done, left=len(ranges) - len(done), applied=applied)
    return report


def judge(report: Report, done: list[Rewritten], *, left: int = 0, applied: int = 0) -> None:
    """Say how it ended: what could not be read or written is a failure, a lost race is none."""
    failed = sum(each.failed for each in done)
    errors = [each.error for each in done if each.error is not None and not each.is_lost_race]
    if errors:
        report.outcome, report.is_partial = Outcome.FAILED, True
        report.retry = all(passes(error) for error in errors)
        report.message = f"{failed} files could not be replaced: {errors[0]}"
    elif failed:
        report.outcome = Outcome.CONFLICT
        report.message = f"{failed} files could not be replaced now; the next run takes them"
    elif not applied and not any(each.files for each in done):
        report.outcome = Outcome.NOTHING  # Iceberg has a mind of its own about sizes at the border
    elif left:
        report.message = f"{left} ranges are left to the next run"


@dataclass(slots=True)
class Rewriting:
    """Rewrites ranges of a table, one after the other."""

    session: Session
    table: TopicTable
    target: int
    state: TableState
    """The newest that is known: each look at a table costs what a small rewrite does."""
    files: Sequence[FileInfo] = ()
    """What the ranges were chosen from: the new files come to lie beside them."""

    def all(self, ranges: list[Range], budget: Duration) -> list[Rewritten]:
        """Rewrite as many as can be begun in time, at least one."""
        clock, say = self.session.clock, self.session.progress.say
        began = clock.monotonic()
        done: list[Rewritten] = []
        for number, chosen in enumerate(ranges, start=1):
            if done and clock.monotonic() - began >= budget.seconds:
                break
            say(
                f"{self.table.topic}: rewriting {chosen.files} files, {chosen.nbytes:,} bytes "
                f"(range {number} of {len(ranges)})"
            )
            done.append(self._range(chosen))
            if (error := done[-1].error) is not None:
                say(f"{self.table.topic}: {error}")
        return done

    def _range(self, chosen: Range) -> Rewritten:
        """Rewrite one range on a history that is held, and bring it to the disk."""
        try:
            with held(self.table, chosen.nbytes, self.state) as since:
                with synced_early(self._folders(chosen)):
                    done = self._calls(chosen)
                self.state = self.table.settle(since)
        except TidewaterError as error:  # also if the hold itself was not to be had
            if error.reason in STOPS:
                raise
            self.state = self.table.load()
            return Rewritten(failed=chosen.files, error=error)
        return done

    def _folders(self, chosen: Range) -> set[Path]:
        """Name the folders of a local disk where the new files will be."""
        if not self.state.is_local:
            return set()
        return {local_path(file.path).parent for file in self.files if chosen.holds(file)}

    def _calls(self, chosen: Range) -> Rewritten:
        """Rewrite one range, in parts if it has some; where files are left, once more as a whole.

        With partial progress Iceberg keeps to itself why a part was not written or not committed,
        and tells of no commit that failed at all. Without it, it raises the reason.
        """
        first = Rewritten()
        if chosen.groups > 1:
            (row,) = self.session.sql(self._call(chosen, whole=False))
            first = Rewritten.of(row)
            if first.files >= chosen.files and not first.failed:
                return first
        try:
            (row,) = self.session.sql(self._call(chosen, whole=True))
        except TidewaterError as error:
            if error.reason in STOPS:
                raise
            return replace(first, failed=max(chosen.files - first.files, 1), error=error)
        more = Rewritten.of(row)
        return Rewritten(
            first.files + more.files, first.added + more.added, first.nbytes + more.nbytes
        )

    def _call(self, chosen: Range, *, whole: bool) -> str:
        procedure = self.session.procedure("rewrite_data_files")
        return rewrite_call(
            procedure, self.table.name, chosen, self.target, self.state.sort_order, whole=whole
        )
