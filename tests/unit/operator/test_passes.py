"""Whole passes: a real etcd, workers by their sessions alone, the Kubernetes API in memory."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tidewater_coordination.etcd.login import Login
from tidewater_coordination.port import TopicPhase
from tidewater_core.errors import Retryable, TidewaterError
from tidewater_operator.cluster.api import LEASE, POD
from tidewater_operator.cluster.api import TOPIC as TOPIC_KIND
from tidewater_operator.cluster.lease import Leadership
from tidewater_operator.conditions import status_of
from tidewater_operator.reconcile import Memory
from tidewater_operator.registry import Registries
from tidewater_operator.report import TableReport, TopicReport, WorkerReport
from tidewater_operator.settings import AuthMode
from tidewater_testing.api_server import ApiServer
from tidewater_testing.namespace import SETTINGS
from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.place import Place, served


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


@pytest.fixture
async def place(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    found = Place(etcd, request.node.name)
    yield found
    await found.close()


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


async def test_who_says_too_much_is_not_asked_again_at_once(place: Place) -> None:
    await served(place)
    place.answers.said = {"another": WorkerReport("another")}
    assert (await place.run()).is_silent
    place.answers._too_large["shop"] = frozenset(place.workers)
    assert not (await place.run()).is_silent
    found = place.api.find("Topic", "orders")
    assert found is not None
    assert found["status"]["conditions"][0]["reason"] == "ReportTooLarge"


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


@pytest.mark.parametrize("is_gone", [True, False])
async def test_jobs_of_a_namespace_that_ends_hold_no_place(place: Place, is_gone: bool) -> None:
    """Else four branches that were deleted at the wrong moment stop everybody's upkeep."""
    await served(place)
    tell(place, files=500, debt_files=500)
    await place.run()
    maintenance = place.reconciler._maintenance
    assert maintenance._running == {"shop": 1}
    if is_gone:
        place.api.objects.clear()
    else:
        place.api.objects["/api/v1/namespaces/shop"]["metadata"]["deletionTimestamp"] = "now"
    await place.run()
    assert maintenance._running == {}


async def test_nor_do_those_of_a_namespace_that_is_empty(place: Place) -> None:
    maintenance = place.reconciler._maintenance
    maintenance._running["shop"] = 1
    assert (await place.run()).is_empty
    assert maintenance._running == {}


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


async def test_a_lease_that_says_nothing_is_free() -> None:
    """Somebody else may have made it; an operator that cannot read it would end at each start."""
    api, clock = ApiServer(), Hands()
    meta = {"name": "tidewater-operator", "namespace": "tidewater"}
    await api.create(LEASE, "tidewater", {"metadata": meta})
    leader = Leadership(api, clock, "tidewater", "a", 15.0)
    await leader._round()
    assert leader.is_ours
    await leader.release()


async def test_a_good_bye_is_not_taken_back_by_a_renewal_that_is_under_way() -> None:
    api, clock = ApiServer(), Hands()
    first, second = (Leadership(api, clock, "tidewater", name, 0.05) for name in ("a", "b"))
    await first._round()
    get, asked = api.get, asyncio.Event()

    async def slow(*args: Any) -> Any:
        found = await get(*args)
        asked.set()
        await asyncio.sleep(0.05)
        return found

    api.get = slow  # type: ignore[method-assign,assignment]
    renewing = asyncio.create_task(first.run())
    await asked.wait()
    await first.release()
    await asyncio.wait([renewing], timeout=5)
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


async def test_only_the_lease_itself_is_taken_without_leading() -> None:
    api = ApiServer()
    api.may_write = lambda: False
    leadership = Leadership(api, Hands(), "tidewater", "a", 15.0)
    await leadership._round()
    assert leadership.is_ours
    for kind, namespace, name in (
        (POD, "leases", "x"),
        (TOPIC_KIND, "shop", "leases"),
        (LEASE, "tidewater", "another"),
        (LEASE, "shop", "tidewater-operator"),
    ):
        meta = {"metadata": {"name": name, "namespace": namespace}}
        with pytest.raises(Retryable, match="another operator may lead"):
            await api.apply({"apiVersion": kind.api, "kind": kind.name, **meta})
    assert api.writes == 0


async def test_without_the_registry_nobody_knows(place: Place) -> None:
    await served(place)
    place.reconciler._registries = Registries(["http://127.0.0.1:9"], "x", Login(), cluster="c")
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


async def test_volumes_that_the_api_server_writes_otherwise_are_as_large(place: Place) -> None:
    """It says 1Pi for 1024Ti: the set was made again and again, at each pass."""
    place.apply("Pool", "default", replicas=1, storage={"size": "1024Ti"})
    await served(place)
    claims = place.api.objects[SET]["spec"]["volumeClaimTemplates"]
    claims[0]["spec"]["resources"]["requests"]["storage"] = "1Pi"
    claim = place.api.find("PersistentVolumeClaim", "data-tidewater-default-0")
    assert claim is not None
    claim["spec"]["resources"]["requests"]["storage"] = "1Pi"
    uid = place.api.objects[SET]["metadata"]["uid"]
    await place.run()
    assert place.api.objects[SET]["metadata"]["uid"] == uid
    writes = place.api.writes
    await place.run()
    assert place.api.writes == writes


async def test_one_pool_that_cannot_be_read_takes_nothing_from_the_others(place: Place) -> None:
    """G6: its workers run on, with the account and the Secrets that all of them share."""
    settings = SETTINGS.model_copy(
        update={
            "catalog_secret": "catalog",
            "auth": SETTINGS.auth.model_copy(update={"mode": AuthMode.KUBERNETES}),
        }
    )
    secret = {"metadata": {"name": "catalog", "namespace": "tidewater"}, "data": {"KEY": "eA=="}}
    place.api.put({"apiVersion": "v1", "kind": "Secret", **secret})
    place.use(settings)
    place.apply("Pool", "default", replicas=1)
    other = place.apply("Pool", "other", replicas=1)
    await served(place)
    place.apply("Pool", "default", replicas=1, limits={"nonsense": 1})
    tell(place, files=500, debt_files=500)
    await place.run()
    assert ready(place, "Pool", "default") == "False"
    shared = [
        ("ServiceAccount", "tidewater-worker"),
        ("Service", "tidewater"),
        ("Secret", "tidewater-catalog"),
        ("RoleBinding", "tidewater-worker"),
        ("ServiceAccount", "tidewater-pipeline"),
    ]
    for kind, name in shared:
        found = place.api.find(kind, name)
        assert found is not None, name
        owners = [one["name"] for one in found["metadata"]["ownerReferences"]]
        assert owners == ["default", "other"], name
    place.api.remove(other)  # and what belongs to it alone
    assert all(place.api.find(kind, name) for kind, name in shared)
    place.api.remove("/api/v1/namespaces/shop/services/tidewater")
    await place.run()
    assert all(place.api.find(kind, name) for kind, name in shared), "also with none to be read"


LABELS = {"app.kubernetes.io/managed-by": "Helm"}
THEIRS: list[dict[str, Any]] = [
    {
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": name, "namespace": "shop", "labels": LABELS},
        "spec": {"selector": {"app": "theirs"}},
    }
    for api, kind, name in (
        ("v1", "Service", "tidewater-etcd"),
        ("apps/v1", "StatefulSet", "tidewater-etcd"),
        ("v1", "Service", "tidewater-mine-workers"),
        ("v1", "ConfigMap", "tidewater-operator"),
    )
]


async def test_what_somebody_else_made_under_our_names_stays_theirs(place: Place) -> None:
    """G6: a Pool `etcd` took the Service over by which everybody finds etcd."""
    paths = [place.api.put(theirs) for theirs in THEIRS]
    before = [place.api.objects[path] for path in paths]
    for pool in ("etcd", "mine", "operator"):
        place.apply("Pool", pool, replicas=1)
    await served(place)
    await place.run()
    assert [place.api.objects[path] for path in paths] == before
    for pool in ("etcd", "mine", "operator"):
        found = place.api.find("Pool", pool)
        assert found is not None
        (told,) = [one for one in found["status"]["conditions"] if one["type"] == "Ready"]
        assert (told["status"], told["reason"]) == ("False", "NameTaken")
        assert "Helm" in told["message"]
    assert place.api.find("StatefulSet", "tidewater-mine") is None
    assert ready(place, "Topic", "orders") == "True", "the other pools are served"


async def test_an_account_that_a_person_made_first_is_taken(place: Place) -> None:
    """It has a cloud's role by its annotations, which stay."""
    notes = {"eks.amazonaws.com/role-arn": "arn"}
    meta = {"name": "tidewater-worker", "namespace": "shop", "annotations": notes}
    place.api.put({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    await served(place)
    assert ready(place, "Pool", "default") == "True"
    found = place.api.find("ServiceAccount", "tidewater-worker")
    assert found is not None
    assert found["metadata"]["annotations"].items() > notes.items()


async def test_what_is_ours_is_known_without_its_label(place: Place) -> None:
    await served(place)
    service = place.api.objects["/api/v1/namespaces/shop/services/tidewater"]
    service["metadata"]["labels"] = {}
    await place.run()
    assert ready(place, "Pool", "default") == "True"
    labels = place.api.objects["/api/v1/namespaces/shop/services/tidewater"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/managed-by"] == "tidewater-operator"
