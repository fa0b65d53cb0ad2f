"""A filtered read is the whole read, filtered afterwards: however the files lie (G3, G4, G7).

Rows of two partitions are committed in drawn portions and then rewritten by somebody else into
drawn files: mixed, in any order, some with bounds and some without. A row that is missing or
doubled then is found by whatever filter reads over it.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.table import Table

from table_bench import Bench
from table_fakes import message_batch
from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt
from tidewater_worker.filters.wanted import make_filter
from tidewater_worker.table import files as files_module
from tidewater_worker.table import sift as sift_module
from tidewater_worker.table.files import FileSet, plan_files
from tidewater_worker.table.row_groups import conform
from tidewater_worker.table.topic import TopicRun

FIELDS = [{"name": "n", "type": "long"}, {"name": "s", "type": "string"}]
SPEC = TopicSpec.model_validate({"partitions": 2, "schema": {"fields": FIELDS}})
LETTERS = "abcd"
FILTERS = [
    FilterSpec(key="b"),
    FilterSpec(key_prefix="c"),
    FilterSpec(where="n = 5"),
    FilterSpec(where="n >= 8 OR s = 'a'"),
    FilterSpec(where="NOT n < 9"),
    FilterSpec(where="s IS NULL"),
    FilterSpec(key="d", where="n > 2"),
    FilterSpec(where="n > 1000"),
]

message = st.tuples(
    st.one_of(st.none(), st.sampled_from(LETTERS)),
    st.one_of(st.none(), st.integers(0, 3)),
    st.one_of(st.none(), st.sampled_from(LETTERS)),
)
commits = st.lists(
    st.tuples(st.lists(message, min_size=1, max_size=6), st.lists(message, max_size=6)),
    min_size=1,
    max_size=4,
)


def fill(bench: Bench, portions: list[Any]) -> TopicRun:
    """Commit portions; the number rises with the offset, more or less."""
    logs = [bench.log(0), bench.log(1)]
    run = bench.topic(SPEC, *logs)
    for portion in portions:
        for log, messages in zip(logs, portion, strict=True):
            if messages:
                rows: list[bytes | dict[str, object]] = [
                    {"n": None if n is None else log.end + n, "s": s} for _, n, s in messages
                ]
                keys = [None if key is None else key.encode() for key, _, _ in messages]
                log.append(message_batch(SPEC, rows, keys=keys))
        bench.flush(run, *logs)
    return run


def scatter(table: Table, parts: list[pa.Table], group_rows: int) -> None:
    """Replace all files by these, as another engine might."""
    plan = plan_files(table)
    made = []
    for part in parts:
        files = FileSet(plan, uuid4(), 1 << 30)
        for at in range(0, part.num_rows, group_rows):
            rows = part.slice(at, group_rows)
            rows = conform(rows, {name: name for name in rows.column_names}, plan.shape.arrow)
            files.add(at, rows, 1)
        made += files.finish()
    with table.transaction() as change, change.update_snapshot().overwrite() as overwrite:
        for task in table.scan().plan_files():
            overwrite.delete_data_file(task.file)
        for file in made:
            overwrite.append_data_file(file)


@contextmanager
def small(window: int, ahead: int) -> Iterator[None]:
    with (
        patch.object(sift_module, "WINDOW_ROWS_MAX", window),
        patch.object(sift_module, "FILES_AHEAD_MAX", ahead),
        patch.object(files_module, "ROW_GROUP_ROWS_MIN", 1),
    ):
        yield


def compare(run: TopicRun, partition: int, start: int, end: int, spec: FilterSpec) -> None:
    wanted = make_filter(spec, SPEC)
    assert wanted is not None
    expected = [
        row
        for batch in run.reader.read(partition, start, end, 1 << 40)
        for row in wanted.keep(batch).to_pylist()
    ]
    found, at = [], start
    for sifted in run.reader.sift(partition, start, end, spec):
        assert sifted.start == at, f"G3 One stream: {sifted.start} follows {at}"
        at = sifted.end
        found += sifted.rows.to_pylist()
    assert found == expected, f"G4: {spec} from {start} to {end}"
    assert at == max(end, start)


@settings(max_examples=40, deadline=None)
@given(
    portions=commits,
    data=st.data(),
    window=st.sampled_from([1, 3, 1000]),
    ahead=st.sampled_from([0, 16]),
)
def test_filtered_is_the_whole_filtered(
    portions: list[Any], data: st.DataObject, window: int, ahead: int
) -> None:
    with TemporaryDirectory() as folder, small(window, ahead):
        bench = Bench(Path(folder))
        run = fill(bench, portions)
        ends = [sum(len(portion[p]) for portion in portions) for p in range(2)]
        for spec in FILTERS:
            compare(run, 0, 0, ends[0], spec)
        table = bench.table()
        rows = table.scan().to_arrow()
        parts = drawn_parts(data, rows)
        damage = data.draw(st.sampled_from(["none", "none", "missing", "doubled"]))
        partition, offset = 0, data.draw(st.integers(0, ends[0] - 1))
        victim = next(
            (number, at)
            for number, part in enumerate(parts)
            for at, row in enumerate(part.to_pylist())
            if (row["tw_partition"], row["tw_offset"]) == (partition, offset)
        )
        parts = damaged(parts, victim, damage, data)
        if data.draw(st.booleans()):
            with table.transaction() as change:
                change.set_properties({"write.metadata.metrics.default": "none"})
            table = bench.table()
        scatter(table, [part for part in parts if part.num_rows], data.draw(st.integers(1, 5)))
        run._view = None
        run.reader.view(newest=True)
        for spec in FILTERS:
            if damage == "none":
                start = data.draw(st.integers(0, ends[0]))
                compare(run, 0, start, ends[0], spec)
                compare(run, 1, 0, ends[1], spec)
            else:
                with pytest.raises(Corrupt, match=f"offset {offset} of partition 0"):
                    list(run.reader.sift(0, 0, ends[0], spec))
        bench.catalog.close()


def drawn_parts(data: st.DataObject, rows: pa.Table) -> list[pa.Table]:
    """Deal rows out over files: sorted portions, or any."""
    rows = rows.sort_by([("tw_partition", "ascending"), ("tw_offset", "ascending")])
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(range(rows.num_rows)))
        rows = rows.take(order)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(rows.num_rows - 1, 1)), max_size=4)))
    bounds = [0, *cuts, rows.num_rows]
    return [rows.slice(a, b - a) for a, b in itertools.pairwise(bounds)]


def damaged(
    parts: list[pa.Table], victim: tuple[int, int], damage: str, data: st.DataObject
) -> list[pa.Table]:
    """Take a row away, or put it into some file once more."""
    number, at = victim
    part = parts[number]
    parts = list(parts)
    if damage == "missing":
        parts[number] = pa.concat_tables([part.slice(0, at), part.slice(at + 1)])
    elif damage == "doubled":
        other = data.draw(st.integers(0, len(parts) - 1))
        parts[other] = pa.concat_tables([parts[other], part.slice(at, 1)])
    return parts
