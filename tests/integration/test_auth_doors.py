"""G9 Nobody gets in: every door, with no token, a bad one, another verb, another namespace.

The worker speaks TLS and asks an HTTPS server that has the API server's two review endpoints.
"""

import base64
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import websocket
from pyarrow import flight

from tidewater_core.security import TlsSettings
from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_testing.doors import (
    Door,
    describe,
    dial,
    do_exchange,
    do_get,
    do_put,
    flown,
    http,
    schema_of,
    socket,
)
from tidewater_testing.parts.kubernetes import Account, Reviews, Role
from tidewater_testing.parts.secured import SecuredWorker
from tidewater_testing.parts.worker import topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.subscriptions import subscription_manifest

BOTH = ("topics", "subscriptions")
ROLES = [
    Role("producer", ("produce",), ("topics",), "shop"),
    Role("consumer", ("consume",), BOTH, "shop"),
    Role("admin", ("consume", "admin"), BOTH, "shop"),
    Role("topics-only", ("consume",), ("topics",), "shop"),
    Role("subscriptions-only", ("consume",), ("subscriptions",), "shop"),
    Role("one-topic", ("consume",), ("topics",), "shop", ("orders",)),
    Role("neighbour", ("produce", "consume", "admin"), BOTH, "other"),
    Role("reporter", ("report",), ("topics",), "shop"),
    Role("other-reporter", ("report",), ("topics",), "other"),
    Role("monitor", ("get",), paths=("/metrics", "/openapi.json", "/v1/workers")),
]
ACCOUNTS = {f"{role.user}-token": Account(role.user) for role in ROLES}
PATH = "/v1/{topic}"
SUBSCRIPTION = "/v1/{topic}/subscriptions/billing"
MESSAGE = {"messages": [{"value": "x"}]}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reviews]:
    with Reviews(tmp_path_factory.mktemp("api"), ACCOUNTS, ROLES) as part:
        yield part


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, reviews: Reviews) -> Iterator[SecuredWorker]:
    pair = reviews.authority.sign("worker")
    home = tmp_path_factory.mktemp("account") / "namespace"
    home.write_text("shop")
    manifests = [
        topic_manifest("shop/orders", {"partitions": 1}),
        topic_manifest("other/secret", {"partitions": 1}),
        subscription_manifest("shop/billing", "orders"),
    ]
    with SecuredWorker(
        tmp_path_factory.mktemp("worker"),
        manifests,
        limits=Limits(request_bytes_max=ByteSize("2Mi"), message_bytes_max=ByteSize("1Mi")),
        auth=reviews.settings(namespace_path=home),
        tls=TlsSettings(cert=pair.cert, key=pair.key, ca=reviews.authority.ca),
    ) as part:
        yield part


# ---- the doors


SOCKET_READ = {"read": {"id": 1, "partition": 0, "credit": 1}}
SOCKET_PRODUCE = {"produce": {"id": 1, "messages": [{"value": "s"}]}}
SOCKET_SUBSCRIBE = {"subscribe": {"id": 1, "subscription": "billing", "credit": 0}}
SOCKET_ACK = {"acknowledge": {"id": 1, "subscription": "billing", "ack_ids": ["x"]}}
DOORS: dict[str, tuple[Door, str, str]] = {
    # name: the door, who may, who has another verb only
    "produce": (http("POST", PATH + "/messages", MESSAGE), "producer", "consumer"),
    "produce the long way": (
        http("POST", "/v1/{topic}/m%65ssages", MESSAGE),
        "producer",
        "consumer",
    ),
    "read": (http("GET", PATH + "/messages?offset=0"), "consumer", "producer"),
    "metadata": (http("GET", PATH), "consumer", "subscriptions-only"),
    "metadata for producers": (http("GET", PATH), "producer", "subscriptions-only"),
    "stats": (http("GET", PATH + "/stats"), "consumer", "producer"),
    "flush": (http("POST", PATH + "/flush"), "admin", "consumer"),
    "move": (
        http("POST", PATH + "/partitions/0/move", {"to": "worker-0"}),
        "admin",
        "consumer",
    ),
    "subscriptions": (http("GET", PATH + "/subscriptions"), "consumer", "topics-only"),
    "subscription": (http("GET", SUBSCRIPTION), "consumer", "topics-only"),
    "pull": (http("POST", SUBSCRIPTION + "/pull", {"max": 1}), "consumer", "topics-only"),
    "ack": (http("POST", SUBSCRIPTION + "/ack", {"ack_ids": []}), "consumer", "producer"),
    "nack": (http("POST", SUBSCRIPTION + "/nack", {"ack_ids": []}), "consumer", "producer"),
    "extend": (http("POST", SUBSCRIPTION + "/extend", {"ack_ids": []}), "consumer", "producer"),
    "leave, without the topic": (
        http("POST", SUBSCRIPTION + "/leave", {}),
        "consumer",
        "subscriptions-only",
    ),
    "leave": (http("POST", SUBSCRIPTION + "/leave", {}), "consumer", "topics-only"),
    "seek": (http("POST", SUBSCRIPTION + "/seek", {"position": "earliest"}), "admin", "consumer"),
    "socket": (socket(), "consumer", "neighbour"),
    "socket, produce": (socket(**SOCKET_PRODUCE), "producer", "consumer"),
    "socket, read": (socket(**SOCKET_READ), "consumer", "producer"),
    "socket, subscribe": (socket(**SOCKET_SUBSCRIBE), "consumer", "topics-only"),
    "Flight DoPut": (flown(do_put), "producer", "consumer"),
    "Flight DoGet": (flown(do_get), "consumer", "producer"),
    "Flight DoExchange": (flown(do_exchange), "consumer", "producer"),
    "Flight GetFlightInfo": (flown(describe), "consumer", "producer"),
    "Flight GetSchema": (flown(schema_of), "consumer", "producer"),
}


@pytest.fixture(scope="module", autouse=True)
def first_message(worker: SecuredWorker) -> None:
    assert worker.ask("POST", "/v1/shop/orders/messages", "producer-token", MESSAGE).status == 200


@pytest.mark.parametrize("who", ["nobody", "a bad token", "another verb", "a neighbour", "right"])
@pytest.mark.parametrize("name", DOORS)
def test_doors(worker: SecuredWorker, name: str, who: str) -> None:
    door, right, wrong = DOORS[name]
    token, expected = {
        "nobody": (None, 401),
        "a bad token": ("made-up", 401),
        "another verb": (f"{wrong}-token", 403),
        "a neighbour": ("neighbour-token", 403),
        "right": (f"{right}-token", 200),
    }[who]
    status, said = door(worker, "shop/orders", token)
    assert status == expected or (expected == 200 and status == 202), (
        f"G9 Nobody gets in: {name} as {who}: {status} {said}"
    )
    if expected == 200:
        return
    if not (name.startswith("socket, ") and who == "another verb"):  # who may do half of it is in
        missing_status, missing_said = door(worker, "shop/no-such", token)
        assert missing_status == status, f"G9: {name} as {who} tells whether a topic is there"
        assert missing_said.replace("no-such", "orders") == said or name.startswith("Flight")
    if expected == 403:
        user = "neighbour" if who == "a neighbour" else wrong
        plain = said.replace("\\", "")
        assert f'user "{user}" may not' in plain
        assert "tidewater.dev" in plain


@pytest.mark.parametrize("path", ["/metrics", "/openapi.json", "/v1/workers"])
def test_paths_of_the_server(worker: SecuredWorker, path: str) -> None:
    found = {
        token: worker.ask("GET", path, token).status
        for token in (None, "made-up", "admin-token", "neighbour-token", "monitor-token")
    }
    assert found == {
        None: 401, "made-up": 401, "admin-token": 403, "neighbour-token": 403, "monitor-token": 200,
    }  # fmt: skip


def test_metrics_by_a_token_of_one_namespace(worker: SecuredWorker) -> None:
    """Who may have reports of the worker's own namespace may scrape it, and nobody's elsewhere."""
    assert worker.ask("GET", "/metrics", "reporter-token").status == 200
    for token in ("other-reporter-token", "admin-token", "neighbour-token"):
        assert worker.ask("GET", "/metrics", token).status == 403, token
    for path in ("/openapi.json", "/v1/workers", "/v1/other", "/v1/shop/orders"):
        assert worker.ask("GET", path, "reporter-token").status == 403, path


def test_answers_are_counted(worker: SecuredWorker) -> None:
    text = worker.ask("GET", "/metrics", "monitor-token").body.decode()
    for result in ("allowed", "denied", "unauthenticated", "unanswered"):
        assert f'tidewater_auth_reviews_total{{result="{result}"}} ' in text


def test_what_is_open(worker: SecuredWorker) -> None:
    assert worker.ask("GET", "/healthz").status == 200
    assert worker.ask("GET", "/readyz").json() == {"ready": True, "waiting": []}
    for path in ("/docs", "/redoc", "/v1/shop/orders/", "/nothing", "/v1/shop/orders/nothing"):
        assert worker.ask("GET", path).status == 401, path
        assert worker.ask("GET", path, "admin-token").status == 404, path


def test_a_refusal_says_what_is_missing(worker: SecuredWorker) -> None:
    answer = worker.ask("GET", "/v1/shop/orders")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert 'consume topics "orders" in namespace "shop"' in answer.json()["error"]["message"]
    answer = worker.ask("POST", "/v1/shop/orders/messages", body=MESSAGE)
    assert (answer.status, answer.reason) == (401, "Unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_lists_show_what_one_may_consume(worker: SecuredWorker) -> None:
    def topics(user: str) -> list[str]:
        found = worker.ask("GET", "/v1/topics", f"{user}-token").json()["topics"]
        return [f"{each['namespace']}/{each['name']}" for each in found]

    def flights(user: str) -> list[str]:
        headers = [(b"authorization", f"Bearer {user}-token".encode())]
        options = flight.FlightCallOptions(headers=headers)
        with worker.fly() as client:
            found = list(client.list_flights(b"", options))
        return ["/".join(part.decode() for part in each.descriptor.path) for each in found]

    for lists in (topics, flights):
        assert lists("consumer") == ["shop/orders"], "G9: a tenant sees its own topics only"
        assert lists("neighbour") == ["other/secret"]
        assert lists("producer") == []
        assert lists("one-topic") == [], "a list needs the permission for all of a namespace"
    assert worker.ask("GET", "/v1/shop/orders", "one-topic-token").status == 200
    assert worker.ask("GET", "/v1/topics").status == 401
    with worker.fly() as client, pytest.raises(flight.FlightUnauthenticatedError):
        list(client.list_flights())


def test_pipelined_requests_stay_in_order_while_one_is_judged(
    worker: SecuredWorker, reviews: Reviews
) -> None:
    """Some are known, some must be asked, some are refused: answers and offsets keep the order."""
    reviews.accounts["fresh-token"] = Account("producer")
    requests = []
    for number in range(30):
        token = ("fresh-token", "producer-token", "consumer-token")[number % 3]
        body = json.dumps({"messages": [{"value": f"p{number}"}]}).encode()
        requests.append(
            b"POST /v1/shop/orders/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (token.encode(), len(body), body)
        )
    connection = worker.connection()
    connection.connect()
    connection.sock.sendall(b"".join(requests))
    stream = connection.sock.makefile("rb")
    statuses, offsets = [], []
    for _ in requests:
        status, body = _read_answer(stream)
        statuses.append(status)
        if status == 200:
            offsets.append(json.loads(body)["acks"][0]["offset"])
    stream.close()
    connection.close()
    assert statuses == [200, 200, 403] * 10
    assert offsets == sorted(offsets)


def _read_answer(stream: Any) -> tuple[int, bytes]:
    status = int(stream.readline().split()[1])
    length = 0
    while line := stream.readline().strip():
        name, _, value = line.lower().partition(b":")
        length = int(value) if name == b"content-length" else length
    return status, stream.read(length)


def test_a_large_body_of_nobody_is_not_kept(worker: SecuredWorker) -> None:
    answer = worker.ask("POST", "/v1/shop/orders/messages", "made-up-2", b"x" * 4_000_000)
    assert answer.status == 401
    answer = worker.ask("POST", "/v1/shop/orders/messages", None, b"x" * 4_000_000)
    assert answer.status == 401
    metrics = worker.ask("GET", "/metrics", "monitor-token").body.decode()
    assert "tidewater_inflight_bytes 0\n" in metrics


def test_an_endless_body_takes_no_room_from_others(worker: SecuredWorker) -> None:
    connection = worker.connection()
    connection.putrequest("POST", "/v1/shop/orders/messages")
    connection.putheader("Authorization", "Bearer producer-token")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for _ in range(6):  # 6 MiB of at most 2
        connection.send(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
    metrics = worker.ask("GET", "/metrics", "monitor-token").body.decode()
    assert "tidewater_inflight_bytes 0\n" in metrics, "G6: what is not kept counts for nothing"
    connection.send(b"0\r\n\r\n")
    assert connection.getresponse().status == 413
    connection.close()


def test_an_endless_head_is_cut(worker: SecuredWorker) -> None:
    connection = worker.connection()
    connection.connect()
    connection.sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: ")
    with suppress(OSError):
        for _ in range(64):
            connection.sock.sendall(b"x" * 16_384)
    with suppress(OSError):
        said = b""
        while piece := connection.sock.recv(65_536):
            said += piece
        assert b" 431 " in said.splitlines()[0]
        assert b'"HeadTooLarge"' in said
    connection.close()


def test_heads_behind_large_bodies_are_not_cut(worker: SecuredWorker) -> None:
    """Pieces of a stream end anywhere, also in a head that follows much else."""
    body = b"x" * 300_000
    request = (
        b"POST /v1/shop/orders/messages HTTP/1.1\r\nHost: x\r\n"
        b"Authorization: Bearer producer-token\r\nContent-Type: application/octet-stream\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    connection = worker.connection()
    connection.connect()
    stream = connection.sock.makefile("rb")
    data, cut = request * 12, len(request) + 40  # always within a head
    for at in range(0, len(data), cut):
        connection.sock.sendall(data[at : at + cut])
    assert [_read_answer(stream)[0] for _ in range(12)] == [200] * 12
    stream.close()
    connection.close()


def test_a_long_poll_ends_with_the_permission(worker: SecuredWorker, reviews: Reviews) -> None:
    role = Role("waiter", ("consume",), ("topics",), "shop")
    reviews.accounts["waiter-token"] = Account("waiter")
    reviews.roles.append(role)
    end = worker.ask("GET", "/v1/shop/orders", "waiter-token").json()["partitions"][0]["end"]
    path = f"/v1/shop/orders/messages?offset={end}&wait_ms=20000"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.ask, "GET", path, "waiter-token")
        time.sleep(0.8)
        reviews.roles.remove(role)
        time.sleep(0.8)
        worker.ask("POST", "/v1/shop/orders/messages", "producer-token", MESSAGE)
        answer = waiting.result()
    assert answer.status == 403, "what came after the permission is not given out"


def test_a_browsers_socket(worker: SecuredWorker) -> None:
    """A page cannot set a header: the token stands among the subprotocols."""
    token = base64.urlsafe_b64encode(b"consumer-token").rstrip(b"=").decode()
    name = f"base64url.bearer.authorization.k8s.io.{token}"
    opened = websocket.create_connection(
        f"wss://{worker.address}/v1/shop/orders/socket",
        timeout=20,
        subprotocols=[name, "tidewater.v1"],
        sslopt={"ca_certs": str(worker.tls.ca)},  # type: ignore[union-attr]
    )
    assert opened.subprotocol == "tidewater.v1", "the token is not sent back"
    assert "welcome" in json.loads(opened.recv())
    opened.close()


@pytest.mark.parametrize(
    ("user", "command", "code"),
    [
        ("producer", ["produce", "shop/orders", "by-command"], 0),
        ("consumer", ["produce", "shop/orders", "by-command"], 1),
        ("consumer", ["topics"], 0),
        ("producer", ["stats", "shop/orders"], 1),
    ],
)
def test_the_command(worker: SecuredWorker, user: str, command: list[str], code: int) -> None:
    token = worker.directory / f"{user}.token"
    token.write_text(f"{user}-token\n")
    program = str(Path(sys.executable).with_name("tidewater"))
    tls = worker.tls
    assert tls is not None
    where = ["--url", f"https://{worker.address}", "--token-file", str(token), "--ca", str(tls.ca)]
    done = subprocess.run(
        [program, command[0], *where, *command[1:]],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if code:
        assert "Forbidden" in done.stderr
        assert f'user "{user}" may not' in done.stderr


# ---- over time


def test_what_was_allowed_ends(worker: SecuredWorker, reviews: Reviews) -> None:
    """A permission that is taken back ends requests, sockets and streams within its time."""
    role = Role("leaver", ("produce", "consume"), BOTH, "shop")
    reviews.accounts["leaver-token"] = Account("leaver")
    reviews.roles.append(role)
    assert worker.ask("POST", "/v1/shop/orders/messages", "leaver-token", MESSAGE).status == 200
    opened = dial(worker, "shop/orders", "leaver-token")
    json.loads(opened.recv())
    opened.send(json.dumps({"read": {"id": 7, "position": "latest", "credit": 10}}))
    assert "reading" in json.loads(opened.recv())
    connection = worker.connection()
    headers = {"Authorization": "Bearer leaver-token", "Accept": "text/event-stream"}
    connection.request("GET", "/v1/shop/orders/subscriptions/billing/stream", None, headers)
    answer = connection.getresponse()
    assert answer.status == 200
    reviews.roles.remove(role)

    def is_refused() -> bool:
        said = worker.ask("POST", "/v1/shop/orders/messages", "leaver-token", MESSAGE)
        return said.status == 403

    wait_until(is_refused, 5, "the permission to end", 0.05)
    said = json.loads(opened.recv())
    while "messages" in said:
        said = json.loads(opened.recv())
    assert said["error"]["reason"] == "Forbidden"
    assert said["error"]["id"] == 7
    opened.send(json.dumps(SOCKET_PRODUCE))
    assert json.loads(opened.recv())["error"]["reason"] == "Forbidden"
    opened.close()
    worker.ask("POST", "/v1/shop/orders/messages", "producer-token", MESSAGE)
    time.sleep(0.6)
    worker.ask("POST", "/v1/shop/orders/messages", "producer-token", MESSAGE)
    with pytest.raises((OSError, IncompleteRead)):
        answer.read()
    connection.close()


def test_a_flight_ends_with_the_permission(worker: SecuredWorker, reviews: Reviews) -> None:
    role = Role("flyer", ("consume",), ("topics",), "shop")
    reviews.accounts["flyer-token"] = Account("flyer")
    reviews.roles.append(role)
    options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer flyer-token")])
    with worker.fly() as client:
        descriptor = flight.FlightDescriptor.for_command(b'{"topic":"shop/orders"}')
        writer, reader = client.do_exchange(descriptor, options)
        reader.read_chunk()
        reviews.roles.remove(role)
        with pytest.raises(flight.FlightUnauthorizedError, match="flyer"):
            reader.read_chunk()
        with pytest.raises(pa.ArrowException):
            writer.close()


def test_without_the_api_server(worker: SecuredWorker, reviews: Reviews) -> None:
    """It fails closed: 503 once what is remembered has run out."""
    try:
        reviews.is_away.set()

        def is_closed() -> bool:
            answer = worker.ask("POST", "/v1/shop/orders/messages", "producer-token", MESSAGE)
            assert answer.status in (200, 503), answer.body
            return answer.status == 503

        wait_until(is_closed, 5, "the worker to refuse", 0.05)
        answer = worker.ask("POST", "/v1/shop/orders/messages", "producer-token", MESSAGE)
        assert answer.reason == "AuthUnavailable"
        assert answer.retry_after_s == 1
        assert worker.ask("GET", "/v1/shop/orders", "consumer-token").status == 503
        with pytest.raises(websocket.WebSocketBadStatusException, match="503"):
            dial(worker, "shop/orders", "never-seen")
    finally:
        reviews.is_away.clear()
    assert worker.ask("POST", "/v1/shop/orders/messages", "producer-token", MESSAGE).status == 200


def test_the_port_speaks_tls_only(worker: SecuredWorker) -> None:
    context = worker.trust()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    connection = worker.connection()
    connection.connect()
    assert connection.sock.version() == "TLSv1.3"  # type: ignore[union-attr]
    connection.close()
    with pytest.raises((OSError, ConnectionError)):
        worker.get("/healthz")


def test_refusals_are_in_the_log(worker: SecuredWorker) -> None:
    assert worker.ask("GET", "/v1/shop/orders", "neighbour-token").status == 403
    text = (worker.directory / "worker.log").read_text()
    assert 'denied: user "neighbour" may not' in text
    for token in ACCOUNTS:
        assert token not in text, "a token is never logged"
