"""Whole passes that take something away, with a real etcd: never by an old word, never twice."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tidewater_coordination.port import TopicPhase
from tidewater_coordination.rules import undrained
from tidewater_core.names import ANNOTATION_LEFTOVER as LEFTOVER
from tidewater_operator.cluster.api import ApiRefused
from tidewater_operator.reconcile import Memory
from tidewater_operator.report import LeftoverReport, WorkerReport
from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.place import Place, served

SET = "/apis/apps/v1/namespaces/shop/statefulsets/tidewater-default"
CLAIM = "/api/v1/namespaces/shop/persistentvolumeclaims/data-tidewater-default-1"
TOPIC = "/apis/tidewater.dev/v1alpha1/namespaces/shop/topics/orders"
POD = "/api/v1/namespaces/shop/pods/tidewater-default-1"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


@pytest.fixture
async def place(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    found = Place(etcd, request.node.name)
    yield found
    await found.close()


async def deafen(place: Place) -> None:
    """Stop the operator's watch, as a server does that is cut off from the others."""
    watch = (await place.registries.store("shop"))._mirror._task
    assert watch is not None
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


async def test_no_worker_and_no_volume_goes_by_an_old_word(place: Place) -> None:
    """G1: what the watch has not told yet is on that volume alone."""
    await served(place)
    place.apply("Pool", "default", replicas=2)
    await place.run()
    await deafen(place)
    await place.start_workers()
    second = place.workers["tidewater-default-1"]
    await second.acquire("shop/orders", 2)
    place.apply("Pool", "default", replicas=1)
    await place.run()
    assert place.api.objects[SET]["spec"]["replicas"] == 2, "it holds something"
    # Its pod and its session are gone, by whatever: the volume has the messages still.
    place.api.objects[SET]["spec"]["replicas"] = 1
    place.api.remove(POD)
    await second.close()
    await place.run()
    assert CLAIM in place.api.objects
    # What was given up by a person holds nothing back.
    await place.workers["tidewater-default-0"].give_up("shop/orders", 2, "burnt")
    place.api.objects[SET]["spec"]["replicas"] = 1
    await place.run()
    assert CLAIM not in place.api.objects


async def test_a_volume_with_evidence_goes_when_a_person_says_so(place: Place) -> None:
    """G7: the note on the volume outlives the worker, and the operator."""
    await served(place)
    place.apply("Pool", "default", replicas=2)
    await place.run()
    await place.start_workers()
    name = "tidewater-default-1"
    log = LeftoverReport("shop/old", 1, segments=1, bytes=9)
    place.answers.said = {name: WorkerReport(name, leftovers=(log,))}
    await place.run()
    assert "shop/old partition 1" in place.api.objects[CLAIM]["metadata"]["annotations"][LEFTOVER]
    place.answers.said = {}
    place.memory = Memory()
    place.apply("Pool", "default", replicas=1)
    await place.run()
    place.api.remove(POD)
    await place.workers[name].close()
    for _ in range(3):
        await place.run()
    assert CLAIM in place.api.objects
    del place.api.objects[CLAIM]["metadata"]["annotations"][LEFTOVER]
    await place.run()
    assert CLAIM not in place.api.objects


async def test_a_topic_that_was_made_again_is_not_forgotten_by_an_old_word(place: Place) -> None:
    await served(place)
    first = place.workers["tidewater-default-0"]
    place.api.remove(TOPIC)
    await place.run()
    for number in (0, 1):
        await first.release("shop/orders", number, 1, drained_at=0)
    store = await place.registries.store("shop")
    while undrained((await store.registry()).owners["shop/orders"]):
        await store.changed((await store.registry()).version, 1)
    await deafen(place)
    known = (await store.registry()).topics["shop/orders"]
    assert known.phase is TopicPhase.DELETING
    # Another operator, which led meanwhile, has seen to it.
    await first.unregister_topic("shop/orders")
    place.apply("Topic", "orders", partitions=2)
    uid = place.api.objects[TOPIC]["metadata"]["uid"]
    await first.register_topic("shop/orders", known.spec, uid)
    await first.acquire("shop/orders", 0)
    await place.run()
    asked = await place.registries.ask("shop")
    assert asked.topics["shop/orders"].uuid == uid
    assert set(asked.owners["shop/orders"]) == {0}, "G1: its messages are on that volume alone"


async def test_what_another_operator_registered_is_not_ended_by_an_old_look(place: Place) -> None:
    """G1: it led meanwhile; what it registered is there, though this one has not seen it yet."""
    await served(place)
    mine = place.memory
    place.apply("Topic", "late", partitions=1, deletionPolicy="Delete")
    place.apply("Subscription", "latecomer", topic="late")
    await place.reconciler.run("shop", Memory(), full=True, figures=True)
    await place.reconciler.run("shop", mine, full=False, figures=True)
    registry = await place.registries.ask("shop")
    assert registry.topics["shop/late"].phase is TopicPhase.ACTIVE
    assert "shop/latecomer" in registry.subscriptions
    # Once they are gone for good, one look is enough.
    place.api.remove(TOPIC.replace("orders", "late"))
    await place.reconciler.run("shop", mine, full=True, figures=True)
    registry = await place.registries.ask("shop")
    assert registry.topics["shop/late"].phase is TopicPhase.DELETING


async def test_a_topic_that_is_there_does_not_stay_in_deletion(place: Place) -> None:
    """Whatever began it, a registry that was restored, say: it is drained, and served again."""
    await served(place)
    worker = place.workers["tidewater-default-0"]
    uid = place.api.objects[TOPIC]["metadata"]["uid"]
    await worker.set_topic_phase("shop/orders", uid, TopicPhase.DELETING)
    for number in (0, 1):
        await worker.release("shop/orders", number, 1, drained_at=0)
    for _ in range(4):
        await place.registries.ask("shop")
        await place.run()
    registry = await place.registries.ask("shop")
    assert registry.topics["shop/orders"].phase is TopicPhase.ACTIVE


async def test_workers_keep_their_set_while_their_spec_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again for larger volumes; nobody looks after workers in between."""
    await served(place)
    taken = place.api._call

    async def judged(method: str, path: str, **call: Any) -> dict[str, Any]:
        if method == "PATCH" and path == SET and "abc" in json.dumps(call["body"]):
            raise ApiRefused(422, "Invalid", "a quantity must match")
        return await taken(method, path, **call)

    monkeypatch.setattr(place.api, "_call", judged)
    bad = {"requests": {"cpu": "abc"}}
    place.apply("Pool", "default", replicas=1, storage={"size": "20Gi"}, resources=bad)
    for _ in range(3):
        await place.run()
    assert SET in place.api.objects, "with nobody to start a worker that goes"
    pool = place.api.find("Pool", "default")
    assert pool is not None
    assert pool["status"]["conditions"][0]["message"] == "a quantity must match"
    uid = place.api.objects[SET]["metadata"]["uid"]
    place.apply("Pool", "default", replicas=1, storage={"size": "20Gi"})
    await place.run()
    await place.run()
    made = place.api.objects[SET]
    assert made["metadata"]["uid"] != uid
    (claim,) = made["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
