"""The worker on a real REST catalog and object store."""

import pytest

from e2e.history import flush
from e2e.tenant import PARTITIONS, Tenant
from e2e.web import expect, post
from tidewater_testing import duck
from tidewater_testing.evidence import load_table

pytestmark = pytest.mark.timeout(300)


def test_rows_are_in_the_table_after_a_flush(tenant: Tenant) -> None:
    """Read by pyiceberg, and by DuckDB, which shares no code with what wrote them."""
    messages = [{"key": f"k{i}", "value": f"row {i}"} for i in range(100)]
    expect(post(tenant.door, f"/v1/{tenant.topic}/messages", {"messages": messages}))
    snapshot_id = flush(tenant.door, tenant.topic)
    table = load_table(tenant.catalog, tenant.topic)
    rows = table.scan(snapshot_id=snapshot_id).to_arrow()
    assert sorted(rows["value"].to_pylist()) == sorted(each["value"].encode() for each in messages)
    assert set(rows["tw_partition"].to_pylist()) <= set(range(PARTITIONS))
    assert table.properties["tidewater.partition.0"]
    counted = duck.query(
        "select count(*), count(distinct value) from {table}", table, tenant.catalog
    )
    assert counted == [(100, 100)]
