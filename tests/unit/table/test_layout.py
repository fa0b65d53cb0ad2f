"""Tables as topics ask for them: made, found, grown, refused (G7)."""

import datetime as dt
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from table_bench import Bench
from table_fakes import TIME_US, TOPIC_UUID, HandLog, assignment, message_batch
from tidewater_core.crd.topic import TopicSpec
from tidewater_testing.duck import query
from tidewater_worker.ports import Phase
from tidewater_worker.table.topic import TopicRun

RAW = TopicSpec()
OTHER_UUID = str(uuid.UUID(int=77))
HOUR_US = 3_600_000_000
Fields = Callable[..., TopicSpec]

EVERYTHING: dict[str, tuple[str, Any]] = {
    "yes": ("boolean", True),
    "small": ("int", -5),
    "large": ("long", 1 << 40),
    "rough": ("float", 0.5),
    "fine": ("double", 0.1),
    "price": ("decimal(10,2)", Decimal("12.34")),
    "day": ("date", dt.date(2024, 2, 29)),
    "clock": ("time", dt.time(1, 2, 3, 4)),
    "local": ("timestamp", dt.datetime(2024, 2, 29, 1, 2, 3)),  # noqa: DTZ001
    "instant": ("timestamptz", dt.datetime(2024, 2, 29, 1, 2, 3, tzinfo=dt.UTC)),
    "text": ("string", "süß"),
    "id": ("uuid", uuid.UUID(int=5).bytes),
    "blob": ("binary", b"\x00\xff"),
    "tags": ("list<string>", ["a", "b"]),
    "counts": ("map<string,long>", [("a", 1)]),
}


def states(run: TopicRun) -> set[tuple[Phase, str]]:
    return {(part.state, part.reason) for part in run.state.partitions.values()}


def duck(bench: Bench, sql: str) -> list[Any]:
    """Ask another engine."""
    return query(sql, bench.table())


def test_a_new_table_is_what_the_design_says(bench: Bench) -> None:
    run = bench.topic(RAW, bench.log(0), bench.log(1), epoch=4)
    table = bench.table()
    assert [(f.name, str(f.field_type), f.required) for f in table.schema().fields] == [
        ("tw_partition", "int", True),
        ("tw_offset", "long", True),
        ("tw_time", "timestamptz", True),
        ("tw_key", "binary", False),
        ("tw_headers", "map<string, string>", False),
        ("value", "binary", False),
    ]
    assert str(table.spec()).replace("\n", "") == "[  1000: tw_time_hour: hour(3)]"
    assert [f.source_id for f in table.sort_order().fields] == [1, 2]
    assert table.format_version == 2
    properties = table.properties
    assert properties["tidewater.topic"] == "shop/orders"
    assert properties["tidewater.topic-uuid"] == TOPIC_UUID
    # Born with our epoch: no commit is needed before the first row.
    assert properties["tidewater.partition.1"] == '{"next":0,"epoch":4}'
    assert table.current_snapshot() is None
    assert states(run) == {(Phase.RUNNING, "")}


def test_rows_of_every_type_come_back_in_every_engine(bench: Bench, fields: Fields) -> None:
    spec = fields(**{name: kind for name, (kind, _) in EVERYTHING.items()})
    log = bench.log()
    values = {name: value for name, (_, value) in EVERYTHING.items()}
    log.append(message_batch(spec, [values, {}], keys=[b"k", None]))
    run = bench.topic(spec, log)
    (batch,) = run.reader.read(0, 0, 2, 10)
    assert {name: batch[name].to_pylist()[0] for name in EVERYTHING} == values
    assert {name: batch[name].to_pylist()[1] for name in EVERYTHING} == dict.fromkeys(EVERYTHING)
    scanned = bench.table().scan().to_arrow()
    assert scanned["price"].to_pylist() == [Decimal("12.34"), None]
    (row,) = duck(
        bench,
        "SELECT yes, small, large, price, day, clock, local, epoch_us(instant), text,"
        " id, tags, counts, tw_key FROM {table} WHERE tw_offset = 0",
    )
    assert row[:6] == (
        True,
        -5,
        1 << 40,
        Decimal("12.34"),
        dt.date(2024, 2, 29),
        dt.time(1, 2, 3, 4),
    )
    assert row[8:] == ("süß", uuid.UUID(int=5), ["a", "b"], {"a": 1}, b"k")


@pytest.mark.parametrize(
    ("partition_by", "files"),
    [
        ([], 1),
        (["hour(tw_time)"], 3),
        (["day(tw_time)"], 1),
        (["tw_partition"], 2),
        (["shop", "hour(tw_time)"], 6),
        (["bucket(4,shop)"], 2),
        (["truncate(1,shop)"], 1),
        (["truncate(2,shop)", "tw_partition"], 4),
        (["month(tw_time)", "bucket(3,tw_key)"], 2),
        (["bucket(16,amount)"], 2),
        (["identity(day)"], 3),
    ],
)
def test_partitions(bench: Bench, fields: Fields, partition_by: list[str], files: int) -> None:
    spec = fields(partition_by, shop="string", amount="decimal(9,2)", day="date")
    logs = [bench.log(0), bench.log(1)]
    base = TIME_US - TIME_US % (24 * HOUR_US)
    expected: dict[tuple[int, int], str] = {}
    for log in logs:
        for hour in range(3):
            rows: list[dict[str, object]] = [
                {
                    "shop": shop,
                    "amount": Decimal(hour),
                    "day": dt.date(2024, 1, 1 + hour),
                }
                for shop in ("aa", "ab")
            ]
            for i, row in enumerate(rows):
                expected[log.partition, log.end + i] = str(row["shop"])
            keys = [b"k1", b"k2"]
            log.append(message_batch(spec, rows, time_us=base + hour * HOUR_US, keys=keys))
    run = bench.topic(spec, *logs)
    table = bench.table()
    assert len(list(table.scan().plan_files())) == files
    found = table.scan().to_arrow()
    columns = (found[c].to_pylist() for c in ("tw_partition", "tw_offset", "shop"))
    assert {(p, o): s for p, o, s in zip(*columns, strict=True)} == expected
    assert table.scan("shop = 'ab'").to_arrow().num_rows == 6
    assert table.scan(f"tw_time >= '{_iso(base + 2 * HOUR_US)}'").to_arrow().num_rows == 4
    assert duck(bench, "SELECT count(*) FROM {table} WHERE shop = 'ab'") == [(6,)]
    for log in logs:
        batches = run.reader.read(log.partition, 0, 6, 10)
        assert [shop for b in batches for shop in b["shop"].to_pylist()] == ["aa", "ab"] * 3


def _iso(time_us: int) -> str:
    return dt.datetime.fromtimestamp(time_us / 1_000_000, dt.UTC).isoformat()


def test_a_topic_that_gains_columns_grows_its_table(bench: Bench, fields: Fields) -> None:
    old = fields(name="string", count="int")
    log = bench.log()
    log.append(message_batch(old, [{"name": "a", "count": 1}]))
    run = bench.topic(old, log)
    new = fields(name="string", count="long", note="string")
    # Rows that were logged under the old schema and are not in the table yet.
    log.append(message_batch(old, [{"name": "b", "count": 2}]))
    log.append(message_batch(new, [{"name": "c", "count": 1 << 40, "note": "n"}]))
    run.inbox.assign(assignment(new, [log]))
    bench.settle(run)
    assert states(run) == {(Phase.RUNNING, "")}
    rows = bench.table().scan().to_arrow().sort_by("tw_offset")
    assert rows["count"].to_pylist() == [1, 2, 1 << 40]
    assert rows["note"].to_pylist() == [None, None, "n"]
    batches = list(run.reader.read(0, 0, 3, 10))
    assert [v for b in batches for v in b["note"].to_pylist()] == [None, None, "n"]
    assert [v for b in batches for v in b["count"].to_pylist()] == [1, 2, 1 << 40]
    assert duck(bench, "SELECT note, count FROM {table} ORDER BY tw_offset")[2] == ("n", 1 << 40)


def test_a_foreign_schema_change_stops_the_topic(bench: Bench) -> None:
    log = bench.log()
    log.append(message_batch(RAW, [b"1"]))
    run = bench.topic(RAW, log)
    with bench.table().update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("tw_key")
    log.append(message_batch(RAW, [b"2"]))
    bench.flush(run, log)
    assert states(run) == {(Phase.STOPPED, "SchemaChanged")}
    assert bench.table().scan().to_arrow().num_rows == 1


def test_a_foreign_optional_column_is_no_problem(bench: Bench) -> None:
    log = bench.log()
    log.append(message_batch(RAW, [b"1"]))
    run = bench.topic(RAW, log)
    with bench.table().update_schema() as change:
        change.add_column("comment", StringType())
    log.append(message_batch(RAW, [b"2"]))
    bench.flush(run, log)
    log.append(message_batch(RAW, [b"3"]))
    bench.flush(run, log)
    rows = bench.table().scan().to_arrow().sort_by("tw_offset")
    assert rows["value"].to_pylist() == [b"1", b"2", b"3"]
    assert rows["comment"].to_pylist() == [None, None, None]


def test_a_table_that_is_not_ours_is_left_alone(bench: Bench) -> None:
    bench.catalog._catalog.create_namespace("shop")
    schema = Schema(NestedField(1, "x", LongType(), required=False))
    bench.catalog._catalog.create_table("shop.orders", schema)
    run = bench.topic(RAW, bench.log())
    assert states(run) == {(Phase.STOPPED, "SchemaChanged")}
    assert not [key for key in bench.table().properties if key.startswith("tidewater.")]


def test_a_table_of_another_topic_is_left_alone(bench: Bench) -> None:
    spec = TopicSpec.model_validate({"table": {"name": "shop.orders"}})
    bench.topic(RAW, bench.log())
    other = HandLog(bench.data / "log" / "shop" / "returns" / "0", 0)
    run = bench.start(assignment(spec, [other], topic="shop/returns", uuid=OTHER_UUID))
    bench.settle(run)
    assert states(run) == {(Phase.STOPPED, "TableNotOurs")}
    assert bench.table().properties["tidewater.topic"] == "shop/orders"


def test_a_retained_table_goes_on_for_a_topic_of_the_same_name(bench: Bench) -> None:
    log = bench.log()
    log.append(message_batch(RAW, [b"0", b"1"]))
    old = bench.topic(RAW, log, epoch=9)
    # The topic is deleted with its log, and made again: new identity, epochs from 1.
    (bench.data / "log" / "shop" / "orders" / "table.json").unlink()
    for path in log.directory.iterdir():
        path.unlink()
    fresh = HandLog(log.directory, 0)
    run = bench.start(assignment(RAW, [fresh], epoch=1, uuid=OTHER_UUID))
    bench.settle(run)
    assert states(run) == {(Phase.RUNNING, "")}
    assert run.state.partitions[0].next == 2
    fresh.end = 2
    fresh.append(message_batch(RAW, [b"2"]))
    bench.flush(run, fresh)
    assert sorted(bench.table().scan().to_arrow()["value"].to_pylist()) == [b"0", b"1", b"2"]
    # The old owner, had it lived on, is out, and does not take the table back.
    old.inbox.durable({0: 3})
    for _ in range(20):
        again = old.step()
        bench.clock.advance(max(0.0, (again or 0.0) - bench.clock.monotonic()))
    assert states(old) == {(Phase.STOPPED, "TopicReplaced")}


def test_a_partition_added_later_begins_at_zero(bench: Bench) -> None:
    logs = [bench.log(0)]
    logs[0].append(message_batch(RAW, [b"a"]))
    run = bench.topic(RAW, *logs)
    logs.append(bench.log(1))
    run.inbox.assign(assignment(RAW, logs))
    bench.settle(run)
    assert run.state.partitions[1].next == 0
    logs[1].append(message_batch(RAW, [b"b"]))
    bench.flush(run, *logs)
    assert bench.table().scan().to_arrow().num_rows == 2
