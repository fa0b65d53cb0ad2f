"""Fixtures of the end-to-end tests: one cluster and one release a run, one namespace a module."""

import os
import re
import secrets
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # `pytest e2e`, without -m, does not put it there
    sys.path.append(str(ROOT))

from e2e.collect import collect  # noqa: E402
from e2e.install import System, create_namespace, installed  # noqa: E402
from e2e.kubectl import Kubectl, PortForward  # noqa: E402
from e2e.registry import Registry  # noqa: E402
from e2e.tenant import Tenant, make_tenant  # noqa: E402

OUT = Path(__file__).parent / "out"
NAMESPACE_KEY = pytest.StashKey[str]()
CLUSTER_KEY = pytest.StashKey[Kubectl]()


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
def system(cluster: Kubectl, tag: str) -> System:
    """Return the release that `make e2e` installed, shared by all tests."""
    return installed(cluster, tag)


@pytest.fixture(scope="session")
def catalog(system: System) -> Iterator[dict[str, str]]:
    """Give the properties by which the tests themselves open the catalog."""
    selector = "app.kubernetes.io/component=seaweedfs"
    with (
        PortForward(system.kubectl, selector, 8181) as iceberg,
        PortForward(system.kubectl, selector, 8333) as s3,
    ):
        yield system.catalog_by_forward(iceberg.address, s3.address)


@pytest.fixture(scope="session")
def registry(system: System) -> Iterator[Registry]:
    """Give a look at what etcd has."""
    with PortForward(system.kubectl, "app.kubernetes.io/component=etcd", 2379) as etcd:
        yield Registry(etcd.address)


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest, system: System) -> Iterator[Kubectl]:
    """Make a fresh namespace for the module; all that the module makes goes with it, later."""
    stem = request.path.stem.removeprefix("test_").replace("_", "-")
    within = create_namespace(system.kubectl, f"e2e-{stem}-{secrets.token_hex(2)}")
    request.node.stash[NAMESPACE_KEY] = within.namespace
    yield within
    within("delete", "namespace", within.namespace, "--wait=false")


@pytest.fixture(scope="module")
def tenant(namespace: Kubectl, catalog: dict[str, str]) -> Iterator[Tenant]:
    """Give one worker with a volume and two topics of three partitions: orders and visits."""
    with make_tenant(namespace, catalog, topics=("orders", "visits")) as made:
        yield made


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
