"""A worker from the image, with a volume: it serves, and it loses nothing when it is killed."""

import time
from datetime import datetime

import pytest

from e2e import faults, guarantees
from e2e.conftest import PARTITIONS, Worker
from e2e.install import WORKER, WORKER_POD, run_job
from e2e.web import expect, get, post

READY_S_MAX = 5.0
pytestmark = pytest.mark.timeout(300)


def test_produce_and_read(worker: Worker) -> None:
    messages = [{"key": f"k{i}", "value": f"hello {i}"} for i in range(30)]
    answer = expect(post(worker.address, f"/v1/{worker.topic}/messages", {"messages": messages}))
    assert sum(ack["count"] for ack in answer["acks"]) == len(messages)
    read = []
    for partition in range(PARTITIONS):
        page = expect(
            get(worker.address, f"/v1/{worker.topic}/messages?partition={partition}&offset=0")
        )
        read += [(each["key"], each["value"]) for each in page["messages"]]
    assert sorted(read) == sorted((each["key"], each["value"]) for each in messages)


def test_client_on_another_node(worker: Worker, tag: str) -> None:
    """The `tidewater` command of the image produces and reads through the Service's name."""
    environment = {"TOPIC": f"{worker.kubectl.namespace}/visits", "COUNT": "5000"}
    printed = run_job(worker.kubectl, "client.yaml", tag, environment)
    assert sorted(printed.split(), key=int) == [str(n) for n in range(1, 5001)]


def test_starts_within_five_seconds(worker: Worker) -> None:
    faults.delete_pod(worker.kubectl)
    worker.kubectl.wait_ready(WORKER)
    status = worker.kubectl.get("pod", WORKER_POD)["status"]
    started = status["containerStatuses"][0]["state"]["running"]["startedAt"]
    ready = next(each for each in status["conditions"] if each["type"] == "Ready")
    seconds = (_time(ready["lastTransitionTime"]) - _time(started)).total_seconds()
    assert seconds <= READY_S_MAX, f"the worker was ready {seconds:g} s after its start"


def test_runs_without_privileges(worker: Worker) -> None:
    facts = worker.kubectl.python(
        WORKER_POD,
        "import os, pwd, sys; print(os.getuid(), pwd.getpwuid(os.getuid()).pw_name,"
        " os.access('/', os.W_OK), os.access('/usr/local', os.W_OK), sys.flags.safe_path)",
    )
    assert facts.split() == ["65532", "nonroot", "False", "False", "True"]


@pytest.mark.parametrize("grace", [True, False], ids=["in good order", "by force"])
def test_pod_deleted_under_load(worker: Worker, *, grace: bool) -> None:
    with worker.load(f"delete-{grace}-") as traffic:
        traffic.wait_for_more(500, 60)
        for _ in range(2):
            faults.delete_pod(worker.kubectl, grace=grace)
            worker.kubectl.wait_ready(WORKER)
            traffic.wait_for_more(300, 90)
    guarantees.hold(worker.history(traffic))


def test_container_killed_under_load(worker: Worker) -> None:
    with worker.load("container-") as traffic:
        traffic.wait_for_more(300, 60)
        faults.kill_container(worker.kubectl, "worker")
        traffic.wait_for_more(500, 90)
    guarantees.hold(worker.history(traffic))


@pytest.mark.parametrize("role", ["edge", "table"])
def test_process_killed_under_load(worker: Worker, role: str) -> None:
    with worker.load(f"kill-{role}-") as traffic:
        for _ in range(5):
            traffic.wait_for_more(200, 60)
            faults.kill_process(worker.kubectl, role)
        traffic.wait_for_more(300, 60)
    guarantees.hold(worker.history(traffic))


@pytest.mark.parametrize("role", ["edge", "table"])
def test_process_paused_under_load(worker: Worker, role: str) -> None:
    with worker.load(f"pause-{role}-") as traffic:
        traffic.wait_for_more(200, 60)
        with faults.paused_process(worker.kubectl, role):
            time.sleep(8)
        traffic.wait_for_more(300, 60)
    guarantees.hold(worker.history(traffic))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
