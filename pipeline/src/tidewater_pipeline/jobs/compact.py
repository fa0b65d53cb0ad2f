"""compact: small files of closed time partitions become files of the target size, in order.

The writer only appends, so a rewrite never contradicts it: all that can happen is that the writer
commits first and Spark has to try again. The table is told to let Spark try often and soon, yet not
for ever. Only partitions that are closed are taken: what is rewritten once stays as it is. A range
that loses all its races is left to the next run; those before and after it are done all the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidewater_core.names import TW_OFFSET, TW_PARTITION
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.calendar_time import period_start, sql_time
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import ConflictError, Session, TopicTable
from tidewater_pipeline.state import FileInfo, sql_text

SMALL_SHARE: Final = 0.75
"""A file below this share of the target is small (Iceberg's own default)."""
GROUP_BYTES_MAX: Final = 2 * 1024**3
"""Bytes that are sorted and committed at once: a large partition makes progress in parts."""
RANGES_MAX: Final = 24
"""Ranges of one run; the oldest first, the next run goes on."""
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
    files_min: int = 5
    """A partition with fewer small files is left alone."""
    lateness: Duration = Duration("10m")
    """A time partition is closed this long after its end."""
    include_open: bool = False
    """Take the partition that is being written, too."""


@dataclass(frozen=True, slots=True)
class Range:
    """Files of adjacent partitions that one rewrite takes."""

    time_low_us: int
    time_high_us: int
    files: int
    nbytes: int


def plan_compact(
    files: Iterable[FileInfo],
    options: CompactOptions,
    *,
    target_bytes: int,
    now_us: int,
    time_unit: str | None,
) -> list[Range]:
    """Choose what to rewrite: ranges of time, oldest first, of partitions that are worth it."""
    closed_us = period_start(now_us - options.lateness.ms * 1000, time_unit)
    groups: dict[str, list[FileInfo]] = {}
    for file in files:
        groups.setdefault(_group(file, time_unit), []).append(file)
    ordered = sorted(groups.values(), key=lambda group: min(f.time_low_us for f in group))
    ranges: list[Range] = []
    adjacent = False
    for group in ordered:
        is_open = max(f.time_high_us for f in group) >= closed_us
        small = [f for f in group if f.nbytes < SMALL_SHARE * target_bytes]
        if (is_open and not options.include_open) or not _worthwhile(small, options, target_bytes):
            adjacent = False
            continue
        low, high = min(f.time_low_us for f in small), max(f.time_high_us for f in small)
        size = Range(low, high, len(small), sum(f.nbytes for f in small))
        overlaps = bool(ranges) and low <= ranges[-1].time_high_us
        if adjacent or overlaps:
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


def _worthwhile(small: list[FileInfo], options: CompactOptions, target_bytes: int) -> bool:
    if len(small) < 2:
        return False
    return len(small) >= options.files_min or sum(f.nbytes for f in small) >= target_bytes


def _joined(one: Range, other: Range) -> Range:
    return Range(
        min(one.time_low_us, other.time_low_us),
        max(one.time_high_us, other.time_high_us),
        one.files + other.files,
        one.nbytes + other.nbytes,
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
    procedure: str, table: str, chosen: Range, target_bytes: int, sort_order: tuple[str, ...] = ()
) -> str:
    """Write the call that rewrites one range."""
    where = (
        f"tw_time >= {sql_time(chosen.time_low_us)} AND tw_time <= {sql_time(chosen.time_high_us)}"
    )
    options = {
        "partial-progress.enabled": "true",
        "partial-progress.max-commits": "10",
        "max-file-group-size-bytes": str(max(GROUP_BYTES_MAX, 2 * target_bytes)),
        "min-input-files": "2",
        "target-file-size-bytes": str(target_bytes),
    }
    pairs = ", ".join(f"{sql_text(key)}, {sql_text(value)}" for key, value in options.items())
    return (
        f"CALL {procedure}(table => {sql_text(table)}, {strategy_of(sort_order)}, "
        f'where => "{where}", options => map({pairs}))'
    )


def run(session: Session, table: TopicTable, options: CompactOptions) -> Report:
    """Rewrite what the plan names."""
    state = table.load()
    report = Report("compact", str(table.topic), before=state.size)
    target = options.target or ByteSize(
        state.properties.get("write.target-file-size-bytes", str(128 * 1024**2))
    )
    ranges = plan_compact(
        table.files(state),
        options,
        target_bytes=int(target),
        now_us=session.clock.now_us(),
        time_unit=state.time_unit,
    )
    if not ranges:
        report.outcome, report.after = Outcome.NOTHING, report.before
        return report
    table.set_properties(missing_properties(state.properties))
    done: list[dict[str, Any]] = []
    for number, chosen in enumerate(ranges, start=1):
        session.progress.say(
            f"{table.topic}: rewriting {chosen.files} files, {chosen.nbytes:,} bytes "
            f"(range {number} of {len(ranges)})"
        )
        done.append(_rewrite(session, table, chosen, int(target), state.sort_order))
    report.after = table.settle(state).size
    report.details = {"ranges": done}
    failed = sum(each["failed_files"] for each in done)
    if failed:
        report.outcome = Outcome.CONFLICT
        report.message = f"{failed} files could not be replaced now; the next run takes them"
    elif not any(each["rewritten_files"] for each in done):
        report.outcome = Outcome.NOTHING  # Iceberg has a mind of its own about sizes at the border
    return report


def _rewrite(
    session: Session, table: TopicTable, chosen: Range, target: int, sort_order: tuple[str, ...]
) -> dict[str, Any]:
    """Rewrite one range; one that lost every race counts its files as failed."""
    procedure = session.procedure("rewrite_data_files")
    call = rewrite_call(procedure, table.name, chosen, target, sort_order)
    try:
        (row,) = session.sql(call)
    except ConflictError as error:
        session.progress.say(f"{table.topic}: {error.message}")
        return {
            "rewritten_files": 0,
            "added_files": 0,
            "rewritten_bytes": 0,
            "failed_files": chosen.files,
        }
    return {
        "rewritten_files": row["rewritten_data_files_count"],
        "added_files": row["added_data_files_count"],
        "rewritten_bytes": row["rewritten_bytes_count"],
        "failed_files": row["failed_data_files_count"],
    }
