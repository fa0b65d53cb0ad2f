"""Owners that hang, come back, or never do (G5), and a store that is away."""

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tidewater_testing.evidence import load_table, read_table_sides
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until

TOPIC = "shop/orders"
SPEC = {"partitions": 1, "writer": {"flushInterval": "100ms"}}
TTL_S = 3
WAIT_S = 60.0
GAP_END = 20_000_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def catalog_of(directory: Path) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }


def make_worker(directory: Path, name: str, coordination: str, **more: Any) -> Worker:
    return Worker(
        directory / name,
        [topic_manifest(TOPIC, SPEC)],
        catalog=catalog_of(directory),
        coordination=coordination,
        worker_id=name,
        session_ttl=f"{TTL_S}s",
        **more,
    )


def send(worker: Worker, *values: str) -> tuple[int, Any]:
    body = json.dumps({"messages": [{"value": value} for value in values]})
    answer = worker.post(f"/v1/{TOPIC}/messages?partition=0", body)
    return answer.status, answer.json()


def sent(worker: Worker, *values: str) -> int:
    """Send until it is taken; return the offset."""
    answers: list[Any] = []

    def taken() -> bool:
        status, body = send(worker, *values)
        answers.append(body)
        return status == 200

    wait_until(taken, WAIT_S, f"a message to be taken, not {answers[-1:]}", 0.2)
    offset: int = answers[-1]["acks"][0]["offset"]
    return offset


def describe(worker: Worker) -> dict[str, Any]:
    (found,) = worker.get(f"/v1/{TOPIC}").json()["partitions"]
    assert isinstance(found, dict)
    return found


def wait_state(worker: Worker, state: str) -> None:
    wait_until(lambda: describe(worker)["state"] == state, WAIT_S, f"the state {state}", 0.2)


def test_a_second_process_on_the_same_log_is_refused(tmp_path: Path) -> None:
    store = str(tmp_path / "coordination.db")
    with make_worker(tmp_path, "a", store) as first:
        sent(first, "one")
        second = Worker(
            tmp_path / "second",
            catalog=catalog_of(tmp_path),
            coordination=tmp_path / "another.db",
            manifests=[topic_manifest(TOPIC, SPEC)],
            log_root=first.settings.log_root,
            worker_id="a",
        )
        with ExitStack() as stack:
            stack.push(second)
            second.start(wait=False)
            wait_until(
                lambda: second.process.running() and _refused(second, "LogLocked"),
                WAIT_S,
                "G5 One owner: the lock to refuse a second process",
            )
        assert sent(first, "two") == 1


def _refused(worker: Worker, reason: str) -> bool:
    try:
        _, body = send(worker, "no")
    except OSError:
        return False
    return bool(body.get("error", {}).get("reason") == reason)


def test_an_owner_that_slept_past_its_lease_is_refused(tmp_path: Path) -> None:
    """SIGSTOP, a person's word, another owner, SIGCONT: refused at append and at commit."""
    store = str(tmp_path / "coordination.db")
    with make_worker(tmp_path, "a", store) as zombie, make_worker(tmp_path, "b", store) as owner:
        assert sent(owner, "one", "two") == 0, "any worker answers"
        zombie.flush(TOPIC)
        table = zombie.freeze(Victim.TABLE)
        assert sent(zombie, "lost") == 2
        edge = zombie.freeze(Victim.EDGE)
        refused = owner.post(
            f"/v1/{TOPIC}/partitions/0/give-up", json.dumps({"reason": "disk", "to": "b"})
        )
        assert refused.status == 409, "G5 One owner: it may still be there"
        wait_state(owner, "away")
        status, body = send(owner, "no")
        assert (status, body["error"]["reason"]) == (503, "OwnerAway"), "nobody else takes it"
        given = owner.post(
            f"/v1/{TOPIC}/partitions/0/give-up", json.dumps({"reason": "disk burnt", "to": "b"})
        )
        assert given.status == 202, given.body
        wait_state(owner, "running")
        assert sent(owner, "after") == GAP_END, "G1: an offset is never given twice"
        os.kill(edge, signal.SIGCONT)
        status, body = send(zombie, "zombie")
        assert status in (409, 503) or body["acks"][0]["offset"] > GAP_END, (
            f"G5 One owner: {status} {body}"
        )
        zombie.thaw(table)
        wait_until(
            lambda: describe(zombie)["owner"] == "b", WAIT_S, "A to see who the owner is", 0.2
        )
        assert sent(zombie, "forwarded") > GAP_END
        owner.flush(TOPIC)
        found = owner.get(f"/v1/{TOPIC}/messages?partition=0&offset=0&limit=100").json()
        values = [message["value"] for message in found["messages"]]
        assert values[:2] == ["one", "two"]
        assert "after" in values
        assert "forwarded" in values
        assert "lost" not in values, "G5 One owner: the zombie's rows never land"
        assert found["gaps"] == [{"start": 2, "end": GAP_END}], "G7: readers name the gap"
        assert describe(owner)["gap"]["reason"] == "disk burnt", "G7: stats name the gap"
        properties = load_table(catalog_of(tmp_path), TOPIC).properties
        assert json.loads(properties["tidewater.gap.0"]) == [{"start": 2, "end": GAP_END}]
        rows = read_table_sides(load_table(catalog_of(tmp_path), TOPIC))[0].rows
        assert [row.offset for row in rows[:3]] == [0, 1, GAP_END]
