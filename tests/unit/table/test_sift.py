"""Filters over history: what is not read, and what is noticed all the same (G3, G4, G7)."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from table_bench import Bench
from table_fakes import message_batch
from table_faults import compact, rewrite
from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Invalid, Retryable
from tidewater_worker.ports import Sifted
from tidewater_worker.table import sift as sift_module
from tidewater_worker.table.files import plan_files
from tidewater_worker.table.row_groups import Ahead, conform
from tidewater_worker.table.topic import TopicRun

FIELDS = [
    {"name": "region", "type": "string"},
    {"name": "amount", "type": "decimal(10,2)"},
    {"name": "ratio", "type": "double"},
    {"name": "day", "type": "date"},
    {"name": "note", "type": "string"},
]
SPEC = TopicSpec.model_validate({"schema": {"fields": FIELDS}})
REGIONS = ("asia", "europe", "oceania")
ROWS = 12


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Note the columns that are read, with the row group."""
    found: list[tuple[str, int]] = []
    original: Callable[..., pa.Table] = Ahead._read

    def noted(self: Any, group: Any, wanted: pa.Schema) -> pa.Table:
        found.extend((name, group.bounds.offsets[0]) for name in wanted.names)
        return original(self, group, wanted)

    monkeypatch.setattr(Ahead, "_read", noted)
    return found


@pytest.fixture
def run(bench: Bench) -> Iterator[TopicRun]:
    """Three files of four rows; the region, the key and the amount rise with the offset."""
    log = bench.log()
    made = bench.topic(SPEC, log)
    for part, region in enumerate(REGIONS):
        rows: list[bytes | dict[str, object]] = [
            {
                "region": region,
                "amount": None if i == 3 else part * 10 + i,
                "ratio": float("nan") if i == 2 else float(part),
                "day": None,
                "note": f"note {part}{i}",
            }
            for i in range(4)
        ]
        log.append(message_batch(SPEC, rows, keys=[f"k{part}{i}".encode() for i in range(4)]))
        bench.flush(made, log)
    yield made
    bench.settle(made)


def refresh(run: TopicRun) -> None:
    """Let the reader see what somebody else has committed."""
    run._view = None
    run.reader.view(newest=True)


def check(found: list[Sifted], start: int, end: int) -> list[int]:
    """See that answers follow each other; return the offsets that were found."""
    assert (found[0].start, found[-1].end) == (start, end)
    assert [each.end for each in found[:-1]] == [each.start for each in found[1:]]
    offsets: list[int] = []
    for each in found:
        inside = each.rows["tw_offset"].to_pylist()
        assert all(each.start <= offset < each.end for offset in inside)
        offsets += inside
    assert offsets == sorted(offsets)
    return offsets


def sift(run: TopicRun, start: int = 0, end: int = ROWS, **spec: Any) -> list[int]:
    found = list(run.reader.sift(0, start, end, FilterSpec.model_validate(spec)))
    return check(found, start, end)


@pytest.mark.parametrize(
    ("spec", "offsets", "files"),
    [
        ({"where": "region = 'europe'"}, [4, 5, 6, 7], 2),
        ({"where": "region = 'africa'"}, [], 3),
        ({"where": "region != 'europe'"}, [0, 1, 2, 3, 8, 9, 10, 11], 1),
        ({"where": "amount >= 12"}, [6, 8, 9, 10], 1),
        ({"where": "amount IS NULL AND region < 'b'"}, [3], 2),
        ({"where": "region > 'b' AND amount < 12"}, [4, 5], 2),
        ({"where": "ratio = 1"}, [4, 5, 7], 2),
        ({"where": "ratio != 1"}, [0, 1, 2, 3, 6, 8, 9, 10, 11], 0),
        ({"where": "NOT ratio < 5"}, [2, 6, 10], 0),
        ({"where": "day = '2026-01-01'"}, [], 3),
        ({"where": "day IS NULL AND region = 'asia'"}, [0, 1, 2, 3], 2),
        ({"key": "k21"}, [9], 2),
        ({"key": "k2"}, [], 3),
        ({"keyPrefix": "k0"}, [0, 1, 2, 3], 2),
        ({"keyPrefix": "k1", "where": "amount = 12"}, [6], 2),
    ],
)
def test_files_without_a_wanted_row_are_not_opened(
    run: TopicRun, read: list[tuple[str, int]], spec: dict[str, Any], offsets: list[int], files: int
) -> None:
    assert sift(run, **spec) == offsets
    counts = run.reader.skipping.to_dict()
    assert counts["files_skipped"] == files
    opened = {first for _, first in read}
    assert len(opened) == 3 - files


def test_headers_are_looked_up_in_footers(bench: Bench, read: list[tuple[str, int]]) -> None:
    log = bench.log()
    run = bench.topic(TopicSpec(), log)
    for kind in ("paid", "sent"):
        batch = message_batch(TopicSpec(), [b"1", b"2"])
        headers = pa.array([[("kind", kind)], None], batch.schema.field("tw_headers").type)
        at = batch.schema.get_field_index("tw_headers")
        log.append(batch.set_column(at, batch.schema.field(at), headers))
        bench.flush(run, log)
    assert sift(run, end=4, headers={"kind": "sent"}) == [2]
    assert {first for _, first in read} == {2}
    assert run.reader.skipping.to_dict()["row_groups_skipped"] == 1
    read.clear()
    assert sift(run, end=4, headers={"area": "sent"}) == []
    assert not read


def test_other_columns_are_read_only_where_a_row_is_wanted(
    run: TopicRun, read: list[tuple[str, int]]
) -> None:
    """Bounds of the second file allow `note 11x`, and no row has it."""
    assert sift(run, where="note = 'note 11x' OR region = 'asia'") == [0, 1, 2, 3]
    assert {name for name, first in read if first == 4} == {
        "tw_partition", "tw_offset", "region", "note",
    }  # fmt: skip
    assert {name for name, first in read if first == 0} >= {"amount", "tw_headers"}
    assert not [first for _, first in read if first == 8]


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_any_part_of_shuffled_files(
    bench: Bench, run: TopicRun, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sift_module, "WINDOW_ROWS_MAX", window)
    for _ in range(2):
        for start in range(ROWS):
            for end in (start + 1, (start + ROWS) // 2 + 1, ROWS):
                wanted = [o for o in (1, 4, 5, 6, 7) if start <= o < end]
                assert sift(run, start, end, where="region = 'europe' OR amount = 1") == wanted
        compact(bench.table())
        refresh(run)


def test_what_is_not_there_is_not_taken_for_unwanted(bench: Bench, run: TopicRun) -> None:
    """G7: whatever hides the rest, a row that is missing or doubled is said."""
    table = bench.table()
    whole = table.scan().to_arrow().sort_by("tw_offset")
    specs: list[dict[str, Any]] = [
        {"where": "region = 'africa'"}, {"key": "k00"}, {"where": "region = 'asia'"},
    ]  # fmt: skip
    for spec in specs:
        for row in (4, 7, ROWS - 1):
            rewrite(bench.table(), pa.concat_tables([whole[:row], whole[row + 1 :]]))
            refresh(run)
            with pytest.raises(Corrupt, match=f"offset {row} .*not in the table"):
                sift(run, **spec)
        rewrite(bench.table(), pa.concat_tables([whole, whole[5:6]]))
        refresh(run)
        with pytest.raises(Corrupt, match=r"offset 5 .*twice"):
            sift(run, **spec)


@pytest.mark.parametrize("lost", range(3))
def test_a_file_that_is_missing_is_not_taken_for_one_that_is_skipped(
    bench: Bench, run: TopicRun, lost: int
) -> None:
    table = bench.table()
    (path,) = [
        task.file.file_path
        for task in table.scan(row_filter=f"tw_offset = {lost * 4}").plan_files()
    ]
    with table.transaction() as change, change.update_snapshot().overwrite() as overwrite:
        for task in table.scan().plan_files():
            if task.file.file_path == path:
                overwrite.delete_data_file(task.file)
    refresh(run)
    for region in (*REGIONS, "africa"):
        with pytest.raises(Corrupt, match=f"offset {lost * 4} .*not in the table"):
            sift(run, where=f"region = '{region}'")


def test_files_of_several_partitions_are_accounted_for(
    bench: Bench, read: list[tuple[str, int]]
) -> None:
    """Small partitions share row groups: their offsets are read, and nothing else."""
    logs = [bench.log(0), bench.log(1)]
    run = bench.topic(TopicSpec(), *logs)
    for number in range(3):
        for log in logs:
            keys = [f"k{number}".encode()] * 2
            log.append(message_batch(TopicSpec(), [b"1", b"2"], keys=keys))
        bench.flush(run, *logs)
    assert sift(run, end=6, key="k1") == [2, 3]
    groups = [name for name, _ in read]
    assert groups.count("tw_offset") == 3
    assert groups.count("value") == 1, "of the others only the offsets"
    table = bench.table()
    rewrite(table, table.scan("tw_partition = 1 or tw_offset != 4").to_arrow())
    refresh(run)
    with pytest.raises(Corrupt, match="offset 4 of partition 0"):
        sift(run, end=6, key="k1")


def replace(table: Table, rows: pa.Table, *, statistics: bool, bounds: dict[int, Any]) -> None:
    """Put all rows into one file, with such statistics and bounds as another engine has."""
    plan = plan_files(table)
    rows = conform(rows, {name: name for name in rows.column_names}, plan.shape.arrow)
    location = f"{table.location()}/data/foreign-{uuid4()}.parquet"
    encoded = pa.BufferOutputStream()
    pq.write_table(rows, encoded, row_group_size=4, write_statistics=statistics)
    with plan.io.new_output(location).create() as sink:
        size = sink.write(encoded.getvalue().to_pybytes())
    file = DataFile.from_args(
        content=DataFileContent.DATA, file_path=location, file_format=FileFormat.PARQUET,
        partition=next(iter(table.scan().plan_files())).file.partition or Record(),
        file_size_in_bytes=size, record_count=rows.num_rows, sort_order_id=None, equality_ids=None,
        key_metadata=None, column_sizes={}, value_counts={}, null_value_counts={},
        nan_value_counts={}, split_offsets=None,
        lower_bounds={k: low for k, (low, _) in bounds.items()},
        upper_bounds={k: high for k, (_, high) in bounds.items()},
    )  # fmt: skip
    file.spec_id = plan.spec.spec_id
    with table.transaction() as change, change.update_snapshot().overwrite() as overwrite:
        for task in table.scan().plan_files():
            overwrite.delete_data_file(task.file)
        overwrite.append_data_file(file)


@pytest.mark.parametrize("statistics", [True, False])
def test_files_without_bounds_are_read(
    bench: Bench, run: TopicRun, read: list[tuple[str, int]], statistics: bool
) -> None:
    table = bench.table()
    rows = table.scan().to_arrow().sort_by("tw_offset")
    replace(table, rows, statistics=statistics, bounds={})
    refresh(run)
    assert sift(run, where="region = 'europe'") == [4, 5, 6, 7]
    counts = run.reader.skipping.to_dict()
    assert counts["files_skipped"] == 0
    assert counts["row_groups_skipped"] == (2 if statistics else 0)
    assert sift(run, keyPrefix="k2") == [8, 9, 10, 11]
    assert sift(run, where="ratio != 0") == [2, *range(4, ROWS)]


def test_bounds_that_nobody_can_read_are_no_bounds(bench: Bench, run: TopicRun) -> None:
    table = bench.table()
    rows = table.scan().to_arrow().sort_by("tw_offset")
    ids = {field.name: field.field_id for field in table.schema().fields}
    zero, eleven = (0).to_bytes(8, "little"), (ROWS - 1).to_bytes(8, "little")
    partition = (0).to_bytes(4, "little")
    replace(
        table, rows, statistics=False,
        bounds={
            ids["tw_partition"]: (partition, partition), ids["tw_offset"]: (zero, eleven),
            ids["region"]: (b"\xff\xfe", b"\xff"), ids["ratio"]: (b"\x01", b"\x02"),
            ids["day"]: (b"", b""), ids["amount"]: (b"", b""),
        },
    )  # fmt: skip
    refresh(run)
    assert sift(run, where="region = 'europe'") == [4, 5, 6, 7]
    assert sift(run, where="ratio > 1") == [8, 9, 11]
    assert sift(run, where="day = '2026-01-01'") == []
    assert sift(run, where="amount = 12") == [6]


def test_keys_longer_than_a_manifest_keeps(bench: Bench) -> None:
    """Bounds in manifests are cut after 16 bytes; what they leave open is read."""
    log = bench.log()
    run = bench.topic(TopicSpec(), log)
    keys = [b"customer-0000000000-" + name for name in (b"anna", b"ben")]
    for key in (*keys, b"\xff" * 20, b"customer-0000000000"):
        log.append(message_batch(TopicSpec(), [b"1", b"2"], keys=[key, key]))
        bench.flush(run, log)
    assert sift(run, end=8, key=keys[1].decode()) == [2, 3]
    assert sift(run, end=8, keyPrefix="customer-0000000000-") == [0, 1, 2, 3]
    assert sift(run, end=8, keyPrefix="customer") == [0, 1, 2, 3, 6, 7]
    assert sift(run, end=8, keyPrefix="customer-1") == []
    assert sift(run, end=8, key="customer-0000000") == []


def test_columns_that_came_later_are_null_before(bench: Bench, run: TopicRun) -> None:
    fields = [*FIELDS, {"name": "late", "type": "long"}]
    spec = TopicSpec.model_validate({"schema": {"fields": fields}})
    log = bench.log(first=ROWS)
    grown = bench.topic(spec, log, epoch=2)
    log.append(message_batch(spec, [{"late": 7}, {"late": None}]))
    bench.flush(grown, log)
    assert sift(grown, 0, ROWS + 2, where="late = 7") == [12]
    assert sift(grown, 0, ROWS + 2, where="late IS NULL") == [*range(ROWS), 13]
    assert sift(grown, 0, ROWS + 2, where="NOT late = 8") == [12]


def test_a_long_way_is_told_in_steps(run: TopicRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed over takes one answer, however far; what is read, one for each window."""
    spec = FilterSpec(where="region = 'oceania'")
    found = list(run.reader.sift(0, 0, ROWS, spec))
    assert [(each.start, each.end, each.rows.num_rows) for each in found] == [(0, 12, 4)]
    monkeypatch.setattr(sift_module, "WINDOW_ROWS_MAX", 2)
    monkeypatch.setattr(sift_module, "FILES_AHEAD_MAX", 0)
    found = list(run.reader.sift(0, 0, ROWS, spec))
    assert check(found, 0, ROWS) == [8, 9, 10, 11]
    assert [(each.start, each.end) for each in found] == [(0, 4), (4, 8), (8, 10), (10, 12)]


def test_files_removed_in_the_middle_are_found_in_the_newest_snapshot(
    bench: Bench, run: TopicRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sift_module, "WINDOW_ROWS_MAX", 2)
    answers = run.reader.sift(0, 0, ROWS, FilterSpec(where="region != 'europe'"))
    found = [next(answers)]
    table = bench.table()
    gone = [task.file.file_path for task in table.scan().plan_files()]
    compact(table)
    for path in gone:
        table.io.delete(path)
    found += answers
    assert check(found, 0, ROWS) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_file_that_is_needed_and_gone_is_said(bench: Bench, run: TopicRun) -> None:
    table = bench.table()
    (path,) = [t.file.file_path for t in table.scan(row_filter="tw_offset = 4").plan_files()]
    table.io.delete(path)
    with pytest.raises(Retryable, match="FileMissing"):
        sift(run, where="region = 'europe'")


def test_filters_that_cannot_be_read_are_refused(run: TopicRun) -> None:
    specs: list[dict[str, Any]] = [{"where": "colour = 'red'"}, {}]
    for spec in specs:
        with pytest.raises(Invalid, match="InvalidFilter"):
            sift(run, **spec)
