"""Jobs over all namespaces: what is started, what is refused, and who waits for whom."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidewater_coordination.port import RegisteredTopic, Registry, TopicPhase
from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.crd.topic import Topic, TopicSpec
from tidewater_operator.cluster.api import ApiRefused
from tidewater_operator.cluster.events import Events
from tidewater_operator.conditions import Told
from tidewater_operator.maintenance.keep import Kept, Maintenance
from tidewater_operator.observed import Observed, Snapshot
from tidewater_operator.plan import plan
from tidewater_operator.report import TableReport, TopicReport, WorkerReport
from tidewater_operator.settings import OperatorSettings
from tidewater_operator.times import format_time
from tidewater_testing.api_server import ApiServer
from tidewater_testing.namespace import SETTINGS, manifest

NOW = datetime(2026, 3, 5, 12, 20, 30, tzinfo=UTC)
USED = SETTINGS.model_copy(update={"pipeline_image": "p:1"})


class Cluster:
    """Namespaces with topics whose tables are all unwell."""

    def __init__(self, settings: OperatorSettings = USED) -> None:
        self.settings, self.now = settings, NOW
        self.api = ApiServer()
        events = Events(self.api, SystemClock(), SystemIds(), "test")
        self.maintenance = Maintenance(settings, self.api, events)
        self.statuses: dict[tuple[str, str], Any] = {}
        self.annotations: dict[str, str] = {}
        self.pods: list[dict[str, Any]] = []
        self.phase = TopicPhase.ACTIVE

    def seen(self, namespace: str, topics: int) -> Observed:
        names = [f"orders-{number}" for number in range(topics)]
        manifests = []
        for name in names:
            found = manifest("Topic", name, f"{namespace}-{name}", {})
            found["metadata"] |= {"namespace": namespace, "annotations": self.annotations}
            found["status"] = {"maintenance": self.statuses.get((namespace, name), {})}
            manifests.append(found)
        pool = manifest("Pool", "default", "pool", {})
        pool["metadata"]["namespace"] = namespace
        table = TableReport(table="x", snapshot_id=1, files=200, debt_files=200)
        said = [
            TopicReport(name, uuid=f"{namespace}-{name}", freshness_ms=1.0, table=table)
            for name in names
        ]
        registered = {
            f"{namespace}/{name}": RegisteredTopic(
                f"{namespace}/{name}", f"{namespace}-{name}", TopicSpec().to_json(), self.phase
            )
            for name in names
        }
        root = f"/apis/batch/v1/namespaces/{namespace}/jobs/"
        jobs = [one for path, one in self.api.objects.items() if path.startswith(root)]
        return Observed(
            cluster=Snapshot(
                namespace,
                topics=tuple(manifests),
                pools=(pool,),
                jobs=tuple(jobs),
                pods=tuple(self.pods),
            ),
            registry=Registry(1, registered, {}, {}, {}, {}),
            now=self.now,
            reports={"w": WorkerReport("w", topics=tuple(said))},
        )

    async def keep(self, namespace: str = "shop", topics: int = 1, *, full: bool = True) -> Kept:
        seen = self.seen(namespace, topics)
        kept = await self.maintenance.keep(seen, plan(seen, self.settings), full=full)
        for name, (status, _) in kept.statuses.items():
            Topic.model_validate({**seen.cluster.topics[0], "status": {"maintenance": status}})
            self.statuses[namespace, name] = status
        return kept

    def jobs(self) -> list[str]:
        return [path for path in self.api.objects if "/jobs/" in path]


def told(kept: Kept) -> Told:
    return kept.of("orders-0")[1]


async def test_a_job_that_is_refused_is_a_failure_and_waits() -> None:
    cluster = Cluster()
    cluster.api.refuse["/jobs"] = 403
    for failures, minutes in ((1, 5), (2, 10), (3, 20)):
        kept = await cluster.keep()
        assert (told(kept).status, told(kept).reason) == ("False", "JobRefused")
        assert "/jobs is refused" in told(kept).message
        status = cluster.statuses["shop", "orders-0"]
        assert status["failures"] == failures
        writes = cluster.api.writes
        for full in (False, True, False):  # the next beats say the same, and try nothing
            again = await cluster.keep(full=full)
            assert (told(again), again.is_due) == (told(kept), False)
        assert cluster.api.writes == writes
        cluster.now += timedelta(minutes=max(minutes, 15))
    cluster.api.refuse.clear()
    assert (await cluster.keep()).is_busy
    assert len(cluster.jobs()) == 1


async def test_a_persons_word_that_is_refused_counts_once() -> None:
    cluster = Cluster()
    cluster.api.refuse["/jobs"] = 403
    cluster.annotations = {"tidewater.dev/maintain": "now"}
    await cluster.keep()
    assert cluster.statuses["shop", "orders-0"]["manual"] == "now"
    assert not (await cluster.keep(full=False)).is_due
    cluster.api.refuse.clear()
    await cluster.keep()
    assert cluster.jobs() == []
    cluster.annotations = {"tidewater.dev/maintain": "again"}
    await cluster.keep()
    assert len(cluster.jobs()) == 1


async def test_disabled_is_a_persons_wish_alone() -> None:
    cluster = Cluster()
    cluster.phase = TopicPhase.DELETING
    assert told(await cluster.keep()) == Told("Maintained", "Unknown", "NotServed")
    wish = USED.maintenance.model_copy(update={"enabled": False})
    cluster = Cluster(USED.model_copy(update={"maintenance": wish}))
    assert told(await cluster.keep()) == Told("Maintained", "Unknown", "Disabled")


# ---- places


async def test_one_namespace_never_has_all_places() -> None:
    cluster = Cluster()
    assert cluster.settings.maintenance.max_jobs == 4
    await cluster.keep("greedy", 4)
    assert len(cluster.jobs()) == 2
    assert not (await cluster.keep("greedy", 4, full=False)).is_due
    await cluster.keep("shop")
    assert len(cluster.jobs()) == 3
    one = USED.maintenance.model_copy(update={"max_jobs": 1})
    cluster = Cluster(USED.model_copy(update={"maintenance": one}))
    await cluster.keep()
    assert len(cluster.jobs()) == 1, "half of one place is a place"


def pending(cluster: Cluster, **status: Any) -> dict[str, Any]:
    """Return a driver's pod as Kubernetes has it a moment after the job."""
    (path,) = cluster.jobs()
    job = cluster.api.objects[path]
    job["metadata"]["creationTimestamp"] = format_time(NOW)
    job["status"] = {"startTime": format_time(NOW), "active": 1}
    labels = {**job["spec"]["template"]["metadata"]["labels"], "job-name": job["metadata"]["name"]}
    meta = {"name": "driver", "creationTimestamp": format_time(NOW), "labels": labels}
    return {"metadata": meta, "status": {"phase": "Pending", **status}}


UNSCHEDULABLE = {
    "conditions": [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient memory"}
    ]
}


async def test_a_driver_that_does_not_start_is_told_of_and_gives_its_place_back() -> None:
    cluster = Cluster()
    await cluster.keep()
    cluster.pods = [pending(cluster, **UNSCHEDULABLE)]
    cluster.now = NOW + timedelta(seconds=30)
    assert told(await cluster.keep()).reason == "NotYet"  # nodes and images take a moment
    cluster.now = NOW + timedelta(minutes=2)
    kept = await cluster.keep()
    assert (told(kept).status, told(kept).reason) == ("False", "DriverPending")
    assert "Insufficient memory" in told(kept).message
    assert told(await cluster.keep(full=False)) == told(kept), "and again at the next beat"
    cluster.now = NOW + timedelta(minutes=10)
    kept = await cluster.keep()
    assert (told(kept).status, told(kept).reason) == ("False", "JobFailed")
    assert "did not start within 10 minutes: Unschedulable: 0/3 nodes" in told(kept).message
    status = cluster.statuses["shop", "orders-0"]
    assert (status["failures"], "running" in status, "waiting" in status) == (1, False, False)
    assert cluster.jobs() == []
    cluster.pods = []
    kept = await cluster.keep()
    assert (told(kept).reason, kept.is_busy) == ("JobFailed", False)
    assert cluster.jobs() == []
    cluster.now += timedelta(minutes=16)
    await cluster.keep()
    assert len(cluster.jobs()) == 1


async def test_a_driver_that_starts_late_is_no_failure() -> None:
    cluster = Cluster()
    await cluster.keep()
    driver = pending(cluster, **UNSCHEDULABLE)
    cluster.pods = [driver]
    cluster.now = NOW + timedelta(minutes=9)
    assert told(await cluster.keep()).reason == "DriverPending"
    driver["status"] = {"phase": "Running"}
    cluster.now = NOW + timedelta(minutes=30)
    assert told(await cluster.keep()).reason == "NotYet"
    assert len(cluster.jobs()) == 1


async def test_a_job_for_which_no_pod_can_be_made() -> None:
    cluster = Cluster()
    await cluster.keep()
    pending(cluster)
    (path,) = cluster.jobs()
    cluster.now = NOW + timedelta(minutes=30)
    cluster.api.objects[path]["status"] = {}  # held back by a queue: it has not begun
    assert told(await cluster.keep()).reason == "NotYet"
    cluster.api.objects[path]["status"] = {"startTime": format_time(NOW)}
    reasons = await looked_at(cluster, minutes=9)
    assert reasons[0] == "NotYet"
    assert set(reasons[1:]) == {"DriverPending"}
    cluster.now += timedelta(minutes=1)
    kept = await cluster.keep()
    assert told(kept).reason == "JobFailed"
    assert "no pod could be made" in told(kept).message
    assert cluster.jobs() == []


async def looked_at(cluster: Cluster, minutes: int) -> list[str]:
    """Have it looked at now and every minute; return what was said of it."""
    found = [told(await cluster.keep()).reason]
    for _ in range(minutes):
        cluster.now += timedelta(minutes=1)
        found.append(told(await cluster.keep()).reason)
    return found


async def test_a_job_between_two_drivers_is_no_failure() -> None:
    """A driver that was drained leaves no pod for a while, and its Job began long ago."""
    cluster = Cluster()
    await cluster.keep()
    driver = pending(cluster)
    driver["status"] = {"phase": "Running"}
    (path,) = cluster.jobs()
    job = cluster.api.objects[path]
    cluster.now = NOW + timedelta(minutes=30)
    for _ in range(2):  # each such time counts for itself
        cluster.pods, job["status"] = [driver], {"startTime": format_time(NOW), "active": 1}
        assert await looked_at(cluster, minutes=6) == ["NotYet"] * 7
        cluster.pods, job["status"] = [], {"startTime": format_time(NOW)}
        reasons = await looked_at(cluster, minutes=6)
        assert reasons == ["NotYet", *["DriverPending"] * 6]
    # Nobody looked for an hour, as while another operator led: it may have had a driver.
    cluster.now += timedelta(hours=1)
    assert (await looked_at(cluster, minutes=1))[0] == "NotYet"
    assert cluster.jobs() == [path]
    cluster.pods = [driver]
    await cluster.keep()
    assert cluster.maintenance._podless == {"shop": {}}


async def test_jobs_that_another_operator_started_have_their_places() -> None:
    """After a start or a change of leader each namespace counted for itself, from nothing."""
    cluster = Cluster()
    for name in ("one", "two"):
        await cluster.keep(name, 2)
    assert len(cluster.jobs()) == 4
    events = Events(cluster.api, SystemClock(), SystemIds(), "next")
    cluster.maintenance = Maintenance(cluster.settings, cluster.api, events)
    assert not (await cluster.keep("three")).is_busy
    assert len(cluster.jobs()) == 4
    for path in cluster.jobs()[:2]:
        cluster.api.objects[path]["status"] = {
            "conditions": [{"type": "Complete", "status": "True"}]
        }
    await cluster.keep("one", 2)
    await cluster.keep("three")
    assert len(cluster.jobs()) == 5, "those that have ended take none"


async def test_an_old_list_of_jobs_gives_no_places_back() -> None:
    """A pass that is not full has the jobs of the one before it."""
    cluster = Cluster()
    old = cluster.seen("shop", 2)
    await cluster.keep("shop", 2)
    kept = await cluster.maintenance.keep(old, plan(old, cluster.settings), full=False)
    assert kept.is_busy
    await cluster.keep("greedy", 2)
    await cluster.keep("late")
    assert len(cluster.jobs()) == 4


async def test_a_namespace_that_cannot_be_looked_at_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was deleted, and our rights in it with it."""
    cluster = Cluster(USED.model_copy(update={"watch_namespaces": ("gone", "shop")}))
    listed = cluster.api.list

    async def refused(kind: Any, namespace: str | None = None, labels: str = "") -> Any:
        if namespace == "gone":
            raise ApiRefused(403, "Forbidden", "jobs.batch is forbidden")
        return await listed(kind, namespace, labels)

    monkeypatch.setattr(cluster.api, "list", refused)
    await cluster.keep("shop")
    assert len(cluster.jobs()) == 1


async def test_two_namespaces_do_not_both_take_the_last_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = USED.maintenance.model_copy(update={"max_jobs": 1})
    cluster = Cluster(USED.model_copy(update={"maintenance": one}))
    create = cluster.api.create

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(0)
        return await create(*args)

    monkeypatch.setattr(cluster.api, "create", slow)
    await asyncio.gather(cluster.keep("shop"), cluster.keep("lake"))
    assert len(cluster.jobs()) == 1


async def test_a_job_whose_name_is_still_taken_is_looked_at_again_soon() -> None:
    cluster = Cluster()
    await cluster.keep()
    (path,) = cluster.jobs()
    cluster.api.objects[path]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert not (await cluster.keep()).is_busy, "it has ended"
    cluster.now += timedelta(hours=2)
    kept = await cluster.keep()
    assert (cluster.jobs(), kept.is_busy) == ([], True)
    await cluster.keep()
    assert len(cluster.jobs()) == 1
