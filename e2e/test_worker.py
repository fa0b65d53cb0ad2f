"""A worker from the image, with a volume: it serves, and it loses nothing when it is killed."""

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from e2e import faults, guarantees
from e2e.history import History, flush, gather, read_partition
from e2e.install import ETCD, OPERATOR, SEAWEEDFS, System
from e2e.kubectl import Object, wait_for
from e2e.tenant import PARTITIONS, WORKER, WORKER_POD, Tenant, run_job
from e2e.traffic import BackgroundTraffic
from e2e.web import expect, get, insist, produce
from tidewater_testing.checker import AckedBatch
from tidewater_testing.evidence import Evidence
from tidewater_testing.traffic import Record

READY_S_MAX = 5.0
STARTS_MAX = 8
pytestmark = pytest.mark.timeout(420)


class Course:
    """All that the load tests send to one topic: each holds what it sent, and the end holds all.

    A reader of everything, and of the table, after each of them would read most of it eight times.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._acked: list[AckedBatch] = []
        self._read = dict.fromkeys(range(PARTITIONS), 0)

    def hold(self, traffic: BackgroundTraffic) -> None:
        """Read what came since the last time: nothing is missing, doubled or out of order."""
        door, name = self._tenant.door, self._tenant.topic
        acked = tuple(traffic.record.acked)
        self._acked.extend(acked)
        flush(door, name)
        stream = {p: tuple(read_partition(door, name, p, at)) for p, at in self._read.items()}
        found: list[str] = []
        for partition, messages in stream.items():
            found.extend(guarantees.one_stream(partition, messages, self._read[partition]))
            self._read[partition] += len(messages)
        found.extend(guarantees.read_what_was_acked(History(name, acked, Evidence({}), stream)))
        guarantees.raise_all(found)

    def hold_all(self) -> None:
        """Read everything, and the table: of no test anything was lost by a later one."""
        door, name, catalog = self._tenant.door, self._tenant.topic, self._tenant.catalog
        guarantees.hold(gather(door, name, Record(acked=self._acked), catalog, PARTITIONS))


@pytest.fixture(scope="module")
def course(tenant: Tenant) -> Iterator[Course]:
    """Give what remembers the load; it is held as a whole when the module ends."""
    made = Course(tenant)
    yield made
    made.hold_all()


def test_produce_and_read(tenant: Tenant) -> None:
    messages = [{"key": f"k{i}", "value": f"hello {i}"} for i in range(30)]
    acks = produce(tenant.door, tenant.topic, messages)
    assert sum(ack["count"] for ack in acks) == len(messages)
    read = []
    path = f"/v1/{tenant.topic}/messages?offset=0&partition="
    for partition in range(PARTITIONS):
        page = expect(insist(lambda where=f"{path}{partition}": get(tenant.door, where)))  # type: ignore[misc]
        read += [(each["key"], each["value"]) for each in page["messages"]]
    assert sorted(read) == sorted((each["key"], each["value"]) for each in messages)


def test_client_on_another_node(tenant: Tenant, tag: str) -> None:
    """The `tidewater` command of the image produces and reads through the Service's name."""
    environment = {"TOPIC": f"{tenant.kubectl.namespace}/visits", "COUNT": "5000"}
    printed = run_job(tenant.kubectl, "client", tag, environment)
    assert sorted(printed.split(), key=int) == [str(n) for n in range(1, 5001)]


def test_starts_within_five_seconds(tenant: Tenant) -> None:
    """The best of a few: others may have had the cores."""
    took_s: list[float] = []
    while not took_s or (min(took_s) > READY_S_MAX and len(took_s) < STARTS_MAX):
        faults.kill_pod(tenant.kubectl)
        tenant.kubectl.wait_ready(WORKER)
        took_s.append(_start_s(tenant))
    print(f"\nready {took_s} s after its containers' starts")
    assert min(took_s) <= READY_S_MAX, f"the worker was ready {took_s} s after its starts"


def _start_s(tenant: Tenant) -> float:
    """Return how long a worker took from its container's start until it was ready."""
    status: Object = {}

    def runs() -> bool:
        status.update(tenant.kubectl.get("pod", WORKER_POD)["status"])
        return "running" in status.get("containerStatuses", [{}])[0].get("state", {})

    wait_for(runs, 60, "the worker to run")
    started = status["containerStatuses"][0]["state"]["running"]["startedAt"]
    ready = next(each for each in status["conditions"] if each["type"] == "Ready")
    return (_time(ready["lastTransitionTime"]) - _time(started)).total_seconds()


def test_runs_without_privileges(tenant: Tenant) -> None:
    facts = tenant.kubectl.python(
        WORKER_POD,
        "import os, pwd, sys; print(os.getuid(), pwd.getpwuid(os.getuid()).pw_name,"
        " os.access('/', os.W_OK), os.access('/usr/local', os.W_OK), sys.flags.safe_path)",
    )
    assert facts.split() == ["65532", "nonroot", "False", "False", "True"]


@pytest.mark.parametrize("grace", [True, False], ids=["in good order", "by force"])
def test_pod_deleted_under_load(tenant: Tenant, course: Course, *, grace: bool) -> None:
    with tenant.load(f"delete-{grace}-") as traffic:
        traffic.wait_for_more(500, 60)
        for _ in range(2):
            faults.kill_pod(tenant.kubectl, grace=grace)
            tenant.kubectl.wait_ready(WORKER)
            traffic.wait_for_more(300, 90)
    course.hold(traffic)


def test_container_killed_under_load(tenant: Tenant, course: Course) -> None:
    with tenant.load("container-") as traffic:
        traffic.wait_for_more(300, 60)
        faults.kill_container(tenant.kubectl, "worker")
        traffic.wait_for_more(500, 90)
    course.hold(traffic)


@pytest.mark.parametrize("role", ["edge", "table"])
def test_process_killed_under_load(tenant: Tenant, course: Course, role: str) -> None:
    with tenant.load(f"kill-{role}-") as traffic:
        for _ in range(5):
            traffic.wait_for_more(200, 60)
            faults.kill_process(tenant.kubectl, role)
        traffic.wait_for_more(300, 60)
    course.hold(traffic)


@pytest.mark.parametrize("role", ["edge", "table"])
def test_process_paused_under_load(tenant: Tenant, course: Course, role: str) -> None:
    with tenant.load(f"pause-{role}-") as traffic:
        traffic.wait_for_more(200, 60)
        with faults.paused_process(tenant.kubectl, role):
            time.sleep(8)
        traffic.wait_for_more(300, 60)
    course.hold(traffic)


def test_node_restarted_under_load(tenant: Tenant, system: System, course: Course) -> None:
    node = tenant.kubectl.node_of(WORKER_POD)
    before = tenant.kubectl.incarnation(WORKER_POD)
    with tenant.load("restart-") as traffic:
        traffic.wait_for_more(500, 60)
        faults.restart_node(tenant.kubectl, node)
        # Until the kubelet has said so, the pod counts as ready as it was before.
        wait_for(
            lambda: tenant.kubectl.incarnation(WORKER_POD) != before, 120, "a new container", 1.0
        )
        _wait_for_all(tenant, system)
        traffic.wait_for_more(500, 120)
    course.hold(traffic)


def _wait_for_all(tenant: Tenant, system: System) -> None:
    """Wait for the worker and for the parts that may have been on the same node."""
    for part in (ETCD, SEAWEEDFS, OPERATOR):
        system.kubectl.wait_ready(part, timeout_s=180)
    tenant.kubectl.wait_ready(WORKER, timeout_s=180)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
