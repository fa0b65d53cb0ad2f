"""The worker on a real REST catalog and object store, and Spark pods on a table it writes."""

import json

import pytest

from e2e import guarantees
from e2e.history import flush
from e2e.install import CATALOG_URI, S3_URI
from e2e.tenant import PARTITIONS, Tenant, run_job
from e2e.web import produce
from tidewater_testing import duck
from tidewater_testing.evidence import load_table

pytestmark = pytest.mark.timeout(600)


def test_rows_are_in_the_table_after_a_flush(tenant: Tenant) -> None:
    """Read by pyiceberg, and by DuckDB, which shares no code with what wrote them."""
    messages = [{"key": f"k{i}", "value": f"row {i}"} for i in range(100)]
    topic = f"{tenant.kubectl.namespace}/visits"  # the other one is Spark's
    produce(tenant.door, topic, messages)
    snapshot_id = flush(tenant.door, topic)
    table = load_table(tenant.catalog, topic)
    rows = table.scan(snapshot_id=snapshot_id).to_arrow()
    assert sorted(rows["value"].to_pylist()) == sorted(each["value"].encode() for each in messages)
    assert set(rows["tw_partition"].to_pylist()) <= set(range(PARTITIONS))
    assert table.properties["tidewater.partition.0"]
    counted = duck.query(
        "select count(*), count(distinct value) from {table}", table, tenant.catalog
    )
    assert counted == [(100, 100)]


def test_pipeline_rewrites_files_under_load(tenant: Tenant, tag: str, pipeline_image: str) -> None:
    """Spark reads every row once, and its rewrite takes nothing from the stream or the table."""
    environment = {
        "TOPIC": tenant.topic,
        "CATALOG_URI": CATALOG_URI,
        "S3_URI": S3_URI,
        "IMAGE": pipeline_image,
    }
    with tenant.load("spark-") as traffic:
        produced = traffic.wait_for_more(1_000, 60)
        flush(tenant.door, tenant.topic)
        printed = run_job(tenant.kubectl, "pipeline", tag, environment)
        traffic.wait_for_more(200, 60)
    line = next(each for each in printed.splitlines() if each.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    for rows, places in (result["before"], result["after"]):
        assert rows == places >= produced
    assert result["files"] >= 1
    assert result["numbers"] == sum(n * n for n in range(100))
    guarantees.hold(tenant.history(traffic))
