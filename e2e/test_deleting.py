"""Nothing that a user deletes hangs, in any order, with the operator there or gone."""

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyiceberg.catalog import load_catalog

from e2e.install import OPERATOR, System, create_namespace
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.registry import Registry
from e2e.tenant import Tenant, manifest, pool, topic, wait_ready
from e2e.web import expect, post

pytestmark = pytest.mark.timeout(420)
DELETE_S_MAX = 60.0
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


@pytest.fixture
def passing(system: System) -> Iterator[Kubectl]:
    """Give a namespace that the test itself deletes."""
    within = create_namespace(system.kubectl, f"e2e-passing-{secrets.token_hex(2)}")
    yield within
    within("delete", "namespace", within.namespace, "--ignore-not-found", "--timeout=150s")


def test_deletion_policy(tenant: Tenant, registry: Registry) -> None:
    """A topic goes at once; its table stays, or goes when everything is in it."""
    kubectl = tenant.kubectl
    kubectl.apply(_things())
    wait_ready(kubectl, "topic/kept", "topic/dropped", "subscription/reader")
    for name in ("kept", "dropped"):
        path = f"/v1/{kubectl.namespace}/{name}"
        expect(post(tenant.door, f"{path}/messages", {"messages": [{"value": "x"}]}))
        expect(post(tenant.door, f"{path}/flush"))
    _delete(kubectl, "topic/kept", "topic/dropped", "subscription/reader")
    catalog = load_catalog("tidewater", **tenant.catalog)

    def tables() -> set[str]:
        return {name for _, name in catalog.list_tables(kubectl.namespace)}

    wait_for(lambda: "dropped" not in tables(), GONE_S_MAX, "the table to be dropped")
    assert "kept" in tables()
    wait_for(
        lambda: not {"kept", "dropped"} & registry.topics(kubectl.namespace),
        GONE_S_MAX,
        "the registry to forget both",
    )


def test_a_topic_made_again_goes_on_where_its_table_ends(tenant: Tenant) -> None:
    kubectl = tenant.kubectl
    path = f"/v1/{kubectl.namespace}/again/messages"
    offsets = []
    for _ in range(2):
        kubectl.apply([topic("again", partitions=1)])
        wait_ready(kubectl, "topic/again")
        acks = expect(post(tenant.door, path, {"messages": [{"value": "x"}] * 3}))["acks"]
        offsets.append(acks[0]["offset"])
        _delete(kubectl, "topic/again")
    assert offsets == [0, 3]


def test_any_order_without_the_operator(tenant: Tenant, system: System, registry: Registry) -> None:
    """Every order of deleting topic, subscription and a pool; nobody is there to let them go."""
    kubectl = tenant.kubectl
    names = ("Topic", "Subscription", "Pool")
    orders = list(itertools.permutations(names))
    made = [
        each
        for number, _ in enumerate(orders)
        for each in (
            manifest("Topic", f"o{number}", partitions=1),
            manifest("Subscription", f"o{number}", topic=f"o{number}"),
        )
    ]
    kubectl.apply(made)
    wait_ready(kubectl, *(f"topic/o{number}" for number in range(len(orders))))
    with _without_operator(system):
        spare = [{**pool(1), "metadata": {"name": f"o{number}"}} for number in range(len(orders))]
        kubectl.apply(spare)
        for number, order in enumerate(orders):
            for kind in order:
                _delete(kubectl, f"{kind.lower()}/o{number}")
    left = {f"o{number}" for number in range(len(orders))}
    wait_for(
        lambda: not left & registry.topics(kubectl.namespace), GONE_S_MAX, "the registry to forget"
    )
    wait_ready(kubectl, "topic/orders")


def test_namespace_goes_whole(passing: Kubectl, system: System, registry: Registry) -> None:
    """With nobody there to help; with an operator, each module's own namespace goes."""
    passing.apply(_things())
    wait_ready(passing, "topic/kept", "topic/dropped")
    with _without_operator(system):
        passing("delete", "namespace", passing.namespace, "--timeout=120s")
    wait_for(lambda: not registry.topics(passing.namespace), GONE_S_MAX, "the registry to forget")
