"""The worker on a real REST catalog and object store, which come and go."""

import time

import pytest

from e2e import faults, guarantees
from e2e.conftest import PARTITIONS, Worker
from e2e.history import flush
from e2e.install import Parts
from e2e.web import expect, post
from tidewater_testing.evidence import load_table

pytestmark = pytest.mark.timeout(300)
AWAY_S = 20.0


def test_rows_are_in_the_table_after_a_flush(worker: Worker) -> None:
    messages = [{"key": f"k{i}", "value": f"row {i}"} for i in range(100)]
    expect(post(worker.address, f"/v1/{worker.topic}/messages", {"messages": messages}))
    snapshot_id = flush(worker.address, worker.topic)
    table = load_table(worker.catalog, worker.topic)
    rows = table.scan(snapshot_id=snapshot_id).to_arrow()
    assert sorted(rows["value"].to_pylist()) == sorted(each["value"].encode() for each in messages)
    assert set(rows["tw_partition"].to_pylist()) <= set(range(PARTITIONS))
    assert table.properties["tidewater.partition.0"]


def test_catalog_stopped_under_load(worker: Worker, parts: Parts) -> None:
    """Producing goes on without the catalog; what was acknowledged lands when it is back."""
    with worker.load("catalog-") as traffic:
        traffic.wait_for_more(300, 60)
        with faults.stopped_part(parts.kubectl, "statefulset/seaweedfs"):
            traffic.wait_for_more(300, 60)
            time.sleep(AWAY_S)
            traffic.wait_for_more(300, 60)
        traffic.wait_for_more(300, 60)
    guarantees.hold(worker.history(traffic))


def test_etcd_stopped_under_load(worker: Worker, parts: Parts) -> None:
    with worker.load("etcd-") as traffic:
        traffic.wait_for_more(200, 60)
        with faults.stopped_part(parts.kubectl, "statefulset/etcd"):
            traffic.wait_for_more(200, 60)
        traffic.wait_for_more(200, 60)
    guarantees.hold(worker.history(traffic))
