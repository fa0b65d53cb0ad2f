"""The questions to the API server, over real HTTPS."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.clock import SystemClock
from tidewater_core.errors import Retryable
from tidewater_testing.parts.certificates import Authority
from tidewater_testing.parts.kubernetes import OWN_TOKEN, Account, FixedClock, Reviews, Role
from tidewater_worker.auth.access import Access, User, path, topic
from tidewater_worker.auth.reviews import KubernetesReviews, access_spec, user_of
from tidewater_worker.auth.tokens import REREAD_S

ANN = User("ann", "uid-of-ann", ("system:authenticated",), (("pod", ("p1",)),))
ORDERS = topic("produce", "shop", "orders")[0]


def jwt(**claims: object) -> str:
    """Return a token that says something of itself."""
    middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{middle}.sig"


FOR_US = jwt(aud=["tidewater"])
BY_NAME = jwt(aud="tidewater", iss="an OIDC client of that name, whose tokens the API server takes")
FORGED = jwt(aud="tidewater", iss="nobody")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[Reviews]:
    accounts = {
        "ann-token": Account("ann", extra={"pod": ["p1"]}),
        "ours": Account("ann", audiences=("tidewater",)),
        FOR_US: Account("ann", audiences=("tidewater",)),
        BY_NAME: Account("ann"),
    }
    roles = [
        Role("ann", ("produce",), ("topics",), "shop", ("orders",)),
        Role("ann", ("get",), paths=("/metrics",)),
    ]
    with Reviews(tmp_path, accounts, roles, authority) as part:
        yield part


async def test_both_questions(server: Reviews) -> None:
    reviews = KubernetesReviews(server.settings(), SystemClock())
    assert await reviews.authenticate("ann-token") == ANN
    assert await reviews.authenticate("nobodys") is None
    allowed = {
        ORDERS: True,
        topic("consume", "shop", "orders")[0]: False,
        topic("produce", "other", "orders")[0]: False,
        topic("produce", "shop", "")[0]: False,
        path("get", "/metrics")[0]: True,
        path("get", "/openapi.json")[0]: False,
    }
    for access, expected in allowed.items():
        assert await reviews.authorise(ANN, access) is expected, access
    assert not await reviews.authorise(User("bob"), ORDERS)
    await reviews.close()


@pytest.mark.parametrize(
    ("audiences", "token", "known"),
    [
        ((), "ann-token", True),
        ((), "ours", False),
        (("tidewater",), "ours", True),
        (("tidewater",), "ann-token", False),
        (("other", "tidewater"), "ours", True),
        ((), FOR_US, True),
        ((), BY_NAME, True),
        ((), FORGED, False),
        (("tidewater",), FOR_US, True),
        (("other",), FOR_US, False),
        (("tidewater",), BY_NAME, False),
    ],
)
async def test_audiences(
    server: Reviews, audiences: tuple[str, ...], token: str, known: bool
) -> None:
    reviews = KubernetesReviews(server.settings(audiences=audiences), SystemClock())
    found = await reviews.authenticate(token)
    assert (found is not None) is known
    await reviews.close()


async def test_the_own_token_rotates(server: Reviews) -> None:
    reviews = KubernetesReviews(server.settings(), FixedClock())
    assert await reviews.authorise(ANN, ORDERS)
    server.own_tokens = {"the-next-one"}
    server.token_path.write_text("the-next-one\n")
    assert await reviews.authorise(ANN, ORDERS), "a token that is refused is read again at once"
    server.own_tokens = {OWN_TOKEN}
    with pytest.raises(Retryable, match="401"):
        await reviews.authorise(ANN, ORDERS)
    await reviews.close()


async def test_no_answer_is_no_permission(server: Reviews, tmp_path: Path) -> None:
    reviews = KubernetesReviews(server.settings(), SystemClock())
    server.is_away.set()
    with pytest.raises(Retryable, match="500"):
        await reviews.authorise(ANN, ORDERS)
    await reviews.close()
    nowhere = KubernetesReviews(server.settings(ca_path=tmp_path / "none"), SystemClock())
    with pytest.raises(Retryable, match="NoCertificateAuthority"):
        await nowhere.authenticate("ann-token")


async def test_an_api_server_of_another_authority_gets_no_token(
    server: Reviews, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "other-ca")
    clock = FixedClock()
    ca = tmp_path / "ca.crt"
    ca.write_text(other.ca.read_text())
    reviews = KubernetesReviews(server.settings(ca_path=ca), clock)
    with pytest.raises(Retryable, match="certificate"):
        await reviews.authenticate("ann-token")
    assert server.asked == []
    ca.write_text(server.authority.ca.read_text())  # the cluster's CA was renewed
    clock.monotonic_s += REREAD_S
    assert await reviews.authenticate("ann-token") == ANN
    await reviews.close()


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"authenticated": False},
        {"authenticated": "true", "user": {"username": "ann"}},
        {"authenticated": True},
        {"authenticated": True, "user": {}},
        {"authenticated": True, "user": {"username": ""}},
        {"authenticated": True, "user": "ann"},
    ],
)
def test_a_status_that_names_nobody(status: dict[str, Any]) -> None:
    assert user_of(status, ()) is None


def test_audiences_that_were_not_looked_at() -> None:
    status = {"authenticated": True, "user": {"username": "ann"}}
    assert user_of(status, ()) == User("ann")
    assert user_of(status, ("tidewater",)) is None


def test_the_question_about_a_permission() -> None:
    spec = access_spec(ANN, Access("consume", "topics", "shop", ""))
    assert spec == {
        "user": "ann",
        "uid": "uid-of-ann",
        "groups": ["system:authenticated"],
        "extra": {"pod": ["p1"]},
        "resourceAttributes": {
            "group": "tidewater.dev",
            "version": "*",
            "resource": "topics",
            "verb": "consume",
            "namespace": "shop",
        },
    }
    assert access_spec(User("bob"), path("get", "/metrics")[0]) == {
        "user": "bob",
        "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
    }
