"""A volume that will not come back: nothing goes on by itself, a person's word counts once."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.history import flush, read_partition
from e2e.kubectl import Kubectl, is_pod_ready, wait_for
from e2e.tenant import Tenant, conditions, make_tenant, topic, wait_ready
from e2e.web import expect, get, insist, post, produce

pytestmark = pytest.mark.timeout(600)
VICTIM = "tidewater-default-1"
PARTITIONS = 4
TOLD_S_MAX = 120.0
STEADY_S = 25.0
"""More than a session's end and a beat of figures: who would give up by himself had the time."""
PAUSED_S = 6.0
"""More than a beat of figures; a change that is not paused begins within a second or two."""


@pytest.fixture(scope="module")
def pair(namespace: Kubectl, catalog: dict[str, str]) -> Iterator[Tenant]:
    """Give two workers and a topic whose partitions are spread over them."""
    with make_tenant(namespace, catalog, replicas=2, topics=("spread",)) as tenant:
        tenant.kubectl.apply([topic("spread", partitions=PARTITIONS)])
        wait_ready(tenant.kubectl, "topic/spread")
        yield tenant


def _told(tenant: Tenant, type_: str) -> tuple[str, str]:
    found = conditions(tenant.kubectl, "topic/spread").get(type_, {})
    return str(found.get("status")), str(found.get("reason"))


def _partitions(tenant: Tenant) -> dict[int, dict[str, Any]]:
    said = expect(insist(lambda: get(tenant.door, f"/v1/{tenant.topic}")))
    return {each["partition"]: each for each in said["partitions"]}


def _send(tenant: Tenant, partition: int, value: str) -> int:
    (ack,) = produce(tenant.door, tenant.topic, [{"value": value}], partition)
    return int(ack["offset"])


def _is_given_up(tenant: Tenant, number: int) -> bool:
    return bool({"gap", "gaps"} & _partitions(tenant)[number].keys())


def _gaps(tenant: Tenant) -> dict[int, Any]:
    return {number: each.get("gaps") for number, each in _partitions(tenant).items()}


def _spread(tenant: Tenant) -> bool:
    """Tell whether each worker has as many partitions: one that was added may still move."""
    owners = Counter(each["owner"] for each in _partitions(tenant).values())
    return None not in owners and list(owners.values()) == [PARTITIONS // 2] * 2


def _values(tenant: Tenant, partition: int) -> list[str]:
    return [e.value.decode() for e in read_partition(tenant.door, tenant.topic, partition)]


def _wait_lost(tenant: Tenant) -> None:
    lost = ("False", "VolumeLost")
    wait_for(lambda: _told(tenant, "Ready") == lost, TOLD_S_MAX, "VolumeLost")


def _lose_volume(tenant: Tenant) -> None:
    """Take the claim away under the pod, and then the pod: it comes back with an empty disk."""
    kubectl = tenant.kubectl
    claim = f"data-{VICTIM}"
    uid = kubectl.get("pvc", claim)["metadata"]["uid"]
    kubectl("delete", "pvc", claim, "--wait=false")
    kubectl("delete", "pod", VICTIM, "--wait=false", "--grace-period=0", "--force")
    wait_for(
        lambda: any(
            each["metadata"]["name"] == claim and each["metadata"]["uid"] != uid
            for each in kubectl.get("pvc")["items"]
        ),
        120,
        "an empty volume in place of the lost one",
    )


def test_a_lost_volume_waits_for_a_persons_word(pair: Tenant) -> None:
    kubectl = pair.kubectl
    wait_for(lambda: _spread(pair), 90, "each worker to have as many partitions")
    wait_ready(kubectl, "topic/spread")
    owners = {number: each["owner"] for number, each in _partitions(pair).items()}
    lost = sorted(number for number, owner in owners.items() if owner == VICTIM)
    kept = sorted(set(owners) - set(lost))
    assert len(lost) == len(kept) == PARTITIONS // 2, owners
    offsets = {number: _send(pair, number, f"before {number}") for number in owners}
    flush(pair.door, pair.topic)

    _lose_volume(pair)
    _wait_lost(pair)
    wait_for(lambda: _told(pair, "Degraded")[0] == "True", 60, "Degraded")
    kubectl.wait_ready("statefulset/tidewater-default")
    # Time heals nothing here, and what is elsewhere goes on.
    until = time.monotonic() + STEADY_S
    while time.monotonic() < until:
        # One late answer makes it Unknown for a moment: nobody says that all is well.
        assert _told(pair, "Ready")[0] != "True"
        for number in kept:
            offsets[number] = _send(pair, number, "meanwhile")
        path, body = f"/v1/{pair.topic}/messages?partition={lost[0]}", [{"value": "x"}]
        refused = insist(
            lambda: post(pair.door, path, {"messages": body}),  # noqa: B023 - called at once
            again=frozenset(),
        )
        assert (refused.status, refused.retry_after_s is not None) == (503, True)
        time.sleep(2)
    _wait_lost(pair)
    # History is readable all the time: what was in the table is not lost.
    assert _values(pair, lost[0]) == [f"before {lost[0]}"]

    kubectl("annotate", "topic", "spread", f"tidewater.dev/accept-loss={lost[0]}", "--overwrite")
    wait_for(lambda: _is_given_up(pair, lost[0]), TOLD_S_MAX, "a recorded gap")
    _wait_lost(pair)
    assert not _is_given_up(pair, lost[1]), "nobody gave up the other one"
    kubectl("annotate", "topic", "spread", "tidewater.dev/accept-loss=all", "--overwrite")
    wait_ready(kubectl, "topic/spread", timeout_s=TOLD_S_MAX)
    for number in lost:
        after = _send(pair, number, f"after {number}")
        assert after > offsets[number] + 1, "G1: no offset that may have been given is given again"
        gap = {"start": offsets[number] + 1, "end": after}
        wait_for(lambda gap=gap, number=number: _gaps(pair)[number] == [gap], 60, f"{gap}")  # type: ignore[misc]
        assert _values(pair, number) == [f"before {number}", f"after {number}"]
    for number in kept:
        assert "gaps" not in _partitions(pair)[number]


def test_a_word_counts_once(pair: Tenant) -> None:
    """The annotation is still there: a worker that goes now is waited for, not given up."""
    kubectl = pair.kubectl
    before = _gaps(pair)
    values = {number: _values(pair, number) for number in range(PARTITIONS)}
    uid = kubectl.get("pod", VICTIM)["metadata"]["uid"]
    kubectl("delete", "pod", VICTIM, "--wait=false", "--grace-period=0", "--force")

    def is_back() -> bool:
        pod = kubectl.get("pod", VICTIM)
        return pod["metadata"]["uid"] != uid and is_pod_ready(pod)

    # The operator may need longer than the pod to notice: what was Ready before counts for nothing.
    wait_for(is_back, TOLD_S_MAX, "the worker to be back")
    wait_ready(kubectl, "topic/spread", timeout_s=TOLD_S_MAX)
    wait_for(lambda: _gaps(pair) == before, 60, f"the gaps to be {before}, as before")
    assert {number: _values(pair, number) for number in range(PARTITIONS)} == values


def test_paused_objects_are_left_alone(pair: Tenant) -> None:
    kubectl = pair.kubectl
    kubectl("annotate", "pool", "default", "tidewater.dev/paused=true", "--overwrite")
    kubectl("annotate", "topic", "spread", "tidewater.dev/paused=true", "--overwrite")
    for name in ("topic/spread", "pool/default"):
        kubectl("wait", name, "--for=condition=Paused", "--timeout=60s")
    kubectl.apply([topic("spread", partitions=PARTITIONS + 1)])
    kubectl("scale", "pool/default", "--replicas=3")
    time.sleep(PAUSED_S)
    assert len(_partitions(pair)) == PARTITIONS
    assert len(pair.workers()) == 2
    for number in range(PARTITIONS):
        _send(pair, number, "paused topics take messages")
    kubectl("annotate", "pool", "default", "tidewater.dev/paused-", "--overwrite")
    kubectl("annotate", "topic", "spread", "tidewater.dev/paused-", "--overwrite")
    wait_for(lambda: len(pair.workers()) == 3, 90, "the third worker")
    wait_ready(kubectl, "topic/spread", "pool/default")
    wait_for(lambda: len(_partitions(pair)) == PARTITIONS + 1, 60, "one partition more")
