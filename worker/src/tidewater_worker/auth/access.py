"""What a request needs: a verb on a resource of a namespace. Pure.

    produce   on topics           POST …/messages
    consume   on topics           reading, statistics
    either                        metadata, the opening of a socket
    consume   on subscriptions    pull, ack, nack, extend, leave, stream, status
    admin     on topics           flush, move, give-up; between workers: hand-over, commits
    report    on topics, or admin a worker's report
    admin     on subscriptions    seek, replay
    get       on a path           /metrics, /openapi.json, /v1/workers
    report    on the worker's own namespace: /metrics, too, which is its report in other words

Whoever uses a subscription must also be one who may consume its topic. A request that no rule
knows is nobody's: it is answered with 404 without being looked at, so that a route without
a rule is closed and not open.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

GROUP: Final = "tidewater.dev"
PRODUCE: Final = "produce"
CONSUME: Final = "consume"
ADMIN: Final = "admin"
REPORT: Final = "report"
"""The operator has this one alone: its token goes to every worker, and so is worth little. So has
who scrapes one namespace's workers."""
TOPICS: Final = "topics"
SUBSCRIPTIONS: Final = "subscriptions"


class Access(NamedTuple):
    """One thing to be allowed."""

    verb: str
    resource: str
    """`topics` or `subscriptions`; empty: `name` is a path of the server."""
    namespace: str
    name: str
    """Empty: all of the namespace."""

    def __str__(self) -> str:
        """Say it as an answer does."""
        if not self.resource:
            return f"{self.verb} {self.name}"
        which = f' "{self.name}"' if self.name else ""
        return f'{self.verb} {self.resource}{which} in namespace "{self.namespace}"'


class User(NamedTuple):
    """Who a token speaks for, as the API server says."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Rule(NamedTuple):
    """What a request needs."""

    needs: tuple[Access, ...] = ()
    """All of these."""
    or_else: tuple[Access, ...] = ()
    """Or all of these."""
    is_open: bool = False
    """Nobody is asked who they are."""
    lists: bool = False
    """The answer holds only what the user may consume."""


OPEN: Final = Rule(is_open=True)
LISTED: Final = Rule(lists=True)


def topic(verb: str, namespace: str, name: str) -> tuple[Access, ...]:
    """Return what a call about a topic needs."""
    return (Access(verb, TOPICS, namespace, name),)


def subscription(verb: str, namespace: str, topic: str, name: str) -> tuple[Access, ...]:
    """Return what a call about a subscription needs: its topic's messages are what it gives."""
    return (
        Access(CONSUME, TOPICS, namespace, topic),
        Access(verb, SUBSCRIPTIONS, namespace, name),
    )


def path(verb: str, name: str) -> tuple[Access, ...]:
    """Return what a call about the server itself needs."""
    return (Access(verb, "", "", name),)


_METRICS: Final = ("GET", "/metrics")
_NAME: Final = "([a-z0-9.-]{1,253})"
_TOPIC: Final = f"/v1/{_NAME}/{_NAME}"
_SUBSCRIPTION: Final = f"{_TOPIC}/subscriptions/{_NAME}"
_CONSUMING: Final = "(?:pull|ack|nack|extend|leave|news|give-back)"


def _on_topic(verb: str) -> Callable[..., Rule]:
    return lambda namespace, name: Rule(topic(verb, namespace, name))


def _on_subscription(verb: str) -> Callable[..., Rule]:
    return lambda namespace, name, sub: Rule(subscription(verb, namespace, name, sub))


def _on_path(name: str) -> Callable[..., Rule]:
    return lambda: Rule(path("get", name))


_RULES: Final[tuple[tuple[str, re.Pattern[str], Callable[..., Rule]], ...]] = tuple(
    (method, re.compile(pattern), rule)
    for method, pattern, rule in (
        ("GET", "/healthz", lambda: OPEN),
        ("GET", "/readyz", lambda: OPEN),
        ("GET", "/metrics", _on_path("/metrics")),
        ("GET", "/openapi.json", _on_path("/openapi.json")),
        ("GET", "/v1/workers", _on_path("/v1/workers")),
        ("GET", "/v1/topics", lambda: LISTED),
        ("GET", f"/v1/{_NAME}", lambda namespace: _report(namespace)),
        ("POST", f"{_TOPIC}/messages", _on_topic(PRODUCE)),
        ("GET", f"{_TOPIC}(?:/messages|/stats)", _on_topic(CONSUME)),
        ("GET", f"{_TOPIC}(?:/socket)?", lambda namespace, name: _either(namespace, name)),
        ("POST", f"{_TOPIC}/(?:flush|commits)", _on_topic(ADMIN)),
        ("GET", rf"{_TOPIC}/partitions/\d+/handover", _on_topic(ADMIN)),
        ("POST", rf"{_TOPIC}/partitions/\d+/(?:move|give-up)", _on_topic(ADMIN)),
        ("GET", f"{_TOPIC}/subscriptions", lambda ns, name: _all_subscriptions(ns, name)),
        ("GET", f"{_SUBSCRIPTION}(?:/stream)?", _on_subscription(CONSUME)),
        ("POST", f"{_SUBSCRIPTION}/{_CONSUMING}", _on_subscription(CONSUME)),
        ("POST", f"{_SUBSCRIPTION}/(?:seek|replay|restore)", _on_subscription(ADMIN)),
    )
)


def _either(namespace: str, name: str) -> Rule:
    """Who produces, too, has to know the partitions and where they are."""
    return Rule(topic(CONSUME, namespace, name), topic(PRODUCE, namespace, name))


def _report(namespace: str) -> Rule:
    return Rule(topic(REPORT, namespace, ""), topic(ADMIN, namespace, ""))


def _all_subscriptions(namespace: str, name: str) -> Rule:
    return Rule(subscription(CONSUME, namespace, name, ""))


def required(method: str, path: str, home: str = "") -> Rule | None:
    """Return what a request needs; None: there is no such request.

    `home` is the namespace whose topics the worker serves, if it knows: who may have its reports
    may have its metrics. So a token can be for one namespace's metrics and open no other's.
    """
    if home and (method, path) == _METRICS:
        return Rule((Access("get", "", "", path),), topic(REPORT, home, ""))
    for verb, pattern, rule in _RULES:
        if verb == method and (match := pattern.fullmatch(path)) is not None:
            return rule(*match.groups())
    return None
