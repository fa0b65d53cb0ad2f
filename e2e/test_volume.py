"""A volume that runs full: producers are pushed back, and nothing acknowledged is lost."""

import pytest

from e2e import faults, guarantees
from e2e.kubectl import wait_for
from e2e.tenant import DATA_DIR, POOL, WORKER, WORKER_POD, Tenant, pool, wait_ready
from e2e.web import post
from tidewater_core.units import ByteSize
from tidewater_testing.web import Answer

pytestmark = pytest.mark.timeout(300)
# A local volume is as large as the node's disk. So the reserve that the worker keeps free is raised
# until little room is left, and more than that is filled: no disk runs full for anybody else.
ROOM_BYTES = ByteSize("3Gi")
FILLED_BYTES = ByteSize("5Gi")
FREE = "import os, sys; f = os.statvfs(sys.argv[1]); print(f.f_bavail * f.f_frsize)"


def _free_bytes(tenant: Tenant) -> int:
    return int(tenant.kubectl.python(WORKER_POD, FREE, DATA_DIR))


def _refused(tenant: Tenant, answers: list[Answer]) -> bool:
    """Send a message and tell whether it was refused: the free space is looked at now and then."""
    body = {"messages": [{"value": f"probe {len(answers)}"}]}
    answers.append(post(tenant.door, f"/v1/{tenant.topic}/messages", body))
    return answers[-1].status != 200


def test_full_volume_pushes_back_and_loses_nothing(tenant: Tenant) -> None:
    reserve = _free_bytes(tenant) - ROOM_BYTES
    before = tenant.kubectl.incarnation(WORKER_POD)
    with tenant.load("full-") as traffic:
        traffic.wait_for_more(300, 60)
        # Another limit is another setting: the operator restarts the worker with it.
        tenant.kubectl.apply([pool(1, limits={"diskReserveBytes": str(reserve)})])
        wait_for(lambda: tenant.kubectl.incarnation(WORKER_POD) != before, 90, "a new worker")
        tenant.kubectl.wait_ready(WORKER)
        traffic.wait_for_more(300, 60)
        leave = _free_bytes(tenant) - FILLED_BYTES
        with faults.filled_volume(tenant.kubectl, DATA_DIR, leave):
            answers: list[Answer] = []
            wait_for(lambda: _refused(tenant, answers), 30, "the worker to push back")
            guarantees.raise_all(list(guarantees.pushed_back(answers[-1])))
        traffic.wait_for_more(300, 60)
    wait_ready(tenant.kubectl, f"pool/{POOL}")
    guarantees.hold(tenant.history(traffic))
