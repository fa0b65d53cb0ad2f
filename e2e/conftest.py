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

from e2e import kind  # noqa: E402
from e2e.collect import collect  # noqa: E402
from e2e.install import System, create_namespace, installed  # noqa: E402
from e2e.kubectl import Kubectl, PortForward, wait_for  # noqa: E402
from e2e.registry import Registry  # noqa: E402
from e2e.tenant import Tenant, begin_tenant, make_tenant  # noqa: E402

OUT = Path(__file__).parent / "out"
SPARK_S_MAX = 240.0
CLUSTER_KEY = pytest.StashKey[Kubectl]()
BEGUN_KEY = pytest.StashKey[dict[str, Kubectl]]()
"""The namespaces that were begun for modules to come."""
TOPICS = ("orders", "visits")
AHEAD = {"test_access": "test_catalog", "test_crds": "test_deleting", "test_volume": "test_worker"}
"""While the one module runs, the `tenant` of the other gets ready.

Only of modules that do nothing to the operator, a node or a part of the release, and whose own
figures nobody holds against a limit.
"""


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
def pipeline_image(tag: str) -> str:
    """Return the name of Spark's image, once the nodes have it: `make e2e` loads it meanwhile."""
    (image,) = kind.ours(tag, [kind.SPARK])
    if name := os.environ.get("TIDEWATER_E2E_KIND"):
        what = f"{image} to be on the nodes"
        wait_for(lambda: kind.has_image(name, image), SPARK_S_MAX, what, interval_s=1.0)
    return image


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
    begun = request.config.stash[BEGUN_KEY].pop(request.path.stem, None)
    within = begun or _new_namespace(system.kubectl, request.path.stem)
    yield within
    within("delete", "namespace", within.namespace, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def tenant(namespace: Kubectl, catalog: dict[str, str]) -> Iterator[Tenant]:
    """Give one worker with a volume and two topics of three partitions: orders and visits."""
    with make_tenant(namespace, catalog, topics=TOPICS) as made:
        yield made


def _new_namespace(kubectl: Kubectl, module: str) -> Kubectl:
    stem = module.removeprefix("test_").replace("_", "-")
    return create_namespace(kubectl, f"e2e-{stem}-{secrets.token_hex(2)}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a module's first test: begin what a later module will wait for."""
    stash, stem = item.config.stash, AHEAD.get(item.path.stem)
    is_amid = nextitem is not None and nextitem.path == item.path
    is_asked_for = any(each.path.stem == stem for each in item.session.items)
    if stem is None or stem in stash[BEGUN_KEY] or not is_amid or not is_asked_for:
        return
    stash[BEGUN_KEY][stem] = within = _new_namespace(stash[CLUSTER_KEY], stem)
    begin_tenant(within, topics=TOPICS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Take away what was begun, if its module never came."""
    for within in session.config.stash[BEGUN_KEY].values():
        within("delete", "namespace", within.namespace, "--ignore-not-found", "--wait=false")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin with an empty folder, so that what is in it is of this run."""
    session.config.stash[BEGUN_KEY] = {}
    for folder in OUT.glob("test_*"):
        shutil.rmtree(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect what a failed test leaves, before its fixtures take it away."""
    report = yield
    kubectl = item.config.stash.get(CLUSTER_KEY, None)
    if report.failed and kubectl is not None:
        when = "" if call.when == "call" else f".{call.when}"
        folder = OUT / re.sub(r"[^\w.-]+", "_", f"{item.path.stem}.{item.name}{when}")
        collect(kubectl, folder, report.longreprtext)
    return report
