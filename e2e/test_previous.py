"""`helm upgrade` from the release before, under load: nothing is lost, and all of it is new."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import guarantees, previous
from e2e.install import CHART, OPERATOR_PODS, System, install_chart, uninstall_chart
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.tenant import POOL, Tenant, make_tenant, manifest, wait_ready
from e2e.web import expect, insist, post

pytestmark = pytest.mark.timeout(900)
SUBSCRIPTION = "subscription/reader"
EARLIEST = {"position": "earliest"}
TAKEN_BEFORE = 200
PULL_MAX = 1000
PAUSE_S = 0.12
"""Between a sender's requests: all is read again in the end, by a consumer, too."""
REPLACED_S_MAX = 240.0
NUMBER = {"Tidewater-Producer": "e2e-upgrade", "Tidewater-Sequence": "0"}


@pytest.fixture(scope="module")
def earlier(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the release before this one in the place of this one; this one is back at the end."""
    cluster = os.environ["TIDEWATER_E2E_KIND"]
    assert cluster, "`make e2e` leaves this out in a cluster that is not the run's own"
    source: Path = tmp_path_factory.mktemp("previous")
    chart = previous.checked_out(source)
    previous.load_images(source, cluster)
    nothing = lambda: not previous.objects_left(system.kubectl)  # noqa: E731
    wait_for(nothing, 180, "what earlier modules made to go", interval_s=1.0)
    uninstall_chart(system.kubectl)
    try:
        previous.forget_ours(system.kubectl)
        assert install_chart(system.kubectl, previous.TAG, chart=chart) == replace(
            system, tag=previous.TAG
        )
        yield
    finally:
        install_chart(system.kubectl, system.tag)


@pytest.fixture(scope="module")
def pair(earlier: None, namespace: Kubectl, catalog: dict[str, str]) -> Iterator[Tenant]:
    """Give two workers of the release before, with a topic and a reader of it."""
    with make_tenant(namespace, catalog, replicas=2) as tenant:
        namespace.apply([manifest("Subscription", "reader", topic="orders", startFrom=EARLIEST)])
        wait_ready(namespace, SUBSCRIPTION)
        yield tenant


def test_upgrade_under_load(pair: Tenant, system: System) -> None:
    """Operator, CRDs and workers are replaced; volumes, progress and numbers go on."""
    assert _images(pair) == {f"tidewater-worker:{previous.TAG}"}
    claims = _claims(pair)
    number = _numbered(pair)
    with pair.load("upgrade-", PAUSE_S) as traffic:
        traffic.wait_for_more(TAKEN_BEFORE * 2, 60)
        taken = _take(pair, TAKEN_BEFORE)
        upgraded = install_chart(system.kubectl, system.tag)
        wait_for(
            lambda: _images(pair) == {f"tidewater-worker:{system.tag}"},
            REPLACED_S_MAX,
            "all workers to be of this version",
            interval_s=1.0,
        )
        wait_ready(pair.kubectl, f"pool/{POOL}", "topic/orders", SUBSCRIPTION)
        traffic.wait_for_more(300, 120)
    assert upgraded == system, "the keys of the storage are other ones"
    operators = system.kubectl.get("pods", f"--selector={OPERATOR_PODS}")["items"]
    assert {_image(each) for each in operators} == {f"tidewater-operator:{system.tag}"}
    assert _claims(pair) == claims
    assert _numbered(pair) == number, "G8: the same number was stored again"
    history = pair.history(traffic)
    guarantees.hold(history)
    sent = [message for messages in history.stream.values() for message in messages]
    rest = _take(pair, len(sent) - len(taken))
    assert not taken & rest, "G4: delivered again after the ack"
    assert taken | rest == {(each.partition, each.offset) for each in sent}


def test_crds_are_those_of_this_version(pair: Tenant) -> None:
    for path in sorted((CHART / "files/crds").glob("*.yaml")):
        ours = yaml.safe_load(path.read_text())
        there = pair.kubectl.get("crd", ours["metadata"]["name"])
        for mine, found in zip(ours["spec"]["versions"], there["spec"]["versions"], strict=True):
            for part in ("name", "schema", "subresources", "additionalPrinterColumns"):
                assert found[part] == mine[part], f"{path.name}: {part}"


def _numbered(tenant: Tenant) -> tuple[int, int]:
    """Send a message under a number that is always the same; return its place."""
    path = f"/v1/{tenant.topic}/messages?partition=0"
    body = {"messages": [{"value": "numbered"}]}
    (ack,) = expect(insist(lambda: post(tenant.door, path, body, more=NUMBER)))["acks"]
    return ack["partition"], ack["offset"]


def _take(tenant: Tenant, count: int) -> set[tuple[int, int]]:
    """Pull and acknowledge so many messages; return their places."""

    def ask(what: str, body: object) -> Any:
        path = f"/v1/{tenant.topic}/subscriptions/reader/{what}"
        return expect(insist(lambda: post(tenant.door, path, body)))

    found: set[tuple[int, int]] = set()
    while len(found) < count:
        most = min(PULL_MAX, count - len(found))
        messages = ask("pull", {"max": most, "wait_ms": 1000, "consumer": "e2e"})["messages"]
        if messages:
            ask("ack", {"ack_ids": [each["ack_id"] for each in messages]})
        found.update((each["partition"], each["offset"]) for each in messages)
    return found


def _images(tenant: Tenant) -> set[str]:
    """Return the images of the workers, once all are there and none is on its way out."""
    pods = tenant.kubectl.get("pods", f"--selector=tidewater.dev/pool={POOL}")["items"]
    alive = [each for each in pods if "deletionTimestamp" not in each["metadata"]]
    return {_image(each) for each in alive} if len(alive) == len(pods) == 2 else set()


def _image(pod: Object) -> str:
    return str(pod["spec"]["containers"][0]["image"])


def _claims(tenant: Tenant) -> dict[str, str]:
    claims = tenant.kubectl.get("pvc")["items"]
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in claims}
