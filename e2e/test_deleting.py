"""Nothing that a user deletes hangs, in any order, with the operator there or gone."""

import itertools
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from pyiceberg.catalog import load_catalog

from e2e.history import flush
from e2e.install import OPERATOR, System, create_namespace
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.registry import Registry
from e2e.tenant import Tenant, manifest, pool, topic, wait_ready
from e2e.web import produce

pytestmark = pytest.mark.timeout(600)
DELETE_S_MAX = 90.0
GONE_S_MAX = 120.0


def _things(suffix: str = "") -> list[Object]:
    return [
        topic(f"kept{suffix}", partitions=2),
        topic(f"dropped{suffix}", partitions=2, deletionPolicy="Delete"),
        manifest("Subscription", f"reader{suffix}", topic=f"kept{suffix}"),
    ]


def _delete(kubectl: Kubectl, *names: str) -> None:
    """Delete objects and wait until they are gone, but not for long."""
    kubectl("delete", *names, f"--timeout={DELETE_S_MAX:.0f}s", timeout_s=DELETE_S_MAX + 20)


@contextmanager
def _without_operator(system: System) -> Iterator[None]:
    system.kubectl("scale", OPERATOR, "--replicas=0")
    try:
        yield
    finally:
        system.kubectl("scale", OPERATOR, "--replicas=1")
        system.kubectl.wait_ready(OPERATOR)


@pytest.fixture(scope="module", autouse=True)
def passing(system: System) -> Iterator[Kubectl]:
    """Give a namespace that is deleted as a whole; it gets ready while other tests run."""
    within = create_namespace(system.kubectl, f"e2e-passing-{secrets.token_hex(2)}")
    within.apply(_things())
    yield within
    within("delete", "namespace", within.namespace, "--ignore-not-found", "--timeout=150s")


@pytest.fixture(scope="module")
def lonely(tenant: Tenant, system: System, passing: Kubectl) -> set[str]:
    """Delete with nobody there to help, in one absence of the operator; return topics' names.

    Every order of a topic, its subscription and a pool, and a namespace with all that is in it.
    """
    kubectl = tenant.kubectl
    orders = list(itertools.permutations(("Topic", "Subscription", "Pool")))
    names = [f"o{number}" for number in range(len(orders))]
    kubectl.apply(
        [
            each
            for name in names
            for each in (
                manifest("Topic", name, partitions=1),
                manifest("Subscription", name, topic=name),
            )
        ]
    )
    wait_ready(kubectl, *(f"topic/{name}" for name in names))
    wait_ready(passing, "topic/kept", "topic/dropped")

    def delete(name: str, order: tuple[str, ...]) -> None:
        for kind in order:
            _delete(kubectl, f"{kind.lower()}/{name}")

    with _without_operator(system):
        kubectl.apply([{**pool(1), "metadata": {"name": name}} for name in names])
        passing("delete", "namespace", passing.namespace, "--wait=false")
        with ThreadPoolExecutor(len(orders)) as persons:
            list(persons.map(delete, names, orders))
        passing("delete", "namespace", passing.namespace, "--ignore-not-found", "--timeout=150s")
    return set(names)


def test_deletion_policy(tenant: Tenant, registry: Registry) -> None:
    """A topic goes at once; its table stays, or goes when everything is in it."""
    kubectl = tenant.kubectl
    kubectl.apply(_things())
    wait_ready(kubectl, "topic/kept", "topic/dropped", "subscription/reader")
    for name in ("kept", "dropped"):
        produce(tenant.door, f"{kubectl.namespace}/{name}", [{"value": "x"}])
        flush(tenant.door, f"{kubectl.namespace}/{name}")
    _delete(kubectl, "topic/kept", "topic/dropped", "subscription/reader")
    catalog = load_catalog("tidewater", **tenant.catalog)

    def tables() -> set[str]:
        return {name for _, name in catalog.list_tables(kubectl.namespace)}

    wait_for(lambda: "dropped" not in tables(), GONE_S_MAX, "the table to be dropped")
    wait_for(lambda: "kept" in tables(), 30, "the catalog to be asked for the other table")
    wait_for(
        lambda: not {"kept", "dropped"} & registry.topics(kubectl.namespace),
        GONE_S_MAX,
        "the registry to forget both",
    )


def test_a_topic_made_again_goes_on_where_its_table_ends(tenant: Tenant) -> None:
    kubectl = tenant.kubectl
    offsets = []
    for _ in range(2):
        kubectl.apply([topic("again", partitions=1)])
        wait_ready(kubectl, "topic/again")
        acks = produce(tenant.door, f"{kubectl.namespace}/again", [{"value": "x"}] * 3)
        offsets.append(acks[0]["offset"])
        _delete(kubectl, "topic/again")
    assert offsets == [0, 3]


def test_any_order_without_the_operator(
    tenant: Tenant, lonely: set[str], registry: Registry
) -> None:
    """Every order of deleting topic, subscription and a pool; nobody was there to let them go."""
    namespace = tenant.kubectl.namespace
    wait_for(lambda: not lonely & registry.topics(namespace), GONE_S_MAX, "the registry to forget")
    wait_ready(tenant.kubectl, "topic/orders")


@pytest.mark.usefixtures("lonely")
def test_namespace_goes_whole(passing: Kubectl, registry: Registry) -> None:
    """With nobody there to help; with an operator, each module's own namespace goes."""
    wait_for(lambda: not registry.topics(passing.namespace), GONE_S_MAX, "the registry to forget")
