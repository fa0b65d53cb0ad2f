"""Compaction next to Iceberg's own: the same table, the same session, in turns.

A table of a topic's layout gets 1,000 small files, as a writer makes them: each with the next
offsets of every partition. It is compacted by `tidewater-pipeline compact` and by a plain
`rewrite_data_files`, as it comes (bin-pack) and with a sort, each from the same snapshot, in turns
after a warm-up, each first as often as the others; before and after, queries are timed. What counts
are rows per second per core.

    make bench-compact
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from tidewater_core.compaction import HOUR_US
from tidewater_core.names import TopicName
from tidewater_core.settings import embedded
from tidewater_core.units import ByteSize
from tidewater_pipeline.jobs import compact
from tidewater_pipeline.report import Outcome, Progress
from tidewater_pipeline.session import Session, TopicTable
from tidewater_pipeline.settings import SparkSettings

TOPIC: Final = TopicName("bench", "orders")
PARTITIONS: Final = 2
PAYLOAD_BYTES: Final = 200
TARGET: Final = ByteSize("128Mi")
HOUR_AT_US: Final = 1_700_000_000_000_000 // HOUR_US * HOUR_US
"""An hour long closed."""
RATES: Final = ("rows_per_s_per_core", "rows_per_cpu_s")
QUERIES: Final = {
    "scan": "SELECT count(*), sum(length(value)) FROM {table}",
    "range": "SELECT count(*), max(value) FROM {table} WHERE tw_partition = 1 "
    "AND tw_offset BETWEEN {low} AND {high}",
}


def make_table(session: Session, table: TopicTable, files: int, rows: int) -> None:
    """Write the small files in one commit: each the next offsets of both partitions."""
    name = table.full_name
    session.sql(f"CREATE NAMESPACE IF NOT EXISTS `{session.catalog.name}`.`{TOPIC.namespace}`")
    session.sql(
        f"CREATE TABLE {name} (tw_partition INT NOT NULL, tw_offset BIGINT NOT NULL, "
        "tw_time TIMESTAMP, tw_key BINARY, tw_headers MAP<STRING, STRING>, value BINARY) "
        "USING iceberg PARTITIONED BY (hours(tw_time)) "
        "TBLPROPERTIES ('format-version' = '2', 'write.distribution-mode' = 'none', "
        "'write.parquet.compression-codec' = 'zstd', 'write.parquet.compression-level' = '1')"
    )
    session.sql(f"ALTER TABLE {name} WRITE LOCALLY ORDERED BY tw_partition, tw_offset")
    each = session.spark.range(0, files * rows, 1, files)
    made = each.selectExpr(
        f"CAST(id % {PARTITIONS} AS INT) AS tw_partition",
        f"id DIV {PARTITIONS} AS tw_offset",
        f"timestamp_micros({HOUR_AT_US} + id) AS tw_time",
        "CAST(concat('k', id % 1000) AS BINARY) AS tw_key",
        "CAST(NULL AS MAP<STRING, STRING>) AS tw_headers",
        # Hex of hashes: as hard to compress as ids and amounts are.
        f"CAST(substr(concat(sha2(CAST(id AS STRING), 512), sha2(CAST(-id AS STRING), 512)), 1, "
        f"{PAYLOAD_BYTES}) AS BINARY) AS value",
    )
    made.writeTo(name).append()


def plain(session: Session, table: TopicTable, strategy: str) -> None:
    """Rewrite as Iceberg does it when it is told nothing else."""
    order = f", sort_order => '{compact.SORT_ORDER}'" if strategy == "sort" else ""
    session.sql(
        f"CALL {session.procedure('rewrite_data_files')}(table => '{table.name}', "
        f"strategy => '{strategy}'{order}, "
        f"options => map('target-file-size-bytes', '{int(TARGET)}'))"
    )


def ours(session: Session, table: TopicTable) -> None:
    """Run the job; one that has not done it all is not to be compared."""
    report = compact.run(session, table, compact.CompactOptions(target=TARGET))
    if report.outcome is not Outcome.DONE or report.details["left_ranges"]:
        raise RuntimeError(f"compact: {report.outcome} {report.message}")


def cpu_seconds() -> float:
    """Add up what this process and the JVM below it have used."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


def measured(work: Callable[[], None]) -> dict[str, float]:
    """Return wall and CPU seconds."""
    began, before = time.monotonic(), cpu_seconds()
    work()
    return {"seconds": time.monotonic() - began, "cpu_seconds": cpu_seconds() - before}


def query_ms(session: Session, table: TopicTable, rows: int) -> dict[str, float]:
    """Time each query: the median of three."""
    half = rows // PARTITIONS // 2
    found = {}
    for name, text in QUERIES.items():
        query = text.format(table=table.full_name, low=half, high=half + 999)
        times = []
        for _ in range(3):
            began = time.monotonic()
            session.sql(query)
            times.append(time.monotonic() - began)
        found[name] = round(1000 * statistics.median(times), 1)
    return found


def compare(
    session: Session, table: TopicTable, rows: int, rounds: int, warm: int
) -> dict[str, Any]:
    """Run all three in turns, each from the same snapshot."""
    table.set_properties(compact.PROPERTIES)
    state = table.load()
    ways: dict[str, Callable[[], None]] = {
        "plain bin-pack": lambda: plain(session, table, "binpack"),
        "plain sort": lambda: plain(session, table, "sort"),
        "tidewater": lambda: ours(session, table),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    query_ms(session, table, rows)  # a JVM that has just started is slow at everything
    queries_before = query_ms(session, table, rows)
    queries_after: dict[str, float] = {}
    sizes: list[int] = []
    for number in range(warm + rounds):
        names = list(ways)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            os.sync()  # nobody pays for what the one before has left to the kernel
            one = measured(ways[name])
            if number >= warm:
                runs[name].append(one)
            if name == "tidewater" and number == warm + rounds - 1:
                sizes = sorted(file.nbytes for file in table.files(table.load()))
                queries_after = query_ms(session, table, rows)
            session.sql(
                f"CALL {session.procedure('rollback_to_snapshot')}('{table.name}', "
                f"{state.snapshot_id})"
            )
    before = {"files": state.size.files, "bytes": state.size.nbytes}
    return {
        "rows": rows,
        "load": [round(each, 1) for each in os.getloadavg()],
        "before": {**before, "query_ms": queries_before},
        "after": {"files": len(sizes), "file_bytes": sizes, "query_ms": queries_after},
        "runs": runs,
    }


def summarise(raw: dict[str, Any], cores: int) -> dict[str, Any]:
    """Turn seconds into rows per second per core, and compare."""
    rates: dict[str, dict[str, float]] = {}
    for name, runs in raw["runs"].items():
        seconds = statistics.median(each["seconds"] for each in runs)
        cpu = statistics.median(each["cpu_seconds"] for each in runs)
        rates[name] = {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu, 2),
            "rows_per_s_per_core": round(raw["rows"] / seconds / cores),
            "rows_per_cpu_s": round(raw["rows"] / cpu),
        }
    own = rates["tidewater"]
    ratios = {
        f"to {name}": {key: round(own[key] / rate[key], 2) for key in RATES}
        for name, rate in rates.items()
        if name != "tidewater"
    }
    return {"rates": rates, "ratio": ratios}


def main() -> int:
    """Make the table, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=2000, help="of each file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=3, help="rounds that do not count")
    parser.add_argument("--cores", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidewater-bench-") as folder:
        data = Path(folder)
        spark = SparkSettings(master=f"local[{args.cores}]", driver_memory="2g")
        with Session(embedded(data).catalog, spark, Progress()) as session:
            table = session.table(TOPIC)
            make_table(session, table, args.files, args.rows)
            raw = compare(session, table, args.files * args.rows, args.rounds, args.warm)
    whole = {"cores": args.cores, **summarise(raw, args.cores), **raw}
    text = json.dumps(whole, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
