"""Table health: counted from manifests, each of them read once."""

from typing import Any

import pytest

from table_bench import Bench
from table_fakes import TIME_US, message_batch
from tidewater_core.compaction import HOUR_US, LATENESS_US
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.table.health import HealthIndex, Tally, debt, tally, unit_of
from tidewater_worker.table.ranges import Bounds, FileRange, RangeIndex
from tidewater_worker.table.view import view_of

SPEC = TopicSpec()
TARGET = 1000


def file(nbytes: int, hour: int, group: int = 0) -> FileRange:
    bounds = Bounds((0, 0), (0, 9), (hour * HOUR_US, hour * HOUR_US + 5))
    return FileRange("f", bounds, nbytes, group=group)


@pytest.mark.parametrize(
    ("files", "now_hour", "expected"),
    [
        ([], 5, (0, 0)),
        ([file(10, 4)] * 5, 5, (5, 50)),
        ([file(10, 5)] * 5, 5, (0, 0)),  # the open hour
        ([file(10, 4)] * 4, 5, (0, 0)),  # few, and more may come
        ([file(10, 4)] * 2, 28, (0, 0)),
        ([file(10, 4)] * 2, 29, (2, 20)),  # closed for a day: nothing comes any more
        ([file(10, 3), file(20, 4)], 50, (0, 0)),  # one each: nothing to join it with
        ([file(10, 4, group=1), file(10, 4, group=2)], 50, (0, 0)),  # other partitions
        ([file(10, 4), file(750, 4)], 50, (0, 0)),  # large enough
        ([file(300, 4), file(749, 4), file(1, 3)], 5, (2, 1049)),  # they fill a target
    ],
)
def test_debt(files: list[FileRange], now_hour: int, expected: tuple[int, int]) -> None:
    one = tally(files, TARGET, "hour")
    now_us = now_hour * HOUR_US + LATENESS_US
    just_before = now_hour * HOUR_US
    assert debt([one], TARGET, "hour", just_before) == debt([one], TARGET, "hour", now_us - HOUR_US)
    assert debt([one], TARGET, "hour", now_us) == expected
    # Spread over manifests it is the same.
    parts = [tally([each], TARGET, "hour") for each in files]
    assert debt([*parts, Tally()], TARGET, "hour", now_us) == expected


def test_a_file_without_bounds_is_no_debt() -> None:
    wide = FileRange("f", Bounds((0, 0), (0, 9), (0, (1 << 63) - 1)), 10)
    for unit in (None, "hour", "day", "month", "year"):
        one = tally([wide] * 9, TARGET, unit)
        assert (one.files, debt([one], TARGET, unit, 10**17)) == (9, (0, 0))


def test_health_of_a_table_reads_only_what_is_new(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = bench.log()
    run = bench.topic(SPEC, log)
    index = RangeIndex()
    read: list[str] = []
    files_of = RangeIndex.files_of

    def counted(self: RangeIndex, manifest, columns, io):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        read.append(manifest.manifest_path)
        return files_of(self, manifest, columns, io)

    monkeypatch.setattr(RangeIndex, "files_of", counted)
    health = HealthIndex(index)
    found: dict[str, Any] = {}
    for number in range(5):
        log.append(message_batch(SPEC, [b"x"], time_us=TIME_US))
        bench.flush(run, log)
        found = health.look(view_of(bench.table()), 1 << 20, TIME_US + 2 * HOUR_US)
        assert len(read) == number + 1, "each manifest is read once"
        assert found["small_files"] == found["files"] == number + 1
    assert (found["debt_files"], found["debt_bytes"]) == (5, found["small_bytes"])
    assert found["small_bytes"] == found["bytes"] > 0
    assert (found["delete_files"], found["manifests_unread"]) == (0, 0)
    # The hour is still open: nothing to be done yet.
    open_now = health.look(view_of(bench.table()), 1 << 20, TIME_US)
    assert open_now["debt_files"] == 0
    assert len(read) == 5


def test_a_large_table_is_read_in_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewater_worker.table.health.MANIFESTS_READ_MAX", 2)
    log = bench.log()
    run = bench.topic(SPEC, log)
    for _ in range(5):
        log.append(message_batch(SPEC, [b"x"]))
        bench.flush(run, log)
    health, view = HealthIndex(RangeIndex()), view_of(bench.table())
    looks = [health.look(view, 1 << 20, TIME_US) for _ in range(3)]
    assert [look["manifests_unread"] for look in looks] == [3, 1, 0]
    assert [look["small_files"] for look in looks] == [2, 4, 5]


def test_spans_follow_the_partitioning(bench: Bench) -> None:
    daily = TopicSpec.model_validate({"table": {"partitionBy": ["day(tw_time)"]}})
    bench.topic(daily, bench.log())
    metadata = bench.table().metadata
    assert unit_of(metadata.spec(), metadata.schema()) == "day"
