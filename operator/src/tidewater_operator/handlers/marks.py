"""The watches: what changed marks its namespace."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, Final, Protocol

import kopf

from tidewater_core.names import GROUP, LABEL_MANAGED_BY, VERSION
from tidewater_operator.hearing import Hearing
from tidewater_operator.model.names import MANAGER

WATCH_SERVER_S: Final = 240
"""The API server ends a watch after this time, and kopf begins another."""
WATCH_CLIENT_S: Final = 300
"""A watch that even then has not ended hangs: it is cut off."""
BACKOFFS_S: Final = (1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)
BACKOFF_S_MAX: Final = 30.0
AGAIN_S: Final = 5.0
"""Watches that ended all together begin anew after this."""
log = logging.getLogger(__name__)


class Backoffs:
    """Waits between tries of one watch, without an end.

    After its last try kopf ends all watches, of every namespace: one watched namespace that was
    deleted, with the rights in it, would end those of all others, and so would a minute of 503.
    """

    def __iter__(self) -> Iterator[float]:
        """Begin with short waits."""
        return chain(BACKOFFS_S, repeat(BACKOFF_S_MAX))


class Marker(Protocol):
    """Takes marks."""

    def mark(self, namespace: str, *, full: bool = True, known_only: bool = False) -> None:
        """Ask for a pass over a namespace."""

    def hear(self, topic: Mapping[str, Any], *, gone: bool) -> None:
        """Remember what a Topic says: it may be gone before anybody looks."""

    def gone(self, namespace: str) -> None:
        """Note that a namespace is gone."""


def watches(marker: Marker, hearing: Hearing, *, clusterwide: bool) -> kopf.OperatorRegistry:
    """Return kopf's registry with our handlers.

    Namespaces are only watched with rights over the whole cluster.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    # Coroutines: kopf runs plain functions in threads.
    async def heard(type: str | None, body: Any, **_: Any) -> None:
        meta = dict(body["metadata"])
        gone = type == "DELETED"
        if hearing.hear(str(body.get("kind", "")), meta, gone=gone):
            marker.mark(meta["namespace"], known_only=gone)

    for plural in ("topics", "subscriptions", "pools"):
        kopf.on.event(GROUP, VERSION, plural, registry=registry, id=plural)(heard)

    @kopf.on.event(GROUP, VERSION, "topics", registry=registry, id="last-words")
    async def topic_told(type: str | None, body: Any, **_: Any) -> None:
        marker.hear(body, gone=type == "DELETED")

    @kopf.on.event(
        "apps", "v1", "statefulsets", labels={LABEL_MANAGED_BY: MANAGER}, registry=registry
    )
    async def workers_changed(body: Any, **_: Any) -> None:
        marker.mark(body["metadata"]["namespace"], known_only=True)

    async def namespace_changed(type: str | None, body: Any, **_: Any) -> None:
        if type == "DELETED":
            marker.gone(body["metadata"]["name"])
        elif "deletionTimestamp" in body["metadata"]:
            marker.mark(body["metadata"]["name"], known_only=True)

    if clusterwide:
        kopf.on.event("", "v1", "namespaces", registry=registry)(namespace_changed)
    return registry


def watch_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: watches that end, and nothing but watches."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = WATCH_SERVER_S
    settings.watching.client_timeout = WATCH_CLIENT_S
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = Backoffs()
    settings.posting.enabled = False  # events are ours to write
    settings.scanning.disabled = True  # no rights on CRDs are needed
    return settings


async def watch(
    registry: kopf.OperatorRegistry, namespaces: Collection[str], stop: asyncio.Event
) -> None:
    """Watch some namespaces (none: all of them) until we are told to stop.

    Some words of the API server end all of kopf's watches: an error within a watch, a kind that is
    not there. They begin anew.
    """
    while not stop.is_set():
        try:
            await kopf.operator(
                registry=registry,
                settings=watch_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=stop,
            )
        except Exception as error:  # noqa: BLE001  (whatever it is, we are to hear on)
            log.error("the watches ended, and begin anew: %r", error)
            await asyncio.sleep(AGAIN_S)
        else:
            stop.set()  # kopf took the signal that was ours
