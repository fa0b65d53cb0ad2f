"""Fixtures of the end-to-end tests: one cluster a run, one namespace and one worker a module."""

import os
import re
import secrets
import shutil
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # `pytest e2e`, without -m, does not put it there
    sys.path.append(str(ROOT))

from e2e.collect import collect  # noqa: E402
from e2e.history import History, gather  # noqa: E402
from e2e.install import (  # noqa: E402
    Parts,
    create_namespace,
    install_parts,
    install_worker,
    topic,
)
from e2e.kubectl import Kubectl, PortForward  # noqa: E402
from e2e.traffic import BackgroundTraffic, forwarded_worker, gentle  # noqa: E402

OUT = Path(__file__).parent / "out"
PARTITIONS = 3
NAMESPACE_KEY = pytest.StashKey[str]()
CLUSTER_KEY = pytest.StashKey[Kubectl]()


@dataclass(frozen=True)
class Worker:
    """A worker in a namespace of its own, and the way to it."""

    kubectl: Kubectl
    address: str
    topic: str
    catalog: dict[str, str] = field(repr=False)

    def load(self, prefix: str) -> BackgroundTraffic:
        """Return senders for its topic; the prefix makes their payloads unique in the module."""
        return BackgroundTraffic(gentle(self.address, self.topic, PARTITIONS, prefix=prefix))

    def history(self, traffic: BackgroundTraffic) -> History:
        """Return what the checkers need after traffic has ended."""
        return gather(self.address, self.topic, traffic.record, self.catalog, PARTITIONS)


@pytest.fixture(scope="session")
def tag() -> str:
    """Return the tag of the images under test."""
    return os.environ["TIDEWATER_E2E_TAG"]


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Kubectl:
    """Return the cluster; `make e2e` says which."""
    kubectl = Kubectl(Path(os.environ["TIDEWATER_E2E_KUBECONFIG"]))
    pytestconfig.stash[CLUSTER_KEY] = kubectl
    return kubectl


@pytest.fixture(scope="session")
def parts(cluster: Kubectl) -> Parts:
    """Return the third-party parts, shared by all tests."""
    return install_parts(cluster)


@pytest.fixture(scope="session")
def catalog(parts: Parts) -> Iterator[dict[str, str]]:
    """Give the properties by which the tests themselves open the catalog."""
    with (
        PortForward(parts.kubectl, "seaweedfs", 8181) as iceberg,
        PortForward(parts.kubectl, "seaweedfs", 8333) as s3,
    ):
        yield parts.catalog_by_forward(iceberg.address, s3.address)


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest, cluster: Kubectl) -> Iterator[Kubectl]:
    """Make a fresh namespace for the module; all that the module makes goes with it."""
    stem = request.path.stem.removeprefix("test_").replace("_", "-")
    name = f"e2e-{stem}-{secrets.token_hex(2)}"
    within = create_namespace(cluster, name)
    request.node.stash[NAMESPACE_KEY] = name
    yield within
    cluster("delete", "namespace", name, "--timeout=150s")


@pytest.fixture(scope="module")
def worker(namespace: Kubectl, parts: Parts, catalog: dict[str, str], tag: str) -> Iterator[Worker]:
    """Install one worker with a volume and two topics of three partitions: orders and visits."""
    name = "orders"
    topics = [topic(namespace.namespace, each, partitions=PARTITIONS) for each in (name, "visits")]
    install_worker(namespace, parts, tag, topics)
    with forwarded_worker(namespace) as address:
        yield Worker(namespace, address, f"{namespace.namespace}/{name}", catalog)


def pytest_sessionstart() -> None:
    """Begin with an empty folder, so that what is in it is of this run."""
    for folder in OUT.glob("test_*"):
        shutil.rmtree(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect what a failed test leaves, before its fixtures take it away."""
    report = yield
    kubectl = item.config.stash.get(CLUSTER_KEY, None)
    if report.failed and kubectl is not None and call.when != "teardown":
        module = item.getparent(pytest.Module)
        namespace = None if module is None else module.stash.get(NAMESPACE_KEY, None)
        folder = OUT / re.sub(r"[^\w.-]+", "_", f"{item.path.stem}.{item.name}")
        collect(kubectl, namespace, folder, report.longreprtext)
    return report
