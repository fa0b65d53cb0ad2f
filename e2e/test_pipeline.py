"""The pipeline image: a Spark driver and an executor as pods, on a table that a worker writes."""

import json

import pytest

from e2e import guarantees
from e2e.history import flush
from e2e.install import CATALOG_URI, S3_URI
from e2e.tenant import Tenant, run_job

pytestmark = pytest.mark.timeout(420)


def test_spark_rewrites_files_under_load(tenant: Tenant, tag: str) -> None:
    """Spark reads every row once, and its rewrite takes nothing from the stream or the table."""
    environment = {
        "TOPIC": tenant.topic,
        "CATALOG_URI": CATALOG_URI,
        "S3_URI": S3_URI,
        "IMAGE": f"tidewater-pipeline:{tag}",
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
