"""Reading back: in order, once, whoever wrote the files and however (G3)."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from table_bench import Bench
from table_fakes import TIME_US, message_batch
from table_faults import compact, rewrite
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Invalid
from tidewater_worker.table import history as history_module
from tidewater_worker.table import row_groups as row_groups_module
from tidewater_worker.table.topic import TopicRun

SPEC = TopicSpec()


def read(
    run: TopicRun, partition: int, start: int, end: int, max_rows: int = 10_000
) -> list[bytes]:
    batches = list(run.reader.read(partition, start, end, max_rows))
    offsets = [offset for batch in batches for offset in batch["tw_offset"].to_pylist()]
    assert offsets == list(range(start, start + len(offsets))), "G3 One stream: offsets in order"
    return [value for batch in batches for value in batch["value"].to_pylist()]


@pytest.fixture
def filled(bench: Bench) -> TopicRun:
    """Return a topic of two partitions with 6 commits of 5 rows each, one second apart."""
    logs = [bench.log(0), bench.log(1)]
    run = bench.topic(SPEC, *logs)
    for number in range(6):
        for log in logs:
            values = [f"{log.partition}:{log.end + i}".encode() for i in range(5)]
            log.append(message_batch(SPEC, values, time_us=TIME_US + number * 1_000_000))
        bench.flush(run, *logs)
    return run


def expected(partition: int, start: int, end: int) -> list[bytes]:
    return [f"{partition}:{offset}".encode() for offset in range(start, end)]


def test_any_window_is_read_in_order(filled: TopicRun) -> None:
    for start in (0, 1, 4, 5, 29):
        for end in (1, 5, 6, 30, 100):
            assert read(filled, 1, start, end) == expected(1, start, min(end, 30))


def test_max_rows_ends_a_read(filled: TopicRun) -> None:
    assert read(filled, 0, 3, 30, max_rows=4) == expected(0, 3, 7)
    assert read(filled, 0, 3, 3) == []
    assert read(filled, 0, 30, 40) == []
    assert read(filled, 7, 0, 10) == []


@pytest.mark.parametrize("memory", [1, 1 << 20])
@pytest.mark.parametrize("window", [1, 3, 1000])
def test_files_that_another_engine_shuffled_are_read_in_order(
    filled: TopicRun, window: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "WINDOW_ROWS_MAX", window)
    monkeypatch.setattr(row_groups_module, "DECODED_BYTES_MAX", memory)
    compact(filled.reader.view(newest=True).table)
    filled.reader.view(newest=True)
    filled._view = None
    assert read(filled, 0, 0, 30) == expected(0, 0, 30)
    assert read(filled, 1, 7, 23) == expected(1, 7, 23)


def test_a_reader_that_pages_decodes_each_row_group_once(
    filled: TopicRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(filled.reader.view(newest=True).table)
    filled._view = None
    filled.reader.view(newest=True)
    read_row_group = pq.ParquetFile.read_row_group
    decoded: list[int] = []

    def note(self: pq.ParquetFile, index: int, **kwargs: Any) -> pa.Table:
        decoded.append(index)
        return read_row_group(self, index, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", note)
    values: list[bytes] = []
    while len(values) < 30:
        values += read(filled, 0, len(values), 30, max_rows=7)
    assert values == expected(0, 0, 30)
    assert len(decoded) == 1


def test_a_compaction_in_the_middle_of_a_read_changes_nothing(filled: TopicRun) -> None:
    batches = filled.reader.read(0, 0, 30, 100)
    values = next(batches)["value"].to_pylist()
    compact(filled.reader.view(newest=True).table)
    for batch in batches:
        values += batch["value"].to_pylist()
    assert values == expected(0, 0, 30)


def test_files_removed_in_the_middle_of_a_read_are_found_in_the_newest_snapshot(
    filled: TopicRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "WINDOW_ROWS_MAX", 5)
    old = filled.reader.view(newest=True)
    batches = filled.reader.read(0, 0, 30, 100)
    values = next(batches)["value"].to_pylist()
    gone = [task.file.file_path for task in old.table.scan().plan_files()]
    compact(old.table)
    for path in gone:
        old.table.io.delete(path)
    for batch in batches:
        values += batch["value"].to_pylist()
    assert values == expected(0, 0, 30)


def test_a_live_reader_pins_its_snapshot(filled: TopicRun) -> None:
    batches = filled.reader.read(0, 0, 30, 100)
    next(batches)
    assert filled.inbox.pinned() == {filled.state.snapshot_id}
    batches.close()  # type: ignore[attr-defined]
    assert filled.inbox.pinned() == frozenset()


def test_what_retention_removed_is_refused(filled: TopicRun) -> None:
    with filled.reader.view(newest=True).table.transaction() as change:
        change.set_properties({"tidewater.start.0": "7"})
    filled._view = None
    filled.reader.view(newest=True)
    with pytest.raises(Invalid, match="OffsetExpired") as error:
        read(filled, 0, 6, 30)
    assert "7" in error.value.message
    assert read(filled, 0, 7, 30) == expected(0, 7, 30)
    assert read(filled, 1, 0, 3) == expected(1, 0, 3)


def test_a_missing_row_is_said(filled: TopicRun) -> None:
    table = filled.reader.view(newest=True).table
    rewrite(table, table.scan("tw_partition = 1 or tw_offset != 12").to_arrow())
    filled._view = None
    filled.reader.view(newest=True)
    with pytest.raises(Corrupt, match="offset 12 of partition 0"):
        read(filled, 0, 0, 30)
    assert read(filled, 1, 0, 30) == expected(1, 0, 30)


def test_a_doubled_row_is_said(filled: TopicRun) -> None:
    table = filled.reader.view(newest=True).table
    rows = table.scan().to_arrow()
    again = table.scan("tw_partition = 1 and tw_offset = 3").to_arrow()
    rewrite(table, pa.concat_tables([rows, again]))
    filled._view = None
    filled.reader.view(newest=True)
    with pytest.raises(Corrupt, match="offset 3 of partition 1 is in the table twice"):
        read(filled, 1, 0, 30)


@pytest.mark.parametrize("shuffled", [False, True])
def test_offset_at_a_time(filled: TopicRun, shuffled: bool) -> None:
    if shuffled:
        compact(filled.reader.view(newest=True).table)
    at = filled.reader.offset_at
    assert at(0, 0) == 0
    assert at(0, TIME_US) == 0
    assert at(0, TIME_US + 1) == 5
    assert at(1, TIME_US + 3_000_000) == 15
    assert at(1, TIME_US + 5_000_000) == 25
    assert at(1, TIME_US + 5_000_001) is None
    assert at(9, 0) is None


def test_the_columns_are_the_topics(filled: TopicRun) -> None:
    (batch,) = filled.reader.read(0, 0, 1, 1)
    assert batch.schema.names == [
        "tw_partition", "tw_offset", "tw_time", "tw_key", "tw_headers", "value",
    ]  # fmt: skip
    assert batch.schema.field("value").type == pa.binary()
