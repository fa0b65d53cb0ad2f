"""What each request needs, as a table; and that no route is without a rule."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.settings import embedded
from tidewater_worker import edge
from tidewater_worker.api.cluster import add_cluster
from tidewater_worker.api.routes import make_app
from tidewater_worker.api.socket import add_socket
from tidewater_worker.api.subscriptions import add_subscriptions
from tidewater_worker.api.subscriptions_between import add_between
from tidewater_worker.auth.access import LISTED, OPEN, Access, Rule, required

T = ("topics", "shop", "orders")
S = ("subscriptions", "shop", "billing")


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("POST", "/v1/shop/orders/messages", [("produce", *T)]),
        ("GET", "/v1/shop/orders/messages", [("consume", *T)]),
        ("GET", "/v1/shop/orders/stats", [("consume", *T)]),
        ("POST", "/v1/shop/orders/flush", [("admin", *T)]),
        ("POST", "/v1/shop/orders/commits", [("admin", *T)]),
        ("POST", "/v1/shop/orders/partitions/3/move", [("admin", *T)]),
        ("POST", "/v1/shop/orders/partitions/3/give-up", [("admin", *T)]),
        ("GET", "/v1/shop/orders/partitions/3/handover", [("admin", *T)]),
        (
            "GET",
            "/v1/shop/orders/subscriptions",
            [("consume", *T), ("consume", "subscriptions", "shop", "")],
        ),
        *(
            ("POST", f"/v1/shop/orders/subscriptions/billing/{call}", [("consume", *T), (verb, *S)])
            for verb, calls in {
                "consume": ("pull", "ack", "nack", "extend", "leave", "news", "give-back"),
                "admin": ("seek", "replay", "restore"),
            }.items()
            for call in calls
        ),
        ("GET", "/v1/shop/orders/subscriptions/billing", [("consume", *T), ("consume", *S)]),
        ("GET", "/v1/shop/orders/subscriptions/billing/stream", [("consume", *T), ("consume", *S)]),
        ("GET", "/metrics", [("get", "", "", "/metrics")]),
        ("GET", "/openapi.json", [("get", "", "", "/openapi.json")]),
        ("GET", "/v1/workers", [("get", "", "", "/v1/workers")]),
    ],
)
def test_what_a_request_needs(method: str, path: str, needs: list[Any]) -> None:
    assert required(method, path) == Rule(tuple(Access(*each) for each in needs))


def test_metadata_is_for_producers_too() -> None:
    either = Rule((Access("consume", *T),), (Access("produce", *T),))
    assert required("GET", "/v1/shop/orders") == either
    assert required("GET", "/v1/shop/orders/socket") == either


def test_a_report_needs_a_right_of_its_own() -> None:
    """The operator's token goes to workers of every namespace: it may not move their partitions."""
    all_topics = ("topics", "shop", "")
    assert required("GET", "/v1/shop") == Rule(
        (Access("report", *all_topics),), (Access("admin", *all_topics),)
    )


def test_metrics_are_for_who_may_have_reports_of_the_workers_own_namespace() -> None:
    """So a token for metrics can be one namespace's, and open nothing of another's."""
    everywhere = (Access("get", "", "", "/metrics"),)
    assert required("GET", "/metrics", "shop") == Rule(
        everywhere, (Access("report", "topics", "shop", ""),)
    )
    assert required("GET", "/metrics") == Rule(everywhere)
    assert required("GET", "/v1/workers", "shop") == required("GET", "/v1/workers")
    assert required("POST", "/metrics", "shop") is None


def test_open_and_listed() -> None:
    assert required("GET", "/healthz") is OPEN
    assert required("GET", "/readyz") is OPEN
    assert required("GET", "/v1/topics") is LISTED


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("POST", "/healthz"),
        ("GET", "/healthz/"),
        ("GET", "/docs"),
        ("GET", "/redoc"),
        ("DELETE", "/v1/shop/orders"),
        ("POST", "/v1/shop/orders"),
        ("GET", "/v1/shop/orders/flush"),
        ("POST", "/v1/shop/orders/messages/"),
        ("GET", "/v1/shop/or/ders/messages"),
        ("GET", "/v1/shop/Orders"),
        ("GET", "/v1/shop/orders%2Fmessages"),
        ("GET", "/v1//orders"),
        ("GET", "/v1/shop/orders\n"),
        ("GET", "/metrics\n"),
        ("GET", "/v1/shop/" + "a" * 254),
        ("POST", "/v1/shop/orders/subscriptions/billing/steal"),
    ],
)
def test_what_no_rule_knows_is_closed(method: str, path: str) -> None:
    assert required(method, path) is None


def test_every_route_has_a_rule(tmp_path: Path) -> None:
    """A route without one is never reached: this says so before a user does."""
    node: Any = SimpleNamespace(settings=embedded(tmp_path), topics={})
    nothing: Any = None
    app = make_app(node, nothing)
    add_subscriptions(app, node, nothing)
    add_between(app, node, nothing)
    add_cluster(app, node, nothing)
    add_socket(app)
    added = {name for name in dir(edge) if name.startswith("add_")}
    assert added <= {
        "add_subscriptions", "add_between", "add_cluster", "add_socket", "add_commits",
    }, "the edge has routes that this test does not know"  # fmt: skip
    values = {"namespace": "shop", "name": "orders", "subscription": "billing", "partition": "3"}
    without = []
    for route in app.routes:
        path = route.path.format(**values)  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
            if path not in ("/redoc",) and required(method, path) is None:
                without.append((method, path))
    assert without == []


def test_an_access_reads_like_a_sentence() -> None:
    assert str(Access("produce", *T)) == 'produce topics "orders" in namespace "shop"'
    assert str(Access("admin", "topics", "shop", "")) == 'admin topics in namespace "shop"'
    assert str(Access("get", "", "", "/metrics")) == "get /metrics"
