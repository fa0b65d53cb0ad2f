"""Two workers: a user's request that goes on to another worker is judged there as that user (G9).

What a worker does on its own account (hand-over, dead letters) it does with its own token.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import websocket
from pyarrow import flight

from tidewater_core.security import TlsSettings
from tidewater_testing.parts.kubernetes import Account, Reviews, Role
from tidewater_testing.parts.secured import SecuredWorker
from tidewater_testing.parts.worker import topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import subscription_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TOPIC = "shop/orders"
PATH = f"/v1/{TOPIC}"
BOTH = ("topics", "subscriptions")
ALL = ("produce", "consume", "admin")
OWN = {"a": "token-of-a", "b": "token-of-b"}
ACCOUNTS = {
    "producer-token": Account("producer"),
    "consumer-token": Account("consumer"),
    "admin-token": Account("admin"),
    **{token: Account(f"worker-{name}") for name, token in OWN.items()},
}
ROLES = [
    Role("producer", ("produce",), ("topics",), "shop"),
    Role("consumer", ("consume",), BOTH, "shop"),
    Role("admin", ("consume", "admin"), BOTH, "shop"),
    *(Role(f"worker-{name}", ALL, BOTH, "shop") for name in OWN),
]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reviews]:
    with Reviews(tmp_path_factory.mktemp("api"), ACCOUNTS, ROLES) as part:
        part.own_tokens = set(OWN.values())
        yield part


@pytest.fixture(scope="module")
def workers(
    tmp_path_factory: pytest.TempPathFactory, reviews: Reviews
) -> Iterator[dict[str, SecuredWorker]]:
    directory = tmp_path_factory.mktemp("workers")
    made = {name: _worker(directory, name, reviews) for name in OWN}
    with made["a"], made["b"]:
        moved = made["a"].ask("POST", f"{PATH}/partitions/1/move", "admin-token", {"to": "b"})
        assert moved.status == 202, moved.body

        def is_there() -> bool:
            part = made["a"].ask("GET", PATH, "consumer-token").json()["partitions"][1]
            return bool(part["owner"] == "b" and part["state"] == "running")

        wait_until(is_there, 60, "partition 1 on b", 0.1)
        yield made


def _worker(directory: Path, name: str, reviews: Reviews) -> SecuredWorker:
    token = directory / f"token-{name}"
    token.write_text(OWN[name])
    pair = reviews.authority.sign(f"worker-{name}")
    manifests = [
        topic_manifest(TOPIC, {"partitions": 2, "writer": {"flushInterval": "200ms"}}),
        topic_manifest("shop/dead", {"partitions": 1}),
        subscription_manifest(
            "shop/billing",
            "orders",
            maxDeliveries=1,
            deadLetter={"topic": "dead"},
        ),
    ]
    return SecuredWorker(
        directory / name,
        manifests if name == "a" else [],
        catalog={
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        },
        coordination=str(directory / "coordination.db"),
        worker_id=name,
        auth=reviews.settings(token_path=token),
        tls=TlsSettings(cert=pair.cert, key=pair.key, ca=reviews.authority.ca),
    )


def message(value: str) -> dict[str, Any]:
    return {"messages": [{"value": value}]}


def test_forwarded_requests_are_judged_again_as_their_user(
    workers: dict[str, SecuredWorker], reviews: Reviews
) -> None:
    a = workers["a"]
    answer = a.ask("POST", f"{PATH}/messages?partition=1", "producer-token", message("one"))
    assert answer.status == 200, answer.body
    assert ("produce", "topics") in reviews.asked_about("producer", OWN["b"]), (
        "G9: the owner has asked about the user itself"
    )
    answer = a.ask("GET", f"{PATH}/messages?partition=1&offset=0", "consumer-token")
    assert [m["value"] for m in answer.json()["messages"]] == ["one"]
    assert ("consume", "topics") in reviews.asked_about("consumer", OWN["b"])
    for path in ("?partition=1", "?partition=1&ack=table"):
        answer = a.ask("POST", f"{PATH}/messages{path}", "producer-token", message("two"))
        assert answer.status == 200, "who may produce may wait for the table, wherever it is"
    assert a.ask("POST", f"{PATH}/flush", "producer-token").status == 403
    assert a.ask("POST", f"{PATH}/flush", "admin-token").status == 200


def test_flights_and_sockets_go_on_as_their_user(
    workers: dict[str, SecuredWorker], reviews: Reviews
) -> None:
    """Each door has a user of its own: what b asks about them, it asks because of that door."""
    a = workers["a"]
    a.ask("POST", f"{PATH}/messages?partition=1", "producer-token", message("there"))

    def user(name: str, verb: str) -> str:
        reviews.accounts[f"{name}-token"] = Account(name)
        reviews.roles.append(Role(name, (verb,), ("topics",), "shop"))
        return f"{name}-token"

    def options(token: str) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])

    with a.fly() as client:
        got = client.do_get(flight.Ticket(f"{TOPIC}@1:0-1".encode()), options(user("g", "consume")))
        assert got.read_all().num_rows == 1
        command = {"topic": TOPIC, "partition": 1, "position": "earliest"}
        descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
        writer, reader = client.do_exchange(descriptor, options(user("x", "consume")))
        while reader.read_chunk().data is None:
            pass
        reader.cancel()
        with suppress(pa.ArrowException):
            writer.close()  # cancelled
        batch = pa.record_batch({"value": pa.array([b"flown"], pa.binary())})
        put = flight.FlightDescriptor.for_command(
            json.dumps({"topic": TOPIC, "partition": 1}).encode()
        )
        writer, answers = client.do_put(put, batch.schema, options(user("p", "produce")))
        writer.write_batch(batch)
        assert b'"acks"' in answers.read().to_pybytes()
        writer.close()
    for token, said in (
        (user("r", "consume"), {"read": {"id": 1, "partition": 1, "credit": 1}}),
        (
            user("s", "produce"),
            {"produce": {"id": 1, "partition": 1, "messages": [{"value": "w"}]}},
        ),
    ):
        opened = websocket.create_connection(
            f"wss://{a.address}/v1/{TOPIC}/socket",
            timeout=20,
            header=[f"Authorization: Bearer {token}"],
            sslopt={"ca_certs": str(reviews.authority.ca)},
        )
        assert "welcome" in json.loads(opened.recv())
        opened.send(json.dumps(said))
        answer = json.loads(opened.recv())
        while "reading" in answer:
            answer = json.loads(opened.recv())
        assert answer.keys() & {"messages", "ack"}, answer
        opened.close()
    verbs = {"g": "consume", "x": "consume", "p": "produce", "r": "consume", "s": "produce"}
    asked = {name: reviews.asked_about(name, OWN["b"]) for name in verbs}
    assert asked == {name: {(verb, "topics")} for name, verb in verbs.items()}, (
        "G9: the owner has asked about the user itself, whichever door it was"
    )


def test_an_owner_refuses_whom_the_first_worker_let_in(
    workers: dict[str, SecuredWorker], reviews: Reviews
) -> None:
    """The owner's word counts: what the first worker remembers opens nothing at another."""
    role = Role("late", ("produce",), ("topics",), "shop")
    reviews.accounts["late-token"] = Account("late")
    reviews.roles.append(role)
    a = workers["a"]
    target = f"{PATH}/messages?partition="
    assert a.ask("POST", f"{target}0", "late-token", message("x")).status == 200
    reviews.roles.remove(role)
    answer = a.ask("POST", f"{target}1", "late-token", message("x"))
    assert answer.status == 403, answer.body
    assert 'user "late"' in answer.json()["error"]["message"]


def test_a_subscription_over_both(workers: dict[str, SecuredWorker], reviews: Reviews) -> None:
    """Pulls and acks go on as the consumer; dead letters are the worker's own doing."""
    a, b = workers["a"], workers["b"]
    path = f"{PATH}/subscriptions/billing"
    for number in range(2):
        a.ask("POST", f"{PATH}/messages?partition={number}", "producer-token", message("sub"))
    seen: list[dict[str, Any]] = []

    def all_came() -> bool:
        answer = a.ask("POST", f"{path}/pull", "consumer-token", {"max": 100, "wait_ms": 500})
        assert answer.status == 200, answer.body
        seen.extend(answer.json()["messages"])
        return {0, 1} <= {m["partition"] for m in seen}

    wait_until(all_came, 30, "messages of both partitions", 0.05)
    assert ("consume", "subscriptions") in reviews.asked_about("consumer", OWN["b"])
    so_far = len(reviews.asked)
    there = [m["ack_id"] for m in seen if m["partition"] == 1]
    said = a.ask("POST", f"{path}/nack", "consumer-token", {"ack_ids": there}).json()
    assert said["nacked"] == len(there), said

    def is_buried() -> bool:
        answer = b.ask("GET", "/v1/shop/dead/messages?offset=0", "consumer-token")
        return answer.status == 200 and len(answer.json()["messages"]) >= len(there)

    # The dead-letter topic is on a: b sends them there, and does that for itself.
    wait_until(is_buried, 30, "dead letters from b on a", 0.1)
    assert ("produce", "topics") in reviews.asked_about("worker-b", OWN["a"])
    assert ("produce", "topics") not in reviews.asked_about("consumer", OWN["a"], so_far)
    assert a.ask("POST", f"{path}/seek", "consumer-token", {"position": "latest"}).status == 403
    assert a.ask("POST", f"{path}/seek", "admin-token", {"position": "latest"}).status == 200


def test_a_partition_moves_with_the_workers_own_token(
    workers: dict[str, SecuredWorker], reviews: Reviews
) -> None:
    a, b = workers["a"], workers["b"]
    once = {"Tidewater-Producer": "p1", "Tidewater-Sequence": "0"}
    target, body = f"{PATH}/messages?partition=1", message("moving")
    assert a.ask("POST", target, "producer-token", body, once).status == 200
    moved = b.ask("POST", f"{PATH}/partitions/1/move", "admin-token", {"to": "a"})
    assert moved.status == 202, moved.body
    answers: list[Any] = []

    def is_moved() -> bool:
        answer = a.ask("POST", target, "producer-token", body, once)
        answers.append(answer)
        part = a.ask("GET", PATH, "consumer-token").json()["partitions"][1]
        return bool(answer.status == 200 and part["owner"] == "a" and part["state"] == "running")

    wait_until(is_moved, 60, "partition 1 on a", 0.1)
    assert json.loads(answers[-1].body)["acks"][0]["duplicate"] is True, "G8: it was handed over"
    assert ("admin", "topics") in reviews.asked_about("worker-a", OWN["b"]), (
        "the hand-over was asked for as the worker"
    )
