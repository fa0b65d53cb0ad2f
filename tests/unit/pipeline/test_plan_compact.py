"""Which files compact chooses: a table of cases, without Spark."""

from dataclasses import replace

import pytest

from tidewater_core.units import Duration
from tidewater_pipeline.calendar_time import DAY_US, HOUR_US, period_start, sql_time
from tidewater_pipeline.jobs.compact import (
    PROPERTIES,
    RANGES_MAX,
    CompactOptions,
    Range,
    missing_properties,
    plan_compact,
    rewrite_call,
    strategy_of,
)
from tidewater_pipeline.state import FileInfo

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


def test_few_small_files_are_left_alone() -> None:
    assert plan(hour(900, [10] * 4)) == []
    assert plan(hour(900, [900] * 40)) == [], "large enough"
    assert plan(hour(900, [10])) == []


def test_few_files_that_fill_a_target_are_taken() -> None:
    assert [r.files for r in plan(hour(900, [700, 400, 900]))] == [2]


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


def test_planning_on_the_result_chooses_nothing() -> None:
    """Twice changes nothing: what a rewrite makes is left alone."""
    assert plan(hour(900, [980, 40])) == []


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
