"""The node under a worker goes away and comes back."""

import pytest

from e2e import faults, guarantees
from e2e.conftest import Worker
from e2e.install import PARTS_NAMESPACE, WORKER, WORKER_POD

pytestmark = pytest.mark.timeout(420)


def test_node_restarted_under_load(worker: Worker) -> None:
    node = worker.kubectl.node_of(WORKER_POD)
    before = worker.kubectl.incarnation(WORKER_POD)
    with worker.load("restart-") as traffic:
        traffic.wait_for_more(500, 60)
        faults.restart_node(worker.kubectl, node)
        _wait_for_all(worker)
        traffic.wait_for_more(500, 120)
    assert worker.kubectl.incarnation(WORKER_POD) != before
    guarantees.hold(worker.history(traffic))


def test_node_drained_under_load(worker: Worker) -> None:
    node = worker.kubectl.node_of(WORKER_POD)
    before = worker.kubectl.incarnation(WORKER_POD)
    with worker.load("drain-") as traffic:
        traffic.wait_for_more(300, 60)
        with faults.drained_node(worker.kubectl, node):
            pass  # the volume is on that node: the worker waits for it
        _wait_for_all(worker)
        traffic.wait_for_more(300, 120)
    assert worker.kubectl.incarnation(WORKER_POD) != before
    guarantees.hold(worker.history(traffic))


def _wait_for_all(worker: Worker) -> None:
    """Wait for the worker and for the parts that may have been on the same node."""
    parts = worker.kubectl.within(PARTS_NAMESPACE)
    for part in ("statefulset/etcd", "statefulset/seaweedfs"):
        parts.wait_ready(part, timeout_s=180)
    worker.kubectl.wait_ready(WORKER, timeout_s=180)
