"""What a run has written, looked after and audited by Spark. The last module: it reads them all."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest

from e2e import faults, guarantees, upkeep
from e2e.history import flush, gather
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.tenant import PARTITIONS, Tenant, forwarded, make_user, pool, topic, wait_ready
from e2e.traffic import BackgroundTraffic, gentle
from e2e.web import produce
from tidewater_testing.evidence import load_table

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("pipeline_image"),
    # pyiceberg, which makes tables old here, says that it does not know Spark's row groups.
    pytest.mark.filterwarnings("ignore:Parquet writer option:UserWarning"),
]
JOB = "tidewater-maintain-orders"
DRIVERS = f"--selector=job-name={JOB}"
EXECUTORS = "--selector=spark-role=executor"
SMALL_FILES = 120
"""More than the 100 at which a table's health asks for a job."""
NEVER = "0 0 31 2 *"
UPKEEP = {
    "schedule": NEVER,  # health alone can ask
    "targetFileSize": "1Mi",
    "spark": {
        "executors": 1,
        "executorMemory": "512Mi",
        "driverMemory": "512Mi",
        "localBelow": "0",
    },
}
STEP_S_MAX = 300.0


@dataclass(frozen=True)
class Place:
    """A tenant whose tables the tests themselves may rewrite: they have no time partitions."""

    tenant: Tenant
    planted: str

    @property
    def kubectl(self) -> Kubectl:
        return self.tenant.kubectl

    def pods(self, selector: str) -> list[Object]:
        found: list[Object] = self.kubectl.get("pods", selector)["items"]
        return found

    def maintenance(self, name: str = "orders") -> Object:
        status: Object = self.kubectl.get(f"topic/{name}").get("status", {}).get("maintenance", {})
        return status

    def last_run(self, name: str, trigger: str) -> Object:
        """Wait for the end of a job that was started for this reason."""

        def ended() -> bool:
            return str(self.maintenance(name).get("last", {}).get("trigger")) == trigger

        wait_for(ended, STEP_S_MAX, f"a job of {name} by {trigger}", interval_s=1.0)
        last: Object = self.maintenance(name)["last"]
        return last


@pytest.fixture(scope="module")
def place(namespace: Kubectl, catalog: dict[str, str]) -> Iterator[Place]:
    """Make a pool and two topics: one for upkeep, one to be damaged."""
    flat: Object = {"partitionBy": []}
    orders = topic("orders", partitions=PARTITIONS, table=flat, maintenance=UPKEEP)
    planted = topic("planted", partitions=1, table=flat)
    namespace.apply([pool(1), orders, planted])
    token = make_user(namespace, "tester")
    wait_ready(namespace, "topic/orders", "topic/planted")
    with forwarded(namespace, token) as door:
        tenant = Tenant(namespace, door, f"{namespace.namespace}/orders", catalog)
        yield Place(tenant, f"{namespace.namespace}/planted")


def test_health_starts_a_job_that_outlives_driver_and_executor(place: Place) -> None:
    """Small files alone start it; its driver dies in mid-rewrite, then the next one's executor."""
    tenant = place.tenant
    with tenant.load("old-") as before:
        before.wait_for_more(1_000, 60)
    flush(tenant.door, tenant.topic)
    upkeep.age(load_table(tenant.catalog, tenant.topic), hours=3, files=SMALL_FILES)
    assert _old_files(tenant) >= SMALL_FILES
    began = time.monotonic()
    # Messages come while Spark is at work; the machine's cores are for Spark.
    pace = gentle(tenant.door, tenant.topic, PARTITIONS, prefix="new-", pause_s=0.25)
    with BackgroundTraffic(replace(pace, senders=1)) as traffic:
        first, executors = _driver_at_work(place, but=None)
        at_work_s = time.monotonic() - began
        assert faults.delete_pod(place.kubectl, first, grace=False), "the first driver had ended"
        wait_for(lambda: not _alive(place, executors), 120, "the executors to go with their driver")
        second, _ = _driver_at_work(place, but=first)
        _kill_an_executor(place)
        wait_for(lambda: _is_over(place), STEP_S_MAX, "the second driver to end", interval_s=1.0)
    print(f"\nat work after {at_work_s:.0f} s, killed, done after {time.monotonic() - began:.0f} s")
    said = place.kubectl("logs", second)
    job = place.kubectl.get("job", JOB)
    assert job["metadata"]["annotations"]["tidewater.dev/trigger"] == "Health"
    last = place.maintenance()["last"]
    assert (last["trigger"], last["outcome"]) == ("Health", "Succeeded"), last
    assert "compact: " in last["steps"], last
    assert last["filesBefore"] > 0 < last["seconds"], last
    drivers = place.pods(DRIVERS)
    assert [pod["status"]["phase"] for pod in drivers] == ["Succeeded"]
    assert [pod["metadata"]["name"] for pod in drivers] == [second], said[-2000:]
    wait_for(lambda: not place.pods(EXECUTORS), 120, "the executors to go")
    assert _old_files(tenant) <= 2

    flush(tenant.door, tenant.topic)
    words = ["orphans", "--topic", tenant.topic, "--delete", "--grace", "1s", "--settle", "1s"]
    words.append("--force")  # nobody writes here now
    report = upkeep.run_like(place.kubectl, job, "orphans", words)
    table = load_table(tenant.catalog, tenant.topic)
    assert upkeep.unnamed(table, tenant.catalog) == [], report
    traffic.record.acked.extend(before.record.acked)
    history = gather(tenant.door, tenant.topic, traffic.record, tenant.catalog, PARTITIONS)
    guarantees.hold(history)


def test_a_person_and_the_clock_start_jobs(place: Place) -> None:
    """An annotation starts one at once; a schedule, when its time comes and it is worth it."""
    kubectl, catalog = place.kubectl, place.tenant.catalog
    name = f"{kubectl.namespace}/asked"
    flat: Object = {"partitionBy": []}
    spark = {"driverMemory": "512Mi"}
    upkept: Object = {"schedule": NEVER, "targetFileSize": "1Mi", "spark": spark}
    kubectl.apply([topic("asked", partitions=1, table=flat, maintenance=upkept)])
    wait_ready(kubectl, "topic/asked")
    _send(place, name, 400)
    kubectl("annotate", "topic/asked", "tidewater.dev/maintain=today", "--overwrite")
    last = place.last_run("asked", "Manual")
    assert last["outcome"] == "Succeeded", last
    assert place.maintenance("asked")["manual"] == "today", "once for each word"

    upkeep.age(load_table(catalog, name), hours=3, files=20)
    _send(place, name, 1)
    schedule = {"spec": {"maintenance": {"schedule": "* * * * *"}}}
    kubectl("patch", "topic/asked", "--type=merge", f"--patch={json.dumps(schedule)}")
    last = place.last_run("asked", "Schedule")
    assert last["outcome"] == "Succeeded", last
    assert "compact: done" in last["steps"], last
    assert last["filesAfter"] < last["filesBefore"] - 10, last
    kubectl("delete", "topic/asked", "--timeout=120s")


def _send(place: Place, name: str, count: int) -> None:
    messages = [{"value": f"p{n} ".ljust(200, "x")} for n in range(count)]
    produce(place.tenant.door, name, messages, partition=0)
    flush(place.tenant.door, name)


def _old_files(tenant: Tenant) -> int:
    """Count the files with rows of hours that have closed."""
    before = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    table = load_table(tenant.catalog, tenant.topic)
    return sum(1 for _ in table.scan(f"tw_time < '{before}'").plan_files())


def _driver_at_work(place: Place, but: str | None) -> tuple[str, list[str]]:
    """Wait until a driver rewrites files with executors, and return the names of their pods."""
    found: list[tuple[str, list[str]]] = []

    def rewriting() -> bool:
        executors = _executors(place)
        for pod in place.pods(DRIVERS):
            name = str(pod["metadata"]["name"])
            # One that is about to begin has nothing to say yet.
            is_running = pod["status"]["phase"] == "Running" and name != but
            if executors and is_running and "rewriting" in place.kubectl("logs", name):
                found.append((name, executors))
        return bool(found)

    wait_for(rewriting, STEP_S_MAX, "a driver to rewrite files", interval_s=0.2)
    return found[0]


def _executors(place: Place) -> list[str]:
    """Return the executors that are at work: one that has ended stays a moment."""
    return [
        str(pod["metadata"]["name"])
        for pod in place.pods(EXECUTORS)
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]


def _kill_an_executor(place: Place) -> None:
    """Kill one of those at work; the one just seen may be at its end, and another in its place."""
    found: list[str] = []

    def killed() -> bool:
        names = _executors(place)
        found.extend(n for n in names if faults.delete_pod(place.kubectl, n, grace=False))
        return bool(found) or _is_over(place)

    wait_for(killed, 60, "an executor to kill")
    assert found, "the driver ended before one of its executors could be killed"
    print(f"\nexecutors killed: {found}")


def _alive(place: Place, names: list[str]) -> list[str]:
    return [
        pod["metadata"]["name"] for pod in place.pods(EXECUTORS) if pod["metadata"]["name"] in names
    ]


def _is_over(place: Place) -> bool:
    conditions = place.kubectl.get("job", JOB)["status"].get("conditions", ())
    failed = [each for each in conditions if each["type"] == "Failed"]
    assert not failed, failed
    return bool(place.maintenance().get("last"))


def _model(place: Place) -> Object:
    """Return the Job that health started; without that test (`K=audit`), one by a person's word."""
    made = [each["metadata"]["name"] for each in place.kubectl.get("jobs")["items"]]
    if JOB not in made:
        _send(place, place.tenant.topic, 100)
        place.kubectl("annotate", "topic/orders", "tidewater.dev/maintain=audit", "--overwrite")
        place.last_run("orders", "Manual")
    return place.kubectl.get("job", JOB)


def test_audit_of_everything_that_the_run_has_written(place: Place) -> None:
    """No gap and no row twice in any table of the run; and what was planted is found."""
    tenant = place.tenant
    job = _model(place)
    produce(tenant.door, place.planted, [{"value": f"p{n}"} for n in range(100)], partition=0)
    flush(tenant.door, place.planted)
    planted = load_table(tenant.catalog, place.planted)
    doubled = planted.scan("tw_offset >= 10 and tw_offset <= 12").to_arrow()
    planted.delete("(tw_offset >= 30 and tw_offset <= 40) or tw_offset = 77")
    planted.append(doubled)

    # A cluster that was kept has those that earlier runs have damaged, too.
    topics = sorted(
        name
        for name, _ in upkeep.topics_with_rows(tenant.catalog)
        if name == place.planted or not name.endswith("/planted")
    )
    assert {tenant.topic, place.planted} <= set(topics), topics
    words = ["audit", *(word for name in topics for word in ("--topic", name))]
    reports = upkeep.run_like(place.kubectl, job, "audit", words)["reports"]
    assert sorted(each["topic"] for each in reports) == topics
    rows = sum(each.get("rows_read", 0) for each in reports)
    print(f"\naudited {rows:,} rows of {len(topics)} tables: {', '.join(topics)}")
    damaged = {each["topic"]: each for each in reports if each["outcome"] != "done"}
    assert list(damaged) == [place.planted], json.dumps(damaged)
    findings = damaged[place.planted]["findings"]
    assert {(f["kind"], f["first"], f["last"]) for f in findings} == {
        ("twice", 10, 12),
        ("missing", 30, 40),
        ("missing", 77, 77),
    }
