"""The node under a worker dies and comes back; `test_storm` drains one."""

import pytest

from e2e import faults, guarantees
from e2e.install import ETCD, OPERATOR, SEAWEEDFS, System
from e2e.tenant import WORKER, WORKER_POD, Tenant

pytestmark = pytest.mark.timeout(420)


def test_node_restarted_under_load(tenant: Tenant, system: System) -> None:
    node = tenant.kubectl.node_of(WORKER_POD)
    before = tenant.kubectl.incarnation(WORKER_POD)
    with tenant.load("restart-") as traffic:
        traffic.wait_for_more(500, 60)
        faults.restart_node(tenant.kubectl, node)
        _wait_for_all(tenant, system)
        traffic.wait_for_more(500, 120)
    assert tenant.kubectl.incarnation(WORKER_POD) != before
    guarantees.hold(tenant.history(traffic))


def _wait_for_all(tenant: Tenant, system: System) -> None:
    """Wait for the worker and for the parts that may have been on the same node."""
    for part in (ETCD, SEAWEEDFS, OPERATOR):
        system.kubectl.wait_ready(part, timeout_s=180)
    tenant.kubectl.wait_ready(WORKER, timeout_s=180)
