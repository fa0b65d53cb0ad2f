"""Which files compact chooses: a table of cases, without Spark."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.compaction import (
    DAY_US,
    HOUR_US,
    even_share,
    files_made,
    is_small,
    period_start,
)
from tidewater_core.errors import Corrupt, Retryable, TidewaterError
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.calendar_time import sql_time
from tidewater_pipeline.jobs.compact import (
    COMMITS_MAX,
    GROUP_BYTES_MAX,
    ORDER,
    PROPERTIES,
    RANGES_MAX,
    CompactOptions,
    Range,
    Rewriting,
    Rewritten,
    judge,
    missing_properties,
    plan_compact,
    rewrite_call,
    strategy_of,
)
from tidewater_pipeline.jobs.compact import run as compact_run
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import SPARK_GONE, ConflictError
from tidewater_pipeline.state import FileInfo, Size

TARGET = 1_000
NOW = 1_000 * HOUR_US + 5 * 60_000_000  # five minutes into hour 1000


def hour(number: int, sizes: list[int]) -> list[FileInfo]:
    low = number * HOUR_US
    return [
        FileInfo(f"{number}-{place}", f"{{{number}}}", size, 1, low + place, low + place + 1)
        for place, size in enumerate(sizes)
    ]


def plan(files: list[FileInfo], options: CompactOptions | None = None) -> list[Range]:
    return plan_compact(
        files,
        options or CompactOptions(),
        target_bytes=TARGET,
        now_us=NOW,
        time_unit="hour",
    )


def test_small_files_of_closed_hours_are_taken() -> None:
    (chosen,) = plan(hour(900, [10] * 6))
    assert (chosen.files, chosen.nbytes) == (6, 60)
    assert chosen.time_low_us == 900 * HOUR_US
    assert chosen.time_high_us == 900 * HOUR_US + 6


@pytest.mark.parametrize("number", [999, 1_000])
def test_open_hours_wait(number: int) -> None:
    """Hour 999 has ended, but rows of it may still be on their way."""
    assert plan(hour(number, [10] * 50)) == []
    assert len(plan(hour(number, [10] * 50), CompactOptions(include_open=True))) == 1


def test_an_hour_closes_after_the_lateness() -> None:
    assert len(plan(hour(999, [10] * 50), CompactOptions(lateness=Duration("1m")))) == 1


def test_few_small_files_are_left_alone_for_a_day() -> None:
    assert plan(hour(980, [10] * 4)) == []
    assert len(plan(hour(980, [10] * 5))) == 1
    assert [r.files for r in plan(hour(900, [10] * 2))] == [2]
    assert plan(hour(900, [900] * 40)) == [], "large enough"
    assert plan(hour(900, [10])) == []


def test_few_files_that_fill_a_target_are_taken() -> None:
    assert [r.files for r in plan(hour(980, [600, 400, 900]))] == [2]


def test_adjacent_hours_are_one_range_and_good_ones_split_it() -> None:
    files = hour(900, [10] * 6) + hour(901, [10] * 6) + hour(902, [900]) + hour(903, [10] * 6)
    assert [r.files for r in plan(files)] == [12, 6]


def test_a_table_without_time_partitions_is_closed_by_the_hour() -> None:
    """As a whole it would always be in use."""
    files = [replace(f, group="{}") for n in (900, 901, 1_000) for f in hour(n, [10] * 6)]
    (chosen,) = plan_compact(
        files, CompactOptions(), target_bytes=TARGET, now_us=NOW, time_unit=None
    )
    assert (chosen.files, chosen.time_low_us) == (12, 900 * HOUR_US)
    assert chosen.time_high_us < 902 * HOUR_US


def test_a_run_is_bounded() -> None:
    files = [f for n in range(0, 200, 2) for f in hour(n, [10] * 6) + hour(n + 1, [900])]
    chosen = plan(files)
    assert len(chosen) == RANGES_MAX
    assert chosen[0].time_low_us == 0, "oldest first"


def bounded(files: list[FileInfo], nbytes: int) -> list[Range]:
    return plan_compact(
        files,
        CompactOptions(),
        target_bytes=TARGET,
        now_us=NOW,
        time_unit=None,
        range_bytes_max=nbytes,
    )


def test_a_range_is_bounded() -> None:
    """A month of hours that were all due was one call of days, and lost as one."""
    files = [f for n in range(700, 730) for f in hour(n, [10] * 6)]
    chosen = bounded(files, 180)
    assert [r.files for r in chosen] == [18] * 10
    assert [r.groups for r in chosen] == [3] * 10
    assert [r.nbytes for r in bounded(hour(700, [10] * 60), 180)] == [600], "one hour stays whole"


def test_ranges_that_merely_touch_are_bounded_and_those_of_the_same_time_are_not() -> None:
    def of(name: str, low_us: int) -> list[FileInfo]:
        high_us = low_us + HOUR_US + 10
        return [replace(f, time_low_us=low_us, time_high_us=high_us) for f in hour(1, [10] * 6)]

    def groups(step_us: int) -> list[FileInfo]:
        return [
            replace(f, group=f"{n}") for n in range(4) for f in of(f"{n}", HOUR_US + n * step_us)
        ]

    assert [r.files for r in bounded(groups(HOUR_US), 130)] == [12, 12]
    assert [r.files for r in bounded(groups(1), 130)] == [24], "times cannot tell them apart"


def test_each_group_is_a_commit_of_its_own_up_to_a_bound() -> None:
    for groups, commits in (1, 1), (7, 7), (500, COMMITS_MAX):
        call = rewrite_call("p", "t", Range(0, 1, 2, 3, groups), 7)
        assert f"'partial-progress.max-commits', '{commits}'" in call
    (large,) = plan([replace(f, nbytes=f.nbytes) for f in hour(900, [700] * 9)])
    assert large.groups == 1 + large.nbytes // GROUP_BYTES_MAX
    whole = rewrite_call("p", "t", Range(0, 1, 2, 3), 7, whole=True)
    assert "'partial-progress.enabled', 'false'" in whole


GONE = Retryable("SparkFailed", "No space left on device")
ROTTEN = Corrupt("FileDamaged", "Checksum error")
LOST = ConflictError("CommitConflict", "the writer was faster")


@pytest.mark.parametrize(
    ("errors", "outcome", "retry"),
    [
        ([None], Outcome.DONE, False),
        ([None, LOST], Outcome.CONFLICT, False),
        ([LOST, GONE, None], Outcome.FAILED, True),
        ([GONE, ROTTEN], Outcome.FAILED, False),
    ],
)
def test_what_could_not_be_read_or_written_is_no_lost_race(
    errors: list[TidewaterError | None], outcome: Outcome, retry: bool
) -> None:
    report = Report("compact", "a/b")
    done = [Rewritten(9, 1, 90, 0 if each is None else 4, each) for each in errors]
    judge(report, done)
    assert (report.outcome, report.retry) == (outcome, retry)
    assert report.is_partial == (outcome is Outcome.FAILED)
    if outcome is Outcome.FAILED:
        first = next(each for each in errors if each is not None and each is not LOST)
        assert str(first) in report.message
        assert done[errors.index(first)].to_json()["error"] == str(first)


def test_nothing_rewritten_is_nothing_only_where_nothing_failed() -> None:
    report = Report("compact", "a/b")
    judge(report, [Rewritten(failed=4, error=LOST)])
    assert (report.outcome, report.message.split()[0]) == (Outcome.CONFLICT, "4")
    judge(report := Report("compact", "a/b"), [Rewritten()])
    assert report.outcome is Outcome.NOTHING
    judge(report := Report("compact", "a/b"), [Rewritten(1, 1)], left=3)
    assert (report.outcome, report.message) == (
        Outcome.DONE,
        "3 ranges are left to the next run",
    )


def counted(files: int, failed: int = 0) -> list[dict[str, int]]:
    names = ("rewritten_data_files", "added_data_files", "rewritten_bytes", "failed_data_files")
    return [dict(zip((f"{n}_count" for n in names), (files, 1, 9, failed), strict=True))]


def rewriting(
    *script: list[dict[str, int]] | TidewaterError, groups: int = 2
) -> tuple[list[Rewritten], list[str]]:
    """Rewrite three ranges of nine files each with a Spark that answers by a script."""
    left, calls = list(script), []

    def sql(text: str) -> list[dict[str, int]]:
        calls.append("whole" if "'partial-progress.enabled', 'false'" in text else "parts")
        said = left.pop(0)
        if isinstance(said, TidewaterError):
            raise said
        return said

    session: Any = SimpleNamespace(
        clock=SimpleNamespace(monotonic=lambda: 0.0, now_us=lambda: 0),
        progress=SimpleNamespace(say=lambda _text: None),
        procedure=lambda name: name,
        sql=sql,
    )
    state: Any = SimpleNamespace(sequence=7, sort_order=ORDER, is_local=False)
    table: Any = SimpleNamespace(
        topic="a/b",
        name="t",
        session=session,
        load=lambda: state,
        set_properties=lambda _set, removed=(): None,
        settle=lambda since: since,
    )
    ranges = [Range(n, n, 9, 90, groups) for n in range(3)]
    done = Rewriting(session, table, TARGET, state).all(ranges, Duration("1h"))
    assert not left
    return done, calls


def test_what_iceberg_keeps_to_itself_is_asked_for_once() -> None:
    """A commit that failed with partial progress is told of nowhere: 0 rewritten, 0 failed."""
    done, calls = rewriting(counted(9), counted(0), LOST, counted(5, 4), ROTTEN)
    assert calls == ["parts", "parts", "whole", "parts", "whole"]
    assert [(each.files, each.failed, each.error) for each in done] == [
        (9, 0, None),
        (0, 9, LOST),
        (5, 4, ROTTEN),
    ]
    done, _ = rewriting(counted(4), counted(5), counted(0), counted(0), GONE)
    assert [(each.files, each.failed) for each in done] == [(9, 0), (0, 0), (0, 9)]


def test_a_range_of_one_group_is_rewritten_as_a_whole_at_once() -> None:
    """Its one commit has nothing to be partial about, and what fails is told at once."""
    done, calls = rewriting(counted(9), counted(0), ROTTEN, groups=1)
    assert calls == ["whole"] * 3
    assert [(each.files, each.failed, each.error) for each in done] == [
        (9, 0, None),
        (0, 0, None),
        (0, 9, ROTTEN),
    ]


@pytest.mark.parametrize("error", [ROTTEN, LOST])
def test_deletes_that_cannot_be_applied_stop_nothing_else(
    error: TidewaterError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sql(_call: str) -> list[dict[str, int]]:
        raise error

    said: list[str] = []
    state = SimpleNamespace(
        delete_files=2, sequence=7, size=Size(), properties={}, time_unit="hour", sort_order=ORDER
    )
    clock = SimpleNamespace(monotonic=lambda: 0.0, now_us=lambda: NOW)
    session: Any = SimpleNamespace(
        clock=clock, progress=SimpleNamespace(say=said.append), parallelism=1,
        procedure=lambda name: name, sql=sql,
    )  # fmt: skip
    table: Any = SimpleNamespace(
        topic="a/b", name="t", session=session, load=lambda: state,
        load_files=lambda: (state, hour(900, [10] * 9)),
        set_properties=lambda _set, removed=(): None,
    )  # fmt: skip
    monkeypatch.setattr(Rewriting, "_range", lambda *_: Rewritten(9, 1))
    report = compact_run(session, table, CompactOptions(target=ByteSize(TARGET)))
    assert [each["rewritten_files"] for each in report.details["ranges"]] == [9]
    if error is LOST:
        assert report.outcome is Outcome.DONE
    else:
        assert (report.outcome, report.is_partial) == (Outcome.FAILED, True)
        assert "FileDamaged" in report.message


def test_a_jvm_that_died_ends_the_run() -> None:
    for reason in (SPARK_GONE, "OutOfMemory", "DiskRefused"):
        with pytest.raises(TidewaterError, match=reason):
            rewriting(counted(9), Retryable(reason, "the JVM is gone"))


def test_no_range_is_begun_after_the_budget() -> None:
    times = itertools.count(0, 40)
    session: Any = SimpleNamespace(
        clock=SimpleNamespace(monotonic=lambda: next(times)),
        progress=SimpleNamespace(say=lambda _text: None),
    )
    known: Any = SimpleNamespace(sort_order=ORDER)
    work = Rewriting(session, SimpleNamespace(topic="a/b"), TARGET, known)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Rewriting, "_range", lambda *_: Rewritten(9, 1))
        assert len(work.all([Range(n, n, 9, 90) for n in range(5)], Duration("60s"))) == 2


@pytest.mark.parametrize(
    ("is_local", "folders"), [(True, {Path("/t/1"), Path("/t/2")}), (False, set())]
)
def test_new_files_come_to_lie_beside_the_old_ones(folders: set[Path], *, is_local: bool) -> None:
    """On a local disk they are synced as they are written; an object store needs no such thing."""
    known: Any = SimpleNamespace(is_local=is_local)
    files = [
        replace(file, path=f"file:///t/{number}/{file.path}.parquet")
        for number in range(4)
        for file in hour(number, [10] * 3)
    ]
    work = Rewriting(SimpleNamespace(), SimpleNamespace(), TARGET, known, files)  # type: ignore[arg-type]
    chosen = Range(HOUR_US, 2 * HOUR_US + 9, 6, 60)
    assert work._folders(chosen) == folders


@pytest.mark.parametrize(
    ("nbytes", "share"),
    [
        (500, 1_000),
        (1_090, 1_000),  # one file, a little larger
        (1_500, 1_000),  # halves would be small again
        (1_600, 800),
        (1_999, 1_000),
        (2_300, 1_000),
        (2_500, 834),
        (6_800, 972),
        (7_000, 1_000),
    ],
)
def test_few_files_are_of_one_size(nbytes: int, share: int) -> None:
    """Two tasks end together; and what comes out is as many files as without."""
    assert even_share(nbytes, TARGET) == share
    assert not is_small(share, TARGET)
    assert -(-nbytes // share) <= files_made(nbytes, TARGET) or share == TARGET
    call = rewrite_call("p", "t", Range(0, 1, 9, nbytes), TARGET, whole=True)
    assert f"'target-file-size-bytes', '{share}'" in call
    assert "'min-file-size-bytes', '750'" in call, "which files are taken is not changed by it"
    call = rewrite_call("p", "t", Range(0, 1, 9, nbytes, 2), TARGET)
    assert "'target-file-size-bytes', '1000'" in call, "nobody knows the sizes of its groups"


def test_planning_on_the_result_chooses_nothing() -> None:
    """Twice changes nothing: what a rewrite makes is left alone."""
    assert plan(hour(900, [980, 40])) == []


@pytest.mark.parametrize("sizes", [[600, 600], [749, 749], [740, 740, 740, 740], [700] * 3])
def test_what_would_be_as_many_files_again_is_left_alone(sizes: list[int]) -> None:
    """Else each run would rewrite them, for ever: two of 1,200 bytes are two of 600."""
    assert files_made(sum(sizes), TARGET) == len(sizes) or len(plan(hour(900, sizes))) == 1
    made = files_made(sum(sizes), TARGET)
    assert plan(hour(900, [sum(sizes) // made] * made)) == []


def test_what_the_table_says_wins() -> None:
    assert missing_properties({}) == dict(PROPERTIES)
    some = {"commit.retry.num-retries": "3"}
    assert "commit.retry.num-retries" not in missing_properties(some)


def test_the_call_is_sorted_and_makes_partial_progress() -> None:
    call = rewrite_call("c.system.rewrite_data_files", "`ns`.`a-b`", Range(0, HOUR_US, 2, 3), 7)
    assert "strategy => 'sort'" in call
    assert "tw_partition ASC" in call
    assert "'partial-progress.enabled', 'true'" in call
    assert "tw_time <= TIMESTAMP '1970-01-01 01:00:00.000000 UTC'" in call


def test_a_table_that_declares_the_order_needs_no_shuffle() -> None:
    assert strategy_of(("tw_partition", "tw_offset")) == "strategy => 'binpack'"
    for other in ((), ("tw_offset",), ("tw_partition", "tw_offset", "x")):
        assert "'sort'" in strategy_of(other)


def test_time_partitions_begin_where_the_calendar_says() -> None:
    moment = 40 * DAY_US + 5 * HOUR_US + 7
    assert period_start(moment, "hour") == 40 * DAY_US + 5 * HOUR_US
    assert period_start(moment, None) == 40 * DAY_US + 5 * HOUR_US
    assert period_start(moment, "day") == 40 * DAY_US
    assert period_start(moment, "month") == 31 * DAY_US
    assert period_start(moment, "year") == 0
    assert sql_time(1) == "TIMESTAMP '1970-01-01 00:00:00.000001 UTC'"
