"""Whole passes: a real etcd, workers by their sessions alone, the Kubernetes API in memory."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from tidewater_coordination.etcd.login import Login
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import Registry, TopicPhase, WorkerInfo
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.errors import TidewaterError
from tidewater_operator.cluster.events import Events
from tidewater_operator.cluster.lease import Leadership
from tidewater_operator.conditions import status_of
from tidewater_operator.model.names import labels
from tidewater_operator.reconcile import Memory, Outcome, Reconciler
from tidewater_operator.registry import Registries
from tidewater_operator.report import (
    PartitionReport,
    SubscriptionReport,
    TableReport,
    TopicReport,
    WorkerReport,
)
from tidewater_operator.workers import Workers
from tidewater_testing.api_server import ApiServer
from tidewater_testing.namespace import SETTINGS
from tidewater_testing.parts.etcd import Etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


class Answers(Workers):
    """Workers that say what a test has them say; at first, that all they own is well."""

    def __init__(self, registries: Registries) -> None:
        super().__init__(dict)
        self._registries = registries
        self.said: dict[str, WorkerReport] = {}

    async def reports(self, namespace: str, workers: Mapping[str, WorkerInfo], *_: Any) -> Any:
        if self.said:
            return self.said
        registry = await self._registries.read(namespace)
        known = tuple(SubscriptionReport(name) for name in registry.subscriptions)
        return {
            worker: WorkerReport(worker, topics=_owned(registry, worker), subscriptions=known)
            for worker in workers
        }


def _owned(registry: Registry, worker: str) -> tuple[TopicReport, ...]:
    parts = {
        name: tuple(
            PartitionReport(number, state="running")
            for number, owner in owners.items()
            if owner.worker_id == worker
        )
        for name, owners in registry.owners.items()
    }
    return tuple(
        TopicReport(name.partition("/")[2], partitions=found, freshness_ms=1.0)
        for name, found in parts.items()
        if found
    )


class Place:
    """A namespace, an operator and the workers that a kubelet would run."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.api = ApiServer()
        self.registries = Registries(etcd.endpoints, prefix, Login())
        events = Events(self.api, SystemClock(), SystemIds(), "test")
        settings = SETTINGS.model_copy(update={"pipeline_image": "tidewater-pipeline:1"})
        self.answers = Answers(self.registries)
        self.reconciler = Reconciler(
            settings, self.api, self.registries, self.answers, events, SystemClock(), "tidewater"
        )
        self.memory = Memory()
        self.workers: dict[str, EtcdCoordination] = {}
        self._etcd, self._prefix = etcd, prefix
        self.api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})

    def apply(self, kind: str, name: str, **spec: Any) -> str:
        return self.api.put(
            {
                "apiVersion": "tidewater.dev/v1alpha1",
                "kind": kind,
                "metadata": {"name": name, "namespace": "shop"},
                "spec": spec,
            }
        )

    async def run(self) -> Outcome:
        return await self.reconciler.run("shop", self.memory, full=True, figures=True)

    async def start_workers(self) -> None:
        """Do what kubelet and workers do: pods, volumes, sessions, partitions."""
        for item in await self.api.list(_kind("StatefulSet"), "shop"):
            pool = item["metadata"]["labels"]["tidewater.dev/pool"]
            for number in range(item["spec"]["replicas"]):
                name = f"{item['metadata']['name']}-{number}"
                meta = {"namespace": "shop", "labels": labels(pool)}
                ready = {"conditions": [{"type": "Ready", "status": "True"}]}
                pod = {"metadata": {**meta, "name": name}, "status": ready}
                self.api.put({"apiVersion": "v1", "kind": "Pod", **pod})
                claim = {"metadata": {**meta, "name": f"data-{name}"}, "spec": {}}
                claim["spec"] = {"resources": {"requests": {"storage": "10Gi"}}}
                self.api.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim})
                if name not in self.workers:
                    store = EtcdCoordination(self._etcd.endpoints, f"{self._prefix}/shop")
                    await store.start(WorkerInfo(name, volume=name))
                    self.workers[name] = store
        registry = await self.registries.read("shop")
        for topic, wanted in registry.assignments.items():
            for partition, worker in wanted.items():
                if partition not in registry.owners.get(topic, {}):
                    await self.workers[worker].acquire(topic, partition)

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.close()
        await self.registries.close()


def _kind(name: str) -> Any:
    from tidewater_operator.cluster.api import BY_NAME

    return BY_NAME[name]


@pytest.fixture
async def place(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    found = Place(etcd, request.node.name)
    yield found
    await found.close()


async def served(place: Place) -> None:
    """Bring a topic to Ready."""
    place.apply("Topic", "orders", partitions=2)
    place.apply("Subscription", "billing", topic="orders")
    await place.run()
    await place.run()
    await place.start_workers()
    await place.run()


def ready(place: Place, kind: str, name: str) -> str:
    found = place.api.find(kind, name)
    assert found is not None
    return status_of(found.get("status", {}).get("conditions", ()), "Ready")


async def test_from_a_topic_to_ready_and_then_nothing_more(place: Place) -> None:
    await served(place)
    assert ready(place, "Topic", "orders") == "True"
    assert ready(place, "Pool", "default") == "True"
    assert ready(place, "Subscription", "billing") == "True"
    await place.run()
    writes = place.api.writes
    for _ in range(3):
        await place.run()
    assert place.api.writes == writes, "a second pass writes nothing"


async def test_what_somebody_removed_or_changed_comes_back(place: Place) -> None:
    await served(place)
    service = "/api/v1/namespaces/shop/services/tidewater"
    workers = "/apis/apps/v1/namespaces/shop/statefulsets/tidewater-default"
    place.api.remove(service)
    place.api.objects[workers]["spec"]["template"]["spec"]["containers"][0]["image"] = "evil"
    await place.run()
    assert service in place.api.objects
    image = place.api.objects[workers]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == SETTINGS.worker_image


async def test_a_deleted_topic_is_drained_and_forgotten(place: Place) -> None:
    await served(place)
    place.api.remove("/apis/tidewater.dev/v1alpha1/namespaces/shop/topics/orders")
    await place.run()
    registry = await place.registries.read("shop")
    assert registry.topics["shop/orders"].phase == TopicPhase.DELETING
    await place.run()
    assert "shop/orders" in (await place.registries.read("shop")).topics, "not drained yet"
    for partition, owner in registry.owners["shop/orders"].items():
        worker = place.workers[owner.worker_id]
        await worker.release("shop/orders", partition, owner.epoch, drained_at=0)
    await place.run()
    assert (await place.registries.read("shop")).topics == {}


async def test_a_namespace_that_is_gone_is_forgotten(place: Place) -> None:
    await served(place)
    assert await place.registries.namespaces() == ["shop"]
    place.api.objects.clear()
    outcome = await place.run()
    assert outcome.is_empty
    assert await place.registries.namespaces() == []
    assert (await place.registries.read("shop")).topics == {}


async def test_what_the_api_refuses_is_told_and_stops_nothing_else(place: Place) -> None:
    place.api.refuse = {"/poddisruptionbudgets": 403}
    await served(place)
    pool = place.api.find("Pool", "default")
    assert pool is not None
    assert pool["status"]["conditions"][0]["reason"] == "Forbidden"
    assert "shop/orders" in (await place.registries.read("shop")).topics


async def test_one_bad_topic_and_one_good(place: Place) -> None:
    place.apply("Topic", "bad", partitions=1, table={"name": "elsewhere.t"})
    await served(place)
    assert ready(place, "Topic", "bad") == "False"
    assert ready(place, "Topic", "orders") == "True"


JOB = "/apis/batch/v1/namespaces/shop/jobs/tidewater-maintain-orders"
TOPIC = "/apis/tidewater.dev/v1alpha1/namespaces/shop/topics/orders"


def tell(place: Place, **figures: Any) -> None:
    """Have the worker report its table."""
    table = TableReport(table="shop.orders", snapshot_id=1, **figures)
    place.answers.said = {
        "w": WorkerReport(worker="w", topics=(TopicReport(name="orders", table=table),))
    }


def end_job(place: Place, condition: str, **words: Any) -> None:
    """Do what Kubernetes does when the driver has left its last words."""
    made = place.api.objects[JOB]
    name = made["metadata"]["name"]
    labelled = {**made["spec"]["template"]["metadata"]["labels"], "job-name": name}
    over = {"state": {"terminated": {"message": json.dumps(words)}}}
    pod = {"name": "driver", "namespace": "shop", "labels": labelled}
    status = {"containerStatuses": [over]}
    place.api.put({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "status": status})
    made["status"] = {"conditions": [{"type": condition, "status": "True"}]}


async def test_a_spark_job_is_started_once_and_its_result_is_told(place: Place) -> None:
    await served(place)
    place.api.objects[TOPIC]["metadata"]["annotations"] = {"tidewater.dev/maintain": "now"}
    tell(place, files=7, debt_files=0)
    await place.run()
    await place.run()
    assert (await place.run()).is_busy
    made = place.api.objects[JOB]
    assert place.api.objects[TOPIC]["status"]["maintenance"]["running"] == made["metadata"]["name"]
    end_job(place, "Complete", ok=True, topics=[{"topic": "shop/orders", "after": {"files": 2}}])
    await place.run()
    told = place.api.objects[TOPIC]["status"]["maintenance"]
    assert told["last"]["filesAfter"] == 2
    assert told["manual"] == "now"
    assert "running" not in told
    writes = place.api.writes
    for _ in range(3):
        await place.run()
    assert place.api.writes == writes, "the same word counts once"
    place.api.objects[TOPIC]["metadata"]["annotations"] = {"tidewater.dev/maintain": "again"}
    first = made["metadata"]["uid"]
    await place.run()  # the old one goes
    await place.run()
    assert place.api.objects[JOB]["metadata"]["uid"] != first


async def test_never_two_jobs_on_one_table(place: Place) -> None:
    """The job's name is the lease: the API server gives it once, whoever asks, however sick."""
    await served(place)
    tell(place, files=500, debt_files=500)
    await place.run()
    first = place.api.objects[JOB]["metadata"]["uid"]
    place.api.objects[TOPIC]["metadata"]["annotations"] = {"tidewater.dev/maintain": "now"}
    for _ in range(3):
        await place.run()
    # Another operator that knows nothing of it, as after a change of leaders.
    place.memory = Memory()
    place.api.objects[TOPIC]["status"]["maintenance"] = {}
    await place.run()
    jobs = [key for key in place.api.objects if "/jobs/" in key]
    assert jobs == [JOB]
    assert place.api.objects[JOB]["metadata"]["uid"] == first
    assert place.api.objects[TOPIC]["status"]["maintenance"]["running"]


async def test_what_cannot_be_mended_by_a_second_try_is_left_to_cool(place: Place) -> None:
    await served(place)
    tell(place, files=500, debt_files=500)
    await place.run()
    failed = place.api.objects[JOB]["metadata"]["uid"]
    end_job(place, "Failed", ok=False, retry=False, message="out of memory", topics=[])
    await place.run()
    told = place.api.objects[TOPIC]["status"]["maintenance"]
    assert (told["failures"], told["last"]["message"]) == (1, "out of memory")
    for _ in range(3):
        await place.run()
    assert place.api.objects[JOB]["metadata"]["uid"] == failed, "as sick as before, and left alone"
    past = "2026-01-01T00:00:00Z"  # an hour and more later
    told = place.api.objects[TOPIC]["status"]["maintenance"]
    told |= {"notBefore": past, "last": {**told["last"], "started": past}}
    await place.run()  # the old one goes
    await place.run()
    assert place.api.objects[JOB]["metadata"]["uid"] != failed


# ---- who leads


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.s = 1_000.0

    def now_us(self) -> int:
        return int(self.s * 1e6)

    def monotonic(self) -> float:
        return self.s


async def test_one_leads_and_the_other_follows_when_it_goes() -> None:
    api, clock = ApiServer(), Hands()
    first, second = (Leadership(api, clock, "tidewater", name, 15.0) for name in ("a", "b"))
    await first._round()
    await second._round()
    assert (first.is_ours, second.is_ours) == (True, False)
    for _ in range(10):  # it renews: nobody else gets it
        clock.s += 5
        await first._round()
        await second._round()
        assert (first.is_ours, second.is_ours) == (True, False)
    clock.s += 14  # and stops renewing
    await second._round()
    assert not second.is_ours
    clock.s += 2
    await second._round()
    assert (first.is_ours, second.is_ours) == (False, True)


async def test_a_leader_that_says_good_bye_is_followed_at_once() -> None:
    api, clock = ApiServer(), Hands()
    first, second = (Leadership(api, clock, "tidewater", name, 15.0) for name in ("a", "b"))
    await first._round()
    await first.release()
    await second._round()
    assert (first.is_ours, second.is_ours) == (False, True)


async def test_who_does_not_lead_writes_nothing(place: Place) -> None:
    """A pass that is under way when the lease runs out is as good as over."""
    await served(place)
    registry = await place.registries.read("shop")
    place.api.may_write = place.registries.may_write = lambda: False
    place.api.remove("/api/v1/namespaces/shop/services/tidewater")
    place.apply("Topic", "late", partitions=1)
    writes = place.api.writes
    await place.run()
    assert place.api.writes == writes
    assert (await place.registries.read("shop")).topics == registry.topics


# ---- nobody knows, and volumes


async def test_without_the_registry_nobody_knows(place: Place) -> None:
    await served(place)
    place.reconciler._registries = Registries(["http://127.0.0.1:9"], "x", Login())
    with pytest.raises(TidewaterError):
        await place.run()
    await place.reconciler._registries.close()
    for kind, name, known in (
        ("Topic", "orders", {"Maintained", "Paused"}),
        ("Subscription", "billing", {"Paused"}),
        ("Pool", "default", {"VolumeGrown", "Paused"}),
    ):
        found = place.api.find(kind, name)
        assert found is not None
        told = {c["type"]: (c["status"], c["reason"]) for c in found["status"]["conditions"]}
        others = {type_: said for type_, said in told.items() if type_ not in known}
        assert known < told.keys()
        assert set(others.values()) == {("Unknown", "RegistryAway")}, kind


SET = "/apis/apps/v1/namespaces/shop/statefulsets/tidewater-default"


async def test_larger_volumes_make_the_set_again_around_its_pods(place: Place) -> None:
    await served(place)
    before = place.api.objects[SET]
    place.apply("Pool", "default", replicas=1, storage={"size": "20Gi"})
    await place.run()
    assert SET not in place.api.objects
    assert place.api.find("Pod", "tidewater-default-0") is not None
    await place.run()
    after = place.api.objects[SET]
    (template,) = after["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"]["requests"] == {"storage": "20Gi"}
    assert after["spec"]["template"] == before["spec"]["template"], "no pod is started anew"
    # Smaller is refused, and changes nothing.
    place.apply("Pool", "default", replicas=1, storage={"size": "5Gi"})
    await place.run()
    assert place.api.objects[SET]["metadata"]["uid"] == after["metadata"]["uid"]
    pool = place.api.find("Pool", "default")
    assert pool is not None
    grown = next(c for c in pool["status"]["conditions"] if c["type"] == "VolumeGrown")
    assert grown["reason"] == "CannotShrink"
