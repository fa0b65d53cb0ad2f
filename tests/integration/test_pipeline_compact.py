"""What compaction makes: files of the target size, each in order, whatever they were made from."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tidewater_core.compaction import HOUR_US
from tidewater_core.names import HOLD, TopicName
from tidewater_core.settings import embedded
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.jobs import compact, retention
from tidewater_pipeline.report import Outcome
from tidewater_pipeline.session import Session, SnapshotGoneError, TopicTable
from tidewater_pipeline.state import TableState
from tidewater_testing.spark import SPARK_MARKS, small_spark

pytestmark = [*SPARK_MARKS]

HOUR_AT_US = 1_700_000_000_000_000 // HOUR_US * HOUR_US
FILES, ROWS, PARTITIONS = 200, 24_000, 2
TARGET = ByteSize("512Ki")
OPTIONS = compact.CompactOptions(target=TARGET)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Start Spark on an empty warehouse."""
    with small_spark(embedded(tmp_path_factory.mktemp("compact")).catalog) as part:
        part.sql("CREATE NAMESPACE tidewater.shop")
        yield part


def make(
    session: Session, name: str, *, ordered: bool, shuffled: bool, by: str = "hours(tw_time)"
) -> TopicTable:
    """Make a topic's table of small files: one commit's rows each, or rows from all over."""
    table = session.table(TopicName("shop", name))
    session.sql(
        f"CREATE TABLE {table.full_name} (tw_partition INT NOT NULL, tw_offset BIGINT NOT NULL, "
        "tw_time TIMESTAMP, tw_key BINARY, tw_headers MAP<STRING, STRING>, value BINARY) "
        f"USING iceberg {f'PARTITIONED BY ({by})' if by else ''} "
        "TBLPROPERTIES ('format-version' = '2', 'write.distribution-mode' = 'none', "
        # Much below the target, as it is in life: what is in memory counts before compression.
        "'write.parquet.row-group-size-bytes' = '65536')"
    )
    if ordered:
        order = "LOCALLY ORDERED BY tw_partition, tw_offset"
        session.sql(f"ALTER TABLE {table.full_name} WRITE {order}")
    rows = session.spark.range(0, ROWS, 1, FILES).selectExpr(
        f"CAST(id % {PARTITIONS} AS INT) AS tw_partition",
        f"id DIV {PARTITIONS} AS tw_offset",
        f"timestamp_micros({HOUR_AT_US} + id) AS tw_time",
        "CAST(NULL AS BINARY) AS tw_key",
        "CAST(NULL AS MAP<STRING, STRING>) AS tw_headers",
        "CAST(sha2(CAST(id AS STRING), 512) AS BINARY) AS value",
    )
    if shuffled:
        rows = rows.repartition(FILES, "value")
    # Foreign writers need not keep to the declared order.
    keeps = "false" if shuffled else "true"
    writer = rows.writeTo(table.full_name).option("use-table-distribution-and-ordering", keeps)
    writer.append()
    return table


def layout(table: TopicTable) -> list[tuple[int, list[tuple[int, int]]]]:
    """Read each data file by itself: its bytes, and its (partition, offset) pairs as they stand."""
    found = []
    for file in table.files(table.load()):
        columns = pq.read_table(file.path.removeprefix("file:"), columns=list(compact.ORDER))
        pairs = list(zip(*(column.to_pylist() for column in columns.columns), strict=True))
        found.append((Path(file.path.removeprefix("file:")).stat().st_size, pairs))
    return found


@pytest.mark.parametrize(
    ("name", "ordered", "shuffled"),
    [
        ("as-the-writer-leaves-it", True, False),
        ("rewritten-by-another-engine", True, True),
        ("with-no-declared-order", False, True),
    ],
)
def test_files_of_the_target_size_in_order(
    session: Session, name: str, ordered: bool, shuffled: bool
) -> None:
    table = make(session, name, ordered=ordered, shuffled=shuffled)
    before = layout(table)
    assert len(before) == FILES
    if shuffled:
        assert any(pairs != sorted(pairs) for _, pairs in before)

    done = compact.run(session, table, OPTIONS)
    assert done.outcome is Outcome.DONE, done.to_json()
    after = layout(table)
    for _, pairs in after:
        assert pairs == sorted(pairs), "each file is in the order of partition and offset"
    everything = sorted(itertools.chain.from_iterable(pairs for _, pairs in after))
    offsets = range(ROWS // PARTITIONS)
    assert everything == [(p, o) for p in range(PARTITIONS) for o in offsets], "each row once"
    sizes = sorted(nbytes for nbytes, _ in after)
    assert len(sizes) > 2, sizes
    assert max(sizes) <= 1.8 * TARGET, sizes
    assert sum(sizes) / len(sizes) >= 0.5 * TARGET, sizes
    assert compact.run(session, table, OPTIONS).outcome is Outcome.NOTHING, "twice changes nothing"


def test_a_table_without_partitions(session: Session) -> None:
    table = make(session, "flat", ordered=True, shuffled=False, by="")
    done = compact.run(session, table, compact.CompactOptions(target=ByteSize("64Mi")))
    assert done.outcome is Outcome.DONE, done.to_json()
    ((_, pairs),) = layout(table)
    assert pairs == [(p, o) for p in range(PARTITIONS) for o in range(ROWS // PARTITIONS)]


def test_slices_of_time_do_not_overlap(session: Session) -> None:
    """What the writer left in order of offsets stays so between files: a reader opens few."""
    table = session.table(TopicName("shop", "as-the-writer-leaves-it"))
    for partition in range(PARTITIONS):
        bounds = sorted(
            (min(own), max(own))
            for _, pairs in layout(table)
            if (own := [o for p, o in pairs if p == partition])
        )
        assert all(one[1] < other[0] for one, other in itertools.pairwise(bounds)), bounds


def test_rows_deleted_by_merge_on_read_leave_the_files(session: Session) -> None:
    """History cannot be read past such files, and nothing ever removed them."""
    table = make(session, "deleted", ordered=True, shuffled=False)
    compact.run(session, table, OPTIONS)
    properties = "'write.delete.mode' = 'merge-on-read'"
    session.sql(f"ALTER TABLE {table.full_name} SET TBLPROPERTIES ({properties})")
    session.sql(f"DELETE FROM {table.full_name} WHERE tw_offset IN (7, 9000)")
    assert table.load().delete_files > 0
    done = compact.run(session, table, OPTIONS)
    assert done.outcome is Outcome.DONE, done.to_json()
    assert table.load().delete_files == 0
    pairs = sorted(itertools.chain.from_iterable(pairs for _, pairs in layout(table)))
    kept = [o for o in range(ROWS // PARTITIONS) if o not in (7, 9000)]
    assert pairs == [(p, o) for p in range(PARTITIONS) for o in kept]
    assert compact.run(session, table, OPTIONS).outcome is Outcome.NOTHING


def spoil(path: str) -> None:
    """Overwrite the half of a file with noise."""
    file = Path(path.removeprefix("file:"))
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = os.urandom(len(data) // 2 - 4)
    file.write_bytes(data)


def test_a_file_that_cannot_be_read_is_a_failure_and_stops_nothing_else(session: Session) -> None:
    """It was a lost race, with exit code 0, for ever."""
    table = make(session, "rot", ordered=True, shuffled=False)
    session.sql(
        f"INSERT INTO {table.full_name} SELECT /*+ REPARTITION(9) */ tw_partition, "
        "tw_offset + 100000, tw_time + INTERVAL 9 HOURS, tw_key, tw_headers, value "
        f"FROM {table.full_name} WHERE tw_offset < 900"
    )
    files = sorted(table.files(table.load()), key=lambda file: file.time_low_us)
    assert files[-1].time_low_us > files[0].time_high_us + HOUR_US
    spoil(files[3].path)
    options = compact.CompactOptions(target=TARGET, lateness=Duration("1m"))
    plan = compact.plan_compact

    def apart(*words: Any, **named: Any) -> list[compact.Range]:
        return plan(*words, **{**named, "range_bytes_max": 1})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compact, "plan_compact", apart)
        done = compact.run(session, table, options)
    assert (done.outcome, done.retry, done.is_partial) == (Outcome.FAILED, False, True)
    assert "FileDamaged" in done.message
    rotten, sound = done.details["ranges"]
    assert (rotten["rewritten_files"], rotten["failed_files"]) == (0, FILES)
    assert sound["rewritten_files"] == len(files) - FILES
    assert len(table.files(table.load())) == FILES + sound["added_files"]


def let_go(session: Session, table: TopicTable, state: TableState) -> None:
    """Do what the writer does meanwhile: commit, and expire the snapshot in the metadata alone."""
    session.sql(f"INSERT INTO {table.full_name} VALUES (0, 99999, now(), NULL, NULL, NULL)")
    session.sql(
        f"CALL {session.procedure('expire_snapshots')}(table => '{table.name}', "
        "older_than => TIMESTAMP '1970-01-02', retain_last => 1, "
        f"snapshot_ids => array({state.snapshot_id}L))"
    )


def test_the_files_of_a_snapshot_that_has_expired_are_not_none(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There seemed to be nothing to do."""
    table = make(session, "gone", ordered=True, shuffled=False)
    state = table.load()
    let_go(session, table, state)
    with pytest.raises(SnapshotGoneError):
        table.files(state)
    load, loads = TopicTable.load, itertools.count()

    def late(self: TopicTable) -> TableState:
        found = load(self)
        if next(loads) == 1:  # the first one is for the report
            let_go(session, table, found)
        return found

    monkeypatch.setattr(TopicTable, "load", late)
    done = compact.run(session, table, OPTIONS)
    assert done.outcome is Outcome.DONE, done.to_json()


def test_retention_may_outlast_the_snapshots_that_the_writer_keeps(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised the starts and then failed, at each run."""
    table = make(session, "aged", ordered=True, shuffled=False)
    frontiers = {f"tidewater.partition.{p}": '{"next":12000,"epoch":1}' for p in range(PARTITIONS)}
    table.set_properties(frontiers)
    plan = retention.plan_retention

    def late(*words: Any, **named: Any) -> retention.RetentionPlan:
        let_go(session, table, table.load())
        return plan(*words, **named)

    monkeypatch.setattr(retention, "plan_retention", late)
    options = retention.RetentionOptions(keep=Duration("1d"))
    done = retention.run(session, table, options)
    assert done.outcome is Outcome.DONE, done.to_json()
    assert done.details["removed_files"] == FILES
    state = table.load()
    assert state.starts == dict.fromkeys(range(PARTITIONS), ROWS // PARTITIONS)
    assert (state.size.files, HOLD in state.properties) == (1, False)
