"""A filter means the same row by row, in bulk and by statistics (G4).

Drawn conditions on drawn rows: the vectorised answer is that of a reference written down in plain
Python, message by message; and wherever a row is wanted, neither the bounds in a manifest (cut
after 16 bytes) nor the statistics in a footer may rule it out.
"""

import io
import math
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import data_file_statistics_from_parquet_metadata
from pyiceberg.manifest import DataFile

from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.filters.wanted import make_filter
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.table.facts import (
    FileColumns,
    bounds_by_id,
    facts_of_file,
    facts_of_group,
)
from tidewater_worker.table.layout import iceberg_schema
from tidewater_worker.table.row_groups import columns_by_name
from tidewater_worker.table.shape import shape_of

SPEC = TopicSpec.model_validate(
    {
        "schema": {
            "fields": [
                {"name": "n", "type": "long"},
                {"name": "i", "type": "int"},
                {"name": "x", "type": "double"},
                {"name": "f", "type": "float"},
                {"name": "s", "type": "string"},
                {"name": "d", "type": "decimal(20,2)"},
                {"name": "day", "type": "date"},
                {"name": "ok", "type": "boolean"},
            ]
        }
    }
)
SCHEMA = table_arrow_schema(SPEC)
TABLE = iceberg_schema(SPEC)
SHAPE = shape_of(TABLE, {})

LONG = "a" * 16
"""As much of a text as a manifest keeps."""
texts = st.sampled_from(
    ["", "a", "b", LONG, LONG + "x", LONG + "y", LONG[:-1] + "b", "é", "\U0010ffff" * 17]
)
numbers = st.sampled_from([-(2**53) - 1, -2, -1, 0, 1, 2, 5, 2**31 - 1, 2**53, 2**53 + 1])
floats = st.sampled_from([-1.5, -0.0, 0.0, 1.0, 2.5, 1e300, math.inf, -math.inf, math.nan])
keys = st.sampled_from([b"", b"a", b"b", LONG.encode(), LONG.encode() + b"x", b"\xff" * 17])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": numbers,
    "i": st.sampled_from([-2, -1, 0, 1, 2, 2**31 - 1]),
    "x": floats,
    "f": floats.filter(lambda x: abs(x) != 1e300),
    "s": texts,
    "d": st.sampled_from([Decimal(t) for t in ("-1.5", "0", "1", "1.01", "99999999.99")]),
    "day": st.sampled_from([date(1969, 12, 31), date(1970, 1, 1), date(2026, 1, 31)]),
    "ok": st.booleans(),
}
OPERATORS = ("=", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Leaf:
    """`column op value`, or IS NULL if there is no operator."""

    column: str
    op: str
    value: Any


Tree = Any
"""A leaf, or a word and its parts."""


def leaves() -> st.SearchStrategy[Leaf]:
    def of(column: str) -> st.SearchStrategy[Leaf]:
        value = VALUES[column]
        if column in ("n", "i"):
            value = st.one_of(value, st.sampled_from([Decimal("0.5"), Decimal("2.0"), 10**25]))
        if column in ("x", "f"):
            value = value.filter(math.isfinite)
        return st.one_of(
            st.builds(Leaf, st.just(column), st.sampled_from(OPERATORS), value),
            st.just(Leaf(column, "", None)),
        )

    return st.sampled_from(sorted(VALUES)).flatmap(of)


trees: st.SearchStrategy[Tree] = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.tuples(st.just("NOT"), inner),
        st.tuples(st.sampled_from(["AND", "OR"]), inner, inner),
    ),
    max_leaves=6,
)


def written(tree: Tree) -> str:
    """Write a condition down."""
    if isinstance(tree, Leaf):
        if not tree.op:
            return f"{tree.column} IS NULL"
        return f"{tree.column} {tree.op} {literal(tree.column, tree.value)}"
    if tree[0] == "NOT":
        return f"NOT ({written(tree[1])})"
    return f"({written(tree[1])}) {tree[0]} ({written(tree[2])})"


def literal(column: str, value: Any) -> str:
    if column in ("s", "day"):
        return f"'{value}'"
    if column == "ok":
        return str(value).upper()
    return format(value, "f") if isinstance(value, Decimal) else repr(value)


def judged(tree: Tree, row: dict[str, Any]) -> bool | None:
    """Say what a condition is for one message: the reference."""
    if isinstance(tree, Leaf):
        value = row[tree.column]
        if not tree.op:
            return value is None
        if value is None:
            return None
        compare = {
            "=": value == tree.value, "!=": value != tree.value, "<": value < tree.value,
            "<=": value <= tree.value, ">": value > tree.value, ">=": value >= tree.value,
        }  # fmt: skip
        return bool(compare[tree.op])
    first = judged(tree[1], row)
    if tree[0] == "NOT":
        return None if first is None else not first
    second = judged(tree[2], row)
    decisive = bool(tree[0] == "OR")
    if decisive in (first, second):
        return decisive
    return None if None in (first, second) else not decisive


headers = st.one_of(
    st.none(),
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "x", "y"])), max_size=3),
)
rows_of = st.lists(
    st.fixed_dictionaries(
        {
            **{name: st.one_of(st.none(), values) for name, values in VALUES.items()},
            "tw_key": st.one_of(st.none(), keys),
            "tw_headers": headers,
        }
    ),
    min_size=1,
    max_size=6,
)
specs = st.builds(
    lambda key, prefix, named, tree: (key, prefix, named, tree),
    st.one_of(st.none(), st.sampled_from(["", "a", LONG, LONG + "x"])),
    st.one_of(st.none(), st.sampled_from(["a", "b", LONG, LONG + "x", LONG[:-1] + "b"])),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "x", "y"]), max_size=2),
    st.one_of(st.none(), trees),
)


def is_wanted(spec: tuple[Any, ...], row: dict[str, Any]) -> bool:
    key, prefix, named, tree = spec
    has = dict(row["tw_headers"] or ())
    return (
        (key is None or row["tw_key"] == key.encode())
        and (prefix is None or (row["tw_key"] or b"").startswith(prefix.encode()))
        and all(has.get(name) == value for name, value in named.items())
        and (tree is None or judged(tree, row) is True)
    )


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"tw_partition": 0, "tw_offset": i, "tw_time": 0, **row} for i, row in enumerate(rows)],
        SCHEMA,
    )


@settings(max_examples=400, deadline=None)
@given(rows_of, specs)
def test_row_by_row_in_bulk_and_by_statistics(
    rows: list[dict[str, Any]], spec: tuple[Any, ...]
) -> None:
    key, prefix, named, tree = spec
    where = None if tree is None else written(tree)
    wanted = make_filter(FilterSpec(key=key, key_prefix=prefix, headers=named, where=where), SPEC)
    expected = [is_wanted(spec, row) for row in rows]
    if wanted is None:
        assert all(expected)
        return
    batch = batch_of(rows)
    assert wanted.mask(batch).to_pylist() == expected, where
    assert wanted.keep(batch)["tw_offset"].to_pylist() == [
        i for i, found in enumerate(expected) if found
    ]
    if any(expected):
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_batches([batch]).cast(SHAPE.arrow), sink, row_group_size=3)
        footer = pq.read_metadata(sink)
        assert by_manifest(footer).may(wanted), "G4: bounds in a manifest hide a wanted message"
        columns = FileColumns.of(
            footer, columns_by_name(footer.schema.to_arrow_schema(), TABLE, SCHEMA)
        )
        for at in range(footer.num_row_groups):
            facts = facts_of_group(footer.row_group(at), columns, SCHEMA)
            may = wanted.may_match(facts)
            assert may or not any(expected[3 * at : 3 * at + 3]), "G4: so do those in a footer"


@dataclass(frozen=True)
class ByManifest:
    """What a manifest would tell of a file."""

    file: DataFile

    def may(self, wanted: Any) -> bool:
        facts = facts_of_file(bounds_by_id(self.file, without=()), TABLE, SCHEMA)
        return bool(wanted.may_match(facts))


def by_manifest(footer: pq.FileMetaData) -> ByManifest:
    found = data_file_statistics_from_parquet_metadata(
        parquet_metadata=footer,
        stats_columns=dict(SHAPE.statistics),
        parquet_column_mapping=dict(SHAPE.paths),
    )
    return ByManifest(DataFile.from_args(**found.to_serialized_dict()))
