"""What expire, orphans and retention choose, and what they refuse: without Spark."""

from dataclasses import replace
from pathlib import Path

import pytest

from tidewater_core.errors import Corrupt
from tidewater_core.units import Duration
from tidewater_pipeline.calendar_time import HOUR_US
from tidewater_pipeline.jobs.expire import ExpireOptions, plan_expire
from tidewater_pipeline.jobs.orphans import list_local, plan_orphans
from tidewater_pipeline.jobs.retention import (
    RetentionOptions,
    cutoff_us,
    plan_retention,
)
from tidewater_pipeline.state import FileInfo, SnapshotInfo, TableState, quoted, sql_text
from tidewater_pipeline.subscribers import Cursor

HOUR_MS = HOUR_US // 1000
KEEP = RetentionOptions(keep=Duration("1h"))


def table(refs: dict[str, int] | None = None) -> TableState:
    snapshots = tuple(SnapshotInfo(n, n * HOUR_MS) for n in range(1, 11))
    return TableState(("a", "b"), "file:/x", 10, {}, "hour", snapshots, refs or {"main": 10})


def test_old_snapshots_go_oldest_first() -> None:
    chosen = plan_expire(table(), ExpireOptions(older_than=Duration("5h")), 10 * HOUR_MS)
    assert chosen == [1, 2, 3, 4]


def test_tags_and_pins_stay() -> None:
    options = ExpireOptions(older_than=Duration("5h"), pins=frozenset({3}))
    assert plan_expire(table({"main": 10, "month-close": 1}), options, 10 * HOUR_MS) == [2, 4]


def test_what_subscriptions_that_lie_behind_read_from_stays() -> None:
    behind, ahead = Cursor("a", 0, 4, snapshot=2), Cursor("b", 0, 5, snapshot=3)
    options = ExpireOptions(older_than=Duration("5h"), cursors=(behind, ahead))
    state = replace(table(), properties={"tidewater.partition.0": '{"next":5,"epoch":1}'})
    assert plan_expire(state, options, 10 * HOUR_MS) == [1, 3, 4]


def test_the_head_and_the_newest_stay_whatever_their_age() -> None:
    options = ExpireOptions(older_than=Duration("1ms"), retain_last=3)
    assert plan_expire(table(), options, 999 * HOUR_MS) == [1, 2, 3, 4, 5, 6, 7]
    only = ExpireOptions(older_than=Duration("1ms"), retain_last=0)
    assert 10 not in plan_expire(table(), only, 999 * HOUR_MS)


def test_only_what_two_looks_found_goes() -> None:
    """A file that a late commit has named in between stays."""
    assert plan_orphans(["a", "b", "c"], ["c", "d", "a"]) == ["a", "c"]


def files() -> list[FileInfo]:
    return [
        FileInfo("old", "{1}", 9, 9, HOUR_US, 2 * HOUR_US - 1),
        FileInfo("straddling", "{2}", 9, 9, 2 * HOUR_US, 4 * HOUR_US),
        FileInfo("young", "{3}", 9, 9, 3 * HOUR_US, 4 * HOUR_US),
    ]


def test_the_cut_is_at_the_edge_of_a_time_partition() -> None:
    assert cutoff_us(9 * HOUR_US + 5, Duration("1h"), "hour") == 8 * HOUR_US
    assert cutoff_us(59 * HOUR_US + 5, Duration("1h"), "day") == 48 * HOUR_US


def test_retention_takes_whole_files_and_raises_only_upwards() -> None:
    plan = plan_retention(files(), {0: 40, 1: 7}, {0: 10, 1: 7}, KEEP, cut_us=3 * HOUR_US)
    assert [file.path for file in plan.files] == ["old"]
    assert plan.starts == {0: 40}


def test_retention_never_lowers_a_start() -> None:
    plan = plan_retention(files(), {0: 4}, {0: 10}, KEEP, cut_us=3 * HOUR_US)
    assert plan.starts == {}


def test_retention_refuses_to_pass_a_cursor() -> None:
    cursors = (Cursor("billing", 0, 39), Cursor("audit", 0, 40), Cursor("other", 1, 0))
    options = RetentionOptions(keep=Duration("1h"), cursors=cursors)
    plan = plan_retention(files(), {0: 40}, {0: 10, 1: 7}, options, cut_us=3 * HOUR_US)
    assert plan.starts == {}
    assert plan.files == ()
    (why,) = plan.refused
    assert "billing" in why
    forced = RetentionOptions(keep=Duration("1h"), cursors=cursors, force=True)
    assert plan_retention(files(), {0: 40}, {0: 10}, forced, cut_us=3 * HOUR_US).starts == {0: 40}


def test_frontiers_and_starts_are_read_or_refused() -> None:
    good = {"tidewater.partition.0": '{"next":5,"epoch":1}', "tidewater.start.0": "2", "x": "y"}
    state = TableState(("a", "b"), "", None, good, None)
    assert (state.frontiers, state.starts) == ({0: 5}, {0: 2})
    for key, value in (("tidewater.partition.0", "{}"), ("tidewater.start.0", "x")):
        bad = TableState(("a", "b"), "", None, {key: value}, None)
        with pytest.raises(Corrupt):
            _ = bad.starts


@pytest.mark.parametrize("text", ["", "7", '[{"start":1}]', '[{"start":"1","end":2}]'])
def test_gaps_are_read_or_refused(text: str) -> None:
    good = {"tidewater.gap.1": '[{"start":9,"end":12},{"start":2,"end":4}]'}
    assert TableState(("a",), "", None, good, None).gaps == {1: ((2, 4), (9, 12))}
    with pytest.raises(Corrupt, match="GapDamaged"):
        _ = TableState(("a",), "", None, {"tidewater.gap.1": text}, None).gaps


def test_names_are_quoted() -> None:
    assert quoted(("a", "b-c`d")) == "`a`.`b-c``d`"
    assert sql_text("it's \\") == "'it\\'s \\\\'"


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_listed_paths_are_spelled_like_the_location(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").touch()
    assert list_local(f"{scheme}{tmp_path}", 2**62) == [f"{scheme}{tmp_path}/data/x"]
    assert list_local(f"{scheme}{tmp_path}", 0) == []
