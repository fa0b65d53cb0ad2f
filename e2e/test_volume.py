"""A volume that runs full: producers are pushed back, and nothing acknowledged is lost."""

from collections.abc import Iterator

import pytest

from e2e import faults, guarantees
from e2e.conftest import PARTITIONS, Worker
from e2e.install import DATA_DIR, Parts, install_worker, topic
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.traffic import forwarded_worker
from e2e.web import post
from tidewater_core.units import ByteSize
from tidewater_testing.web import Answer

pytestmark = pytest.mark.timeout(300)
VOLUME_BYTES = ByteSize("512Mi")
RESERVE_BYTES = ByteSize("64Mi")


def _small_volume(statefulset: Object) -> None:
    """Put the data on a volume of fixed size in memory: a local path would fill the whole node."""
    spec = statefulset["spec"]
    del spec["volumeClaimTemplates"]
    data = {"name": "data", "emptyDir": {"medium": "Memory", "sizeLimit": str(VOLUME_BYTES)}}
    spec["template"]["spec"]["volumes"].append(data)
    # Such a volume counts as memory of the container.
    spec["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "2Gi"


@pytest.fixture(scope="module")
def small_worker(
    namespace: Kubectl, parts: Parts, catalog: dict[str, str], tag: str
) -> Iterator[Worker]:
    """Give a worker whose log has little room and keeps a reserve."""
    name = "orders"
    topics = [topic(namespace.namespace, name, partitions=PARTITIONS)]
    limits = {"disk_reserve_bytes": str(RESERVE_BYTES)}
    install_worker(namespace, parts, tag, topics, limits=limits, change=_small_volume)
    with forwarded_worker(namespace) as address:
        yield Worker(namespace, address, f"{namespace.namespace}/{name}", catalog)


def _refused(worker: Worker, answers: list[Answer]) -> bool:
    """Send a message and tell whether it was refused: the free space is looked at now and then."""
    body = {"messages": [{"value": f"probe {len(answers)}"}]}
    answers.append(post(worker.address, f"/v1/{worker.topic}/messages", body))
    return answers[-1].status != 200


def test_full_volume_pushes_back_and_loses_nothing(small_worker: Worker) -> None:
    worker = small_worker
    with worker.load("full-") as traffic:
        traffic.wait_for_more(300, 60)
        with faults.filled_volume(worker.kubectl, DATA_DIR, RESERVE_BYTES // 2):
            answers: list[Answer] = []
            wait_for(lambda: _refused(worker, answers), 15, "the worker to push back")
            guarantees.raise_all(list(guarantees.pushed_back(answers[-1])))
        traffic.wait_for_more(300, 60)
    guarantees.hold(worker.history(traffic))
