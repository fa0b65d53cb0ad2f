"""`helm uninstall` leaves the data, and an install over it finds everything again."""

import pytest

from e2e.history import read_partition
from e2e.install import System, install_chart, uninstall_chart
from e2e.kubectl import Kubectl, wait_for
from e2e.tenant import PARTITIONS, Tenant, is_ready, wait_ready
from e2e.web import produce

pytestmark = pytest.mark.timeout(600)


def test_uninstall_and_install_again(tenant: Tenant, system: System) -> None:
    values = sorted(f"before {n}" for n in range(50))
    produce(tenant.door, tenant.topic, [{"key": value, "value": value} for value in values])
    uninstall_chart(system.kubectl)
    try:
        of_release = "--selector=app.kubernetes.io/managed-by=Helm"
        kinds = "deployments,statefulsets,services"
        wait_for(lambda: not system.kubectl.get(kinds, of_release)["items"], 60, "all to go")
        # What users made is theirs, and runs on.
        assert tenant.workers()
        assert len(tenant.kubectl.get("topics")["items"]) == 2
        # Nobody is needed to let one go.
        tenant.kubectl("delete", "topic/visits", "--timeout=90s")
    finally:
        again = install_chart(system.kubectl, system.tag)
    assert again == system, "the keys of the storage are other ones"
    wait_ready(tenant.kubectl, "topic/orders")
    wait_for(lambda: is_ready(tenant.door), 120, "the worker")
    assert sorted(_read(tenant)) == values
    _topics_are(tenant.kubectl, ["orders"])


def _read(tenant: Tenant) -> list[str]:
    return [
        message.value.decode()
        for partition in range(PARTITIONS)
        for message in read_partition(tenant.door, tenant.topic, partition)
    ]


def _topics_are(kubectl: Kubectl, names: list[str]) -> None:
    assert [each["metadata"]["name"] for each in kubectl.get("topics")["items"]] == names
