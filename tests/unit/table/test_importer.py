"""Existing Parquet files become messages: all, once, in one commit."""

import datetime as dt
import itertools
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from table_bench import Bench
from table_fakes import TIME_US, CountingIds, HandLog, assignment, message_batch
from table_faults import Fault, FaultyCatalog
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Conflict, Fenced, Invalid
from tidewater_worker.table import files as files_module
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.importer import Imported, Tools, import_files
from tidewater_worker.table.opening import topic_table

RAW = TopicSpec()
HOUR_US = 3_600_000_000
SEEDS = itertools.count(100)


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return str(path)


def bring(
    bench: Bench, paths: list[str], spec: TopicSpec = RAW, epoch: int | None = None, **tools: Any
) -> Imported:
    where = topic_table(assignment(spec, [bench.log(0), bench.log(1)]))
    catalog = tools.pop("catalog", bench.catalog)
    ready = Tools(catalog, bench.clock, CountingIds(next(SEEDS)), sleep=lambda _: None, **tools)
    return import_files(ready, where, 1, paths, epoch)


def rows_of(bench: Bench) -> list[tuple[int, int, Any]]:
    rows = bench.table().scan().to_arrow()
    columns = (rows[c].to_pylist() for c in ("tw_partition", "tw_offset", "value"))
    return sorted(zip(*columns, strict=True))


def test_rows_follow_the_frontier_in_the_order_given(bench: Bench, tmp_path: Path) -> None:
    logs = [bench.log(0), bench.log(1)]
    logs[1].append(message_batch(RAW, [b"0", b"1"]))
    bench.topic(RAW, *logs)
    bench.clock.advance(60)
    paths = [
        parquet(tmp_path / "b.parquet", value=[b"2", b"3"]),
        parquet(tmp_path / "a.parquet", value=["4", "5"], tw_key=[b"k", None]),
    ]
    seen: list[tuple[int, int]] = []
    done = bring(bench, paths, progress=lambda n, of: seen.append((n, of)))
    assert (done.first, done.end) == (2, 6)
    assert seen[-1] == (4, 4)
    assert rows_of(bench) == [(1, i, str(i).encode()) for i in range(6)]
    table = bench.table()
    assert table.properties["tidewater.partition.1"] == '{"next":6,"epoch":1}'
    # The topic goes on after them.
    log = HandLog(tmp_path / "log" / "shop" / "orders" / "1", 1, first=6)
    for old in log.directory.glob("*.wal"):
        old.unlink()
    log.append(message_batch(RAW, [b"6"]))
    run = bench.topic(RAW, logs[0], log, epoch=2)
    back = [v for b in run.reader.read(1, 0, 7, 10) for v in b["value"].to_pylist()]
    assert back == [str(i).encode() for i in range(7)]


def test_the_same_files_are_refused_whatever_their_names(bench: Bench, tmp_path: Path) -> None:
    one = parquet(tmp_path / "1.parquet", value=[b"1"])
    two = parquet(tmp_path / "2.parquet", value=[b"2"])
    bring(bench, [one, two])
    again = tmp_path / "copy.parquet"
    again.write_bytes(Path(one).read_bytes())
    with pytest.raises(Conflict, match="AlreadyImported"):
        bring(bench, [two, str(again)])
    assert len(rows_of(bench)) == 2
    bring(bench, [one])
    assert len(rows_of(bench)) == 3


def test_typed_rows_with_times_over_many_hours(
    bench: Bench, tmp_path: Path, fields: Callable[..., TopicSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "OPEN_FILES_MAX", 3)
    spec = fields(name="string!", amount="decimal(9,2)", note="string")
    base = TIME_US - TIME_US % HOUR_US
    times = [base + i * HOUR_US // 2 for i in range(20)]
    moments = pa.array(times).cast(pa.timestamp("us", "UTC"))
    path = parquet(
        tmp_path / "x.parquet",
        name=[f"n{i}" for i in range(20)],
        amount=pa.array([Decimal(i) for i in range(20)], pa.decimal128(9, 2)),
        tw_time=moments,
        tw_headers=pa.array(
            [[("h", str(i))] for i in range(20)], pa.map_(pa.string(), pa.string())
        ),
    )
    done = bring(bench, [path], spec)
    assert (done.first, done.end, done.files) == (0, 20, 10)
    rows = bench.table().scan().to_arrow().sort_by("tw_offset")
    assert rows["name"].to_pylist() == [f"n{i}" for i in range(20)]
    assert rows["tw_time"].to_pylist()[1] == dt.datetime.fromtimestamp(times[1] / 1e6, dt.UTC)
    assert rows["note"].null_count == 20
    assert rows["tw_headers"].to_pylist()[7] == [("h", "7")]


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("no value", "MissingColumn", {"tw_key": [b"k"]}),
    ("unknown column", "UnknownColumn", {"value": [b"1"], "extra": [1]}),
    ("offset given", "ColumnNotAllowed", {"value": [b"1"], "tw_offset": [1]}),
    ("wrong type", "WrongType", {"value": [[1, 2]]}),
    ("time that goes back", "TimeGoesBack", {"value": [b"1", b"2"], "tw_time": [
        dt.datetime(2024, 1, 2, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]}),
    ("no time", "MissingValue", {"value": [b"1"],
        "tw_time": pa.nulls(1, pa.timestamp("us", "UTC"))}),
    ("no rows", "NoRows", {"value": pa.array([], pa.binary())}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "columns"), [pytest.param(*case[1:], id=case[0]) for case in BAD]
)
def test_files_that_do_not_fit_are_refused_whole(
    bench: Bench, tmp_path: Path, reason: str, columns: dict[str, Any]
) -> None:
    good = parquet(tmp_path / "good.parquet", value=[b"1"])
    bad = parquet(tmp_path / "bad.parquet", **columns)
    paths = [bad] if reason == "NoRows" else [good, bad]
    with pytest.raises(Invalid, match=reason):
        bring(bench, paths)
    assert bench.table().current_snapshot() is None
    assert not list(tmp_path.glob("warehouse/**/*.parquet")), "files of a refused import are left"


def test_what_is_no_parquet_is_refused(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(Invalid, match="NotParquet"):
        bring(bench, [str(tmp_path / "x.parquet")])
    with pytest.raises(Invalid, match="NoSuchFile"):
        bring(bench, [str(tmp_path / "nowhere.parquet")])
    with pytest.raises(Invalid, match="NoFiles"):
        bring(bench, [])


def test_times_before_the_tables_last_are_refused(bench: Bench, tmp_path: Path) -> None:
    log = bench.log(1)
    log.append(message_batch(RAW, [b"0"], time_us=TIME_US))
    bench.topic(RAW, bench.log(0), log)
    early = pa.array([TIME_US - 1]).cast(pa.timestamp("us", "UTC"))
    with pytest.raises(Invalid, match="TimeGoesBack"):
        bring(bench, [parquet(tmp_path / "x.parquet", value=[b"1"], tw_time=early)])


def test_an_older_epoch_is_fenced(bench: Bench, tmp_path: Path) -> None:
    bench.topic(RAW, bench.log(0), bench.log(1), epoch=5)
    path = parquet(tmp_path / "x.parquet", value=[b"1"])
    with pytest.raises(Fenced):
        bring(bench, [path], epoch=4)
    assert bench.table().current_snapshot() is None
    bring(bench, [path], epoch=6)
    assert bench.table().properties["tidewater.partition.1"] == '{"next":1,"epoch":6}'


@pytest.mark.parametrize(
    "fault", [Fault.REFUSED, Fault.LOST, Fault.LANDED, Fault.LATE, Fault.TOKEN]
)
def test_an_import_lands_once_whatever_the_catalog_does(
    bench: Bench, tmp_path: Path, fault: Fault
) -> None:
    faulty = FaultyCatalog(bench.settings)
    faulty.script = [fault, fault]
    path = parquet(tmp_path / "x.parquet", value=[b"0", b"1"])
    done = bring(bench, [path], catalog=TableCatalog(faulty))  # type: ignore[arg-type]
    faulty.close()
    assert (done.first, done.end) == (0, 2)
    assert rows_of(bench) == [(1, 0, b"0"), (1, 1, b"1")], "G2 Once in the table"
