"""What a job reads off a table's metadata file: here one that pyiceberg wrote."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.types import IntegerType, LongType, NestedField, TimestamptzType

from tidewater_pipeline.metadata import state_of
from tidewater_pipeline.state import Size

SCHEMA = Schema(
    NestedField(1, "tw_partition", IntegerType()),
    NestedField(2, "tw_offset", LongType()),
    NestedField(7, "tw_time", TimestamptzType()),
)
ORDER = SortOrder(
    SortField(1, transform=IdentityTransform()), SortField(2, transform=IdentityTransform())
)
DAYS = PartitionSpec(PartitionField(7, 1000, DayTransform(), "day"))
NAME = ("shop", "orders")


@pytest.fixture
def catalog(tmp_path: Path) -> InMemoryCatalog:
    catalog = InMemoryCatalog("test", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    return catalog


def read(table: Table) -> dict[str, Any]:
    path = table.metadata_location.removeprefix("file://")
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def test_an_empty_table(catalog: InMemoryCatalog) -> None:
    table = catalog.create_table(NAME, SCHEMA, partition_spec=DAYS, sort_order=ORDER)
    state = state_of(NAME, read(table))
    assert (state.identifier, state.location) == (NAME, table.location())
    assert state.snapshot_id is None
    assert (state.snapshots, state.refs, state.size) == ((), {}, Size())
    assert state.time_unit == "day"
    time_id = table.schema().find_field("tw_time").field_id
    assert state.time_id == time_id
    assert state.sort_order == ("tw_partition", "tw_offset")
    assert state.is_partitioned


def test_snapshots_and_refs(catalog: InMemoryCatalog) -> None:
    table = catalog.create_table(NAME, SCHEMA, properties={"tidewater.start.0": "4"})
    rows = pa.table({"tw_partition": [0, 0], "tw_offset": [4, 5], "tw_time": [1, 2]}).cast(
        table.schema().as_arrow()
    )
    table.append(rows)
    table.append(rows)
    first, second = table.snapshots()
    table.manage_snapshots().create_tag(first.snapshot_id, "month-close").commit()
    state = state_of(NAME, read(table), manifests=2)
    assert [each.snapshot_id for each in state.snapshots] == [first.snapshot_id, second.snapshot_id]
    assert [each.timestamp_ms for each in state.snapshots] == [
        first.timestamp_ms,
        second.timestamp_ms,
    ]
    assert state.snapshot_id == second.snapshot_id
    assert state.refs == {"main": second.snapshot_id, "month-close": first.snapshot_id}
    assert (state.size.files, state.size.rows, state.size.snapshots) == (2, 4, 2)
    assert state.size.nbytes > 0
    assert state.size.manifests == 2
    assert state.properties["tidewater.start.0"] == "4"
    assert (state.time_unit, state.sort_order, state.is_partitioned) == (None, (), False)


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "desc"},
        {"transform": "bucket[16]"},
        {"source-id": 99},  # a field within another
    ],
)
def test_an_order_that_is_not_simply_ascending_is_none(
    catalog: InMemoryCatalog, change: dict[str, Any]
) -> None:
    metadata = read(catalog.create_table(NAME, SCHEMA, sort_order=ORDER))
    (order,) = [each for each in metadata["sort-orders"] if each["fields"]]
    order["fields"][1] |= change
    assert state_of(NAME, metadata).sort_order == ()


def test_no_snapshot_as_older_versions_write_it(catalog: InMemoryCatalog) -> None:
    metadata = read(catalog.create_table(NAME, SCHEMA))
    assert state_of(NAME, metadata | {"current-snapshot-id": -1}).snapshot_id is None
