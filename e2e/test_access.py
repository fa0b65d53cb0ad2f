"""G9: who may use a topic is RBAC, at every door."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.flight as flight
import pytest

from e2e import guarantees
from e2e.install import System, create_namespace
from e2e.kubectl import Kubectl, PortForward, wait_for
from e2e.tenant import FLIGHT_PORT, POOL, conditions, forwarded, make_user, topic, wait_ready
from e2e.web import Door, get, insist, post, produce
from tidewater_testing.web import Answer

pytestmark = pytest.mark.timeout(300)
TOPIC = "orders"
FIRST_READY_S_MAX = 90.0
FLUSH_S_MAX = 120.0
MESSAGES = {"messages": [{"key": "k", "value": "for the shop alone"}]}
TURNED_AWAY = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)


@dataclass(frozen=True)
class Town:
    """Two namespaces, and people with different rights in the first."""

    shop: Kubectl
    bank: Kubectl
    door: Door
    """A worker of the shop, as its admin."""
    bank_door: Door
    """A worker of the other namespace, as that one's admin."""
    tokens: dict[str, str]

    @property
    def path(self) -> str:
        """The topic's path."""
        return f"/v1/{self.shop.namespace}/{TOPIC}"

    def as_(self, who: str) -> Door:
        """Return the shop's door for one of the people."""
        return self.door.with_token(self.tokens[who])


@pytest.fixture(scope="module")
def town(namespace: Kubectl, system: System) -> Iterator[Town]:
    """Give two namespaces with a Topic each and nothing else: the operator makes the pools."""
    bank = create_namespace(system.kubectl, f"e2e-bank-{secrets.token_hex(2)}")
    for each in (namespace, bank):
        each.apply([topic(TOPIC, partitions=3)])
    seconds = wait_ready(namespace, f"topic/{TOPIC}")
    wait_ready(bank, f"topic/{TOPIC}")
    assert seconds < FIRST_READY_S_MAX
    tokens = {
        "admin": make_user(namespace, "admin"),
        "producer": make_user(namespace, "producer", "tidewater-producer"),
        "consumer": make_user(namespace, "consumer", "tidewater-consumer"),
        "viewer": make_user(namespace, "viewer", "tidewater-viewer"),
        "stranger": make_user(namespace, "stranger", None),
        "banker": make_user(bank, "banker"),
        "forger": "not-a-token",
        "nobody": "",
    }
    with forwarded(namespace, tokens["admin"]) as door, forwarded(bank, tokens["banker"]) as other:
        produce(door, f"{namespace.namespace}/{TOPIC}", MESSAGES["messages"])
        made = Town(namespace, bank, door, other, tokens)
        for ask, who in ((_produce, "producer"), (_read, "consumer")):
            wait_for(lambda ask=ask, who=who: ask(made, who).status == 200, 60, f"{who}'s right")  # type: ignore[misc]
        yield made
    bank("delete", "namespace", bank.namespace, "--ignore-not-found", "--wait=false")


def _produce(town: Town, who: str) -> Answer:
    return insist(lambda: post(town.as_(who), f"{town.path}/messages", MESSAGES))


def _read(town: Town, who: str) -> Answer:
    return _get(town.as_(who), f"{town.path}/messages?partition=0&offset=0")


def _get(door: Door, path: str) -> Answer:
    return insist(lambda: get(door, path))


@pytest.mark.parametrize(
    ("who", "produces", "reads", "flushes"),
    [
        ("admin", 200, 200, 200),
        ("producer", 200, 403, 403),
        ("consumer", 403, 200, 403),
        ("viewer", 403, 403, 403),
        ("stranger", 403, 403, 403),
        ("banker", 403, 403, 403),
        ("forger", 401, 401, 401),
        ("nobody", 401, 401, 401),
    ],
)
def test_each_verb_needs_its_right(
    town: Town, who: str, produces: int, reads: int, flushes: int
) -> None:
    answers = (
        (_produce(town, who), produces),
        (_read(town, who), reads),
        (insist(lambda: post(town.as_(who), f"{town.path}/flush"), FLUSH_S_MAX), flushes),
    )
    for answer, status in answers:
        assert answer.status == status, (who, answer.body)
        if status >= 400:
            guarantees.raise_all(list(guarantees.refused_stranger(answer)))
            assert answer.reason


def test_a_refusal_says_what_is_missing(town: Town) -> None:
    answer = _produce(town, "consumer")
    for word in ("produce", "topics", "consumer"):
        assert word in answer.json()["error"]["message"]


def test_another_namespace_by_its_own_worker(town: Town) -> None:
    """A worker of the bank gives nothing of the shop, whoever asks."""
    for who in ("banker", "admin"):
        door = town.bank_door.with_token(town.tokens[who])
        for path in (town.path, f"{town.path}/messages?partition=0&offset=0"):
            answer = _get(door, path)
            guarantees.raise_all(list(guarantees.refused_stranger(answer)))
            assert b"for the shop alone" not in answer.body


def test_another_namespace_by_its_table(town: Town) -> None:
    """A Topic of the bank that names the shop's table is not served, and says why."""
    theirs = f"{town.shop.namespace}.{TOPIC}"
    town.bank.apply([topic("thief", partitions=1, table={"name": theirs})])
    wait_for(
        lambda: (
            conditions(town.bank, "topic/thief").get("Ready", {}).get("reason") == "ForeignTable"
        ),
        60,
        "the Topic to be refused",
    )
    path = f"/v1/{town.bank.namespace}/thief/messages?partition=0&offset=0"
    assert _get(town.bank_door, path).status == 404
    assert town.bank.get("topic", "thief")["status"].get("partitions", []) == []


def test_metrics_and_reports(town: Town) -> None:
    """Names of topics are in there, too."""
    assert _get(town.as_("nobody"), "/healthz").status == 200
    assert _get(town.as_("nobody"), "/readyz").status == 200
    assert _get(town.as_("nobody"), "/metrics").status == 401
    assert _get(town.as_("producer"), "/metrics").status == 403
    assert _get(town.as_("consumer"), f"/v1/{town.shop.namespace}").status == 403
    assert _get(town.as_("admin"), f"/v1/{town.shop.namespace}").status == 200
    scraper = "tidewater-e2e-scraper"
    subject = f"--serviceaccount={town.shop.namespace}:viewer"
    role = "--clusterrole=tidewater-metrics"
    town.shop("create", "clusterrolebinding", scraper, role, subject)
    try:
        wait_for(
            lambda: get(town.as_("viewer"), "/metrics").status == 200, 60, "the right to be seen"
        )
        text = _get(town.as_("viewer"), "/metrics").body
        assert f'namespace="{town.shop.namespace}"'.encode() in text
    finally:
        town.shop("delete", "clusterrolebinding", scraper, "--ignore-not-found")


def test_flight_asks_too(town: Town) -> None:
    selector = f"tidewater.dev/pool={POOL}"
    with PortForward(town.shop, selector, FLIGHT_PORT) as forward:
        location = f"grpc://{forward.address}"
        wait_for(lambda: _rows(location, town, "admin") > 0, 60, "rows by Flight")
        for who in ("producer", "stranger", "banker", "forger", "nobody"):
            wait_for(lambda who=who: _is_turned_away(location, town, who), 60, f"{who} to be told")  # type: ignore[misc]


def _is_turned_away(location: str, town: Town, who: str) -> bool:
    """Tell that somebody gets nothing; a connection that breaks tells nothing."""
    with pytest.raises((*TURNED_AWAY, ConnectionError)) as caught:
        _rows(location, town, who)
    return isinstance(caught.value, TURNED_AWAY)


def _rows(location: str, town: Town, who: str) -> int:
    """Read the topic's partitions by Flight and count the rows."""
    headers = [(b"authorization", f"Bearer {town.tokens[who]}".encode())]
    options = flight.FlightCallOptions(headers=headers if town.tokens[who] else [], timeout=20)
    name = f"{town.shop.namespace}/{TOPIC}"
    try:
        with flight.connect(location) as client:
            return sum(
                client.do_get(flight.Ticket(f"{name}@{p}:0-".encode()), options).read_all().num_rows
                for p in range(3)
            )
    except (flight.FlightUnavailableError, flight.FlightTimedOutError) as error:
        raise ConnectionError(str(error)) from error
