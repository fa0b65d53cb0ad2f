"""What expire, orphans and retention choose, and what they refuse: without Spark."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from tidewater_core.compaction import HOUR_US, TIME_MAX_US, TIME_MIN_US
from tidewater_core.errors import Corrupt, Invalid
from tidewater_core.hold import HOLD_MS_MAX, Hold
from tidewater_core.names import HOLD
from tidewater_core.units import Duration
from tidewater_pipeline.cli.main import main
from tidewater_pipeline.cli.run import EXIT_WRONG
from tidewater_pipeline.holding import HOLD_MS_MIN, hold_ms
from tidewater_pipeline.jobs.expire import ExpireOptions, plan_expire
from tidewater_pipeline.jobs.orphans import (
    OrphanOptions,
    checked,
    list_local,
    plan_orphans,
    remove,
)
from tidewater_pipeline.jobs.retention import (
    RetentionOptions,
    cutoff_us,
    old_ends_query,
    plan_retention,
)
from tidewater_pipeline.session import stored_long
from tidewater_pipeline.state import (
    FileInfo,
    SnapshotInfo,
    TableState,
    quoted,
    sql_text,
)
from tidewater_pipeline.subscribers import Cursor

HOUR_MS = HOUR_US // 1000
KEEP = RetentionOptions(keep=Duration("1h"))


def table(refs: dict[str, int] | None = None) -> TableState:
    snapshots = tuple(SnapshotInfo(n, n * HOUR_MS, n) for n in range(1, 11))
    return TableState(("a", "b"), "file:/x", 10, {}, "hour", snapshots, refs or {"main": 10})


def test_old_snapshots_go_oldest_first() -> None:
    chosen = plan_expire(table(), ExpireOptions(older_than=Duration("5h")), 10 * HOUR_MS)
    assert chosen == [1, 2, 3, 4]


def test_tags_and_pins_stay() -> None:
    options = ExpireOptions(older_than=Duration("5h"), pins=frozenset({3}))
    assert plan_expire(table({"main": 10, "month-close": 1}), options, 10 * HOUR_MS) == [2, 4]


def test_what_a_rewrite_under_way_holds_stays() -> None:
    now_ms = 10 * HOUR_MS
    options = ExpireOptions(older_than=Duration("5h"))
    for until_ms, chosen in (now_ms + 1, [1, 2]), (now_ms, [1, 2, 3, 4]):
        state = replace(table(), properties={HOLD: Hold(3, until_ms).to_property()})
        assert plan_expire(state, options, now_ms) == chosen
    assert table().sequence == 10
    assert HOLD_MS_MIN == hold_ms(0) < hold_ms(4 << 30) < HOLD_MS_MAX
    assert hold_ms(1 << 60) < HOLD_MS_MAX, "also by a clock that is ahead"


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


def test_what_a_commit_may_be_about_to_name_is_not_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--grace 0s --settle 0s --delete` removed the files of whoever was writing."""
    short = OrphanOptions(grace=Duration("0s"), settle=Duration("0s"), delete=True)
    with pytest.raises(Invalid, match="--grace 0s is too short"):
        checked(short, force=False)
    with pytest.raises(Invalid, match="--settle 0s is too short"):
        checked(replace(short, grace=Duration("1m")), force=False)
    assert checked(short, force=True) == short
    assert checked(replace(short, delete=False), force=False).grace == Duration("0s")
    (tmp_path / "catalog.db").touch()
    words = ["--topic", "a/b", "--data", str(tmp_path), "--grace", "1s"]
    for job in (["orphans", "--delete"], ["maintain"]):
        assert main([*job, *words]) == EXIT_WRONG
        assert "--grace 1s is too short" in capsys.readouterr().err


def test_what_could_not_be_removed_is_told() -> None:
    """It was counted as removed."""

    class Io:
        def deleteFiles(self, names: list[str]) -> None:
            assert names == ["a", "b", "c"]
            raise PySparkException("BulkDeletionFailureException: Failed to delete 1 files")

        def newInputFile(self, path: str) -> Any:
            return SimpleNamespace(exists=lambda: path == "b")

    class Names(list[str]):
        add = list.append

    util = SimpleNamespace(util=SimpleNamespace(ArrayList=Names))
    session: Any = SimpleNamespace(
        jvm=SimpleNamespace(java=util), progress=SimpleNamespace(say=lambda _text: None)
    )
    table: Any = SimpleNamespace(java=lambda: SimpleNamespace(io=Io), topic="a/b")
    assert remove(session, table, ["a", "b", "c"]) == {"b"}


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


def test_rows_below_a_start_are_not_read_again() -> None:
    """They were, at each run, as long as a younger row was in their file."""
    query = old_ends_query("`a`.`b`", 7, HOUR_US, {0: 10, 1: 0})
    assert "VERSION AS OF 7" in query
    assert "NOT (tw_partition = 0 AND tw_offset < 10)" in query
    assert "tw_partition = 1" not in query


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


def test_a_file_without_bounds_is_never_old() -> None:
    """It was taken for one of 1970, and its rows, however young, were deleted."""
    assert stored_long(HOUR_US.to_bytes(8, "little"), TIME_MAX_US) == HOUR_US
    assert stored_long(bytes(8), TIME_MAX_US) == 0
    bounds = (stored_long(None, TIME_MIN_US), stored_long(None, TIME_MAX_US))
    unknown = FileInfo("unknown", "g", 1, 1, *bounds)
    plan = plan_retention([*files(), unknown], {0: 40}, {0: 10}, KEEP, cut_us=3 * HOUR_US)
    assert [file.path for file in plan.files] == ["old"]
