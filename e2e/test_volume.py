"""Volumes: one that runs full pushes producers back; one that shall grow does, or says why not."""

import pytest

from e2e import faults, guarantees
from e2e.kubectl import Object, wait_for
from e2e.tenant import (
    DATA_DIR,
    POOL,
    WORKER,
    WORKER_POD,
    Tenant,
    conditions,
    pool,
    topic,
    wait_ready,
)
from e2e.web import post
from tidewater_core.units import ByteSize
from tidewater_testing.web import Answer

pytestmark = pytest.mark.timeout(420)
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
        wait_for(lambda: tenant.kubectl.incarnation(WORKER_POD) != before, 120, "a new worker")
        tenant.kubectl.wait_ready(WORKER)
        traffic.wait_for_more(300, 60)
        leave = _free_bytes(tenant) - FILLED_BYTES
        with faults.filled_volume(tenant.kubectl, DATA_DIR, leave):
            answers: list[Answer] = []
            wait_for(lambda: _refused(tenant, answers), 60, "the worker to push back")
            guarantees.raise_all(list(guarantees.pushed_back(answers[-1])))
        traffic.wait_for_more(300, 60)
    wait_ready(tenant.kubectl, f"pool/{POOL}")
    guarantees.hold(tenant.history(traffic))


# ---- growth

GROWING_CLASS = "e2e-growing"


def _told(tenant: Tenant, name: str) -> tuple[str, str]:
    found = conditions(tenant.kubectl, f"pool/{name}").get("VolumeGrown", {})
    return str(found.get("reason")), str(found.get("message"))


def _wait_told(tenant: Tenant, name: str, reason: str) -> str:
    said: list[str] = []

    def told() -> bool:
        found, message = _told(tenant, name)
        said.append(message)
        return found == reason

    wait_for(told, 90, f"pool {name} to say {reason}")
    return said[-1]


def _sizes(tenant: Tenant, name: str) -> tuple[set[str], str]:
    """Return what the claims of a pool ask for, and what its StatefulSet would ask for."""
    claims = tenant.kubectl.get("pvc", f"--selector=tidewater.dev/pool={name}")["items"]
    made = tenant.kubectl.get("statefulset", f"tidewater-{name}")["spec"]
    (template,) = made["volumeClaimTemplates"]
    asked = {str(each["spec"]["resources"]["requests"]["storage"]) for each in claims}
    return asked, str(template["spec"]["resources"]["requests"]["storage"])


def test_a_volume_that_cannot_grow_says_so_and_blocks_nothing(tenant: Tenant) -> None:
    """The class has no expansion: what else the same change asks for is done all the same."""
    before = tenant.kubectl.incarnation(WORKER_POD)
    larger = pool(1, podAnnotations={"e2e": "grown"})
    tenant.kubectl.apply([{**larger, "spec": {**larger["spec"], "storage": {"size": "2Gi"}}}])
    said = _wait_told(tenant, POOL, "NotExpandable")
    assert f"data-{WORKER_POD}" in said
    assert "resize" in said
    wait_for(lambda: tenant.kubectl.incarnation(WORKER_POD) != before, 120, "a new worker")
    tenant.kubectl.wait_ready(WORKER)
    wait_ready(tenant.kubectl, f"pool/{POOL}", "topic/orders")
    # Workers to come get the new size.
    wait_for(lambda: _sizes(tenant, POOL) == ({"1Gi"}, "2Gi"), 60, "the claim as it was")


def test_a_volume_grows_without_a_restart_and_never_shrinks(tenant: Tenant) -> None:
    """Claims and template are changed around the pod; here nobody enlarges the disk: it waits."""
    kubectl = tenant.kubectl
    kubectl.apply([_growing_class()])
    storage = {"size": "1Gi", "storageClass": GROWING_CLASS}
    grower = {**pool(1), "metadata": {"name": "grower"}}
    grower["spec"] = {"replicas": 1, "storage": storage}
    kubectl.apply([grower, topic("grown", partitions=1, pool="grower")])
    wait_ready(kubectl, "pool/grower", "topic/grown")
    uid = _grower(tenant)["uid"]
    grower["spec"] = {"replicas": 1, "storage": {**storage, "size": "2Gi"}}
    kubectl.apply([grower])
    said = _wait_told(tenant, "grower", "Growing")
    assert "data-tidewater-grower-0 has 1Gi" in said
    wait_for(lambda: _sizes(tenant, "grower") == ({"2Gi"}, "2Gi"), 60, "all to ask for 2Gi")
    wait_ready(kubectl, "pool/grower", "topic/grown")
    assert _grower(tenant)["uid"] == uid
    wait_for(lambda: bool(_grower(tenant).get("ownerReferences")), 60, "the pod to have an owner")
    assert _grower(tenant)["uid"] == uid
    grower["spec"] = {"replicas": 1, "storage": storage}
    kubectl.apply([grower])
    _wait_told(tenant, "grower", "CannotShrink")
    assert _sizes(tenant, "grower") == ({"2Gi"}, "2Gi")
    wait_ready(kubectl, "pool/grower", "topic/grown")


def _grower(tenant: Tenant) -> Object:
    metadata: Object = tenant.kubectl.get("pod", "tidewater-grower-0")["metadata"]
    return metadata


def _growing_class() -> Object:
    """Return the cluster's default class with expansion allowed; its provisioner never does it."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": GROWING_CLASS},
        "provisioner": "rancher.io/local-path",
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": True,
    }
