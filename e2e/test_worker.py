"""A worker from the image, with a volume: it serves, and it loses nothing when it is killed."""

import time
from datetime import datetime

import pytest

from e2e import faults, guarantees
from e2e.tenant import PARTITIONS, WORKER, WORKER_POD, Tenant, run_job
from e2e.web import expect, get, post

READY_S_MAX = 5.0
pytestmark = pytest.mark.timeout(300)


def test_produce_and_read(tenant: Tenant) -> None:
    messages = [{"key": f"k{i}", "value": f"hello {i}"} for i in range(30)]
    answer = expect(post(tenant.door, f"/v1/{tenant.topic}/messages", {"messages": messages}))
    assert sum(ack["count"] for ack in answer["acks"]) == len(messages)
    read = []
    for partition in range(PARTITIONS):
        page = expect(
            get(tenant.door, f"/v1/{tenant.topic}/messages?partition={partition}&offset=0")
        )
        read += [(each["key"], each["value"]) for each in page["messages"]]
    assert sorted(read) == sorted((each["key"], each["value"]) for each in messages)


def test_client_on_another_node(tenant: Tenant, tag: str) -> None:
    """The `tidewater` command of the image produces and reads through the Service's name."""
    environment = {"TOPIC": f"{tenant.kubectl.namespace}/visits", "COUNT": "5000"}
    printed = run_job(tenant.kubectl, "client", tag, environment)
    assert sorted(printed.split(), key=int) == [str(n) for n in range(1, 5001)]


def test_starts_within_five_seconds(tenant: Tenant) -> None:
    faults.delete_pod(tenant.kubectl)
    tenant.kubectl.wait_ready(WORKER)
    status = tenant.kubectl.get("pod", WORKER_POD)["status"]
    started = status["containerStatuses"][0]["state"]["running"]["startedAt"]
    ready = next(each for each in status["conditions"] if each["type"] == "Ready")
    seconds = (_time(ready["lastTransitionTime"]) - _time(started)).total_seconds()
    assert seconds <= READY_S_MAX, f"the worker was ready {seconds:g} s after its start"


def test_runs_without_privileges(tenant: Tenant) -> None:
    facts = tenant.kubectl.python(
        WORKER_POD,
        "import os, pwd, sys; print(os.getuid(), pwd.getpwuid(os.getuid()).pw_name,"
        " os.access('/', os.W_OK), os.access('/usr/local', os.W_OK), sys.flags.safe_path)",
    )
    assert facts.split() == ["65532", "nonroot", "False", "False", "True"]


@pytest.mark.parametrize("grace", [True, False], ids=["in good order", "by force"])
def test_pod_deleted_under_load(tenant: Tenant, *, grace: bool) -> None:
    with tenant.load(f"delete-{grace}-") as traffic:
        traffic.wait_for_more(500, 60)
        for _ in range(2):
            faults.delete_pod(tenant.kubectl, grace=grace)
            tenant.kubectl.wait_ready(WORKER)
            traffic.wait_for_more(300, 90)
    guarantees.hold(tenant.history(traffic))


def test_container_killed_under_load(tenant: Tenant) -> None:
    with tenant.load("container-") as traffic:
        traffic.wait_for_more(300, 60)
        faults.kill_container(tenant.kubectl, "worker")
        traffic.wait_for_more(500, 90)
    guarantees.hold(tenant.history(traffic))


@pytest.mark.parametrize("role", ["edge", "table"])
def test_process_killed_under_load(tenant: Tenant, role: str) -> None:
    with tenant.load(f"kill-{role}-") as traffic:
        for _ in range(5):
            traffic.wait_for_more(200, 60)
            faults.kill_process(tenant.kubectl, role)
        traffic.wait_for_more(300, 60)
    guarantees.hold(tenant.history(traffic))


@pytest.mark.parametrize("role", ["edge", "table"])
def test_process_paused_under_load(tenant: Tenant, role: str) -> None:
    with tenant.load(f"pause-{role}-") as traffic:
        traffic.wait_for_more(200, 60)
        with faults.paused_process(tenant.kubectl, role):
            time.sleep(8)
        traffic.wait_for_more(300, 60)
    guarantees.hold(tenant.history(traffic))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
