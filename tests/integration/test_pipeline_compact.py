"""What compaction makes: files of the target size, each in order, whatever they were made from."""

import gc
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tidewater_core.names import TopicName
from tidewater_core.settings import embedded
from tidewater_core.units import ByteSize
from tidewater_pipeline.calendar_time import HOUR_US
from tidewater_pipeline.jobs import compact
from tidewater_pipeline.report import Outcome, Progress
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.settings import SparkSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.java,
    pytest.mark.timeout(300),
    # pyspark leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HOUR_AT_US = 1_700_000_000_000_000 // HOUR_US * HOUR_US
FILES, ROWS, PARTITIONS = 200, 24_000, 2
TARGET = ByteSize("512Ki")
OPTIONS = compact.CompactOptions(target=TARGET)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Start Spark on an empty warehouse; one core, a small heap."""
    spark = SparkSettings(
        master="local[1]",
        driver_memory="700m",
        shuffle_partitions=2,
        conf={"spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"},
    )
    data = tmp_path_factory.mktemp("compact")
    part = Session(embedded(data).catalog, spark, Progress(quiet=True)).start()
    part.sql("CREATE NAMESPACE tidewater.shop")
    yield part
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        part.stop()
        gc.collect()


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
