"""Who still reads a topic: subscriptions' cursors and the snapshots that they stand on.

Read from the coordination store, which every worker writes before an acknowledgement is answered.
A registered subscription counts, whether or not a consumer is connected now: what it has not read
is not to be removed behind its back. The decisions are pure; `Store` does the asking.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec

from tidewater_coordination import connect
from tidewater_coordination.port import Coordination, RegisteredSubscription, Registry
from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Invalid
from tidewater_pipeline.places import StoreSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a subscription has read a partition."""

    subscription: str
    partition: int
    offset: int
    snapshot: int | None = None
    """The table's snapshot that it read from last."""


@dataclass(frozen=True, slots=True)
class Subscribers:
    """What the store knows of a topic."""

    spec: TopicSpec | None = None
    """None: the topic is not registered."""
    cursors: tuple[Cursor, ...] = ()


def pins(cursors: Iterable[Cursor], frontiers: Mapping[int, int]) -> frozenset[int]:
    """Return the snapshots of those that still read history; the others read the live log."""
    return frozenset(
        each.snapshot
        for each in cursors
        if each.snapshot is not None and each.offset < frontiers.get(each.partition, 0)
    )


def subscriptions_of(registry: Registry, topic: str) -> list[RegisteredSubscription]:
    """Return the subscriptions that read a topic: those of its namespace that name it."""
    namespace, _, name = topic.partition("/")
    return [
        each
        for each in registry.subscriptions.values()
        if each.name.partition("/")[0] == namespace and _spec(each).topic == name
    ]


def cursors_of(
    subscription: RegisteredSubscription,
    topic_uuid: str,
    partitions: int,
    stored: Mapping[int, bytes],
) -> list[Cursor]:
    """Return where a subscription stands in each partition.

    Progress of an earlier subscription or topic of that name, or from before a reset, says
    nothing; a subscription without any has yet to begin and needs what it asks for: everything,
    unless it names a later place. `latest` needs nothing that is there already, but what it had not
    read yet of an earlier topic whose table this may be: its worker goes on there. A snapshot that
    is to be begun from must still be there then.
    """
    spec = _spec(subscription)
    found: list[Cursor] = []
    for partition in range(partitions):
        data = stored.get(partition)
        progress = None if data is None else _progress(subscription.name, partition, data)
        start = spec.start_from
        topics = {topic_uuid}
        if progress is not None and start.position == "latest":
            topics.add(progress.topic)
        if progress is not None and _is_current(progress, subscription, topics, spec):
            found.append(Cursor(subscription.name, partition, progress.next, progress.snapshot))
        elif start.position != "latest":
            found.append(Cursor(subscription.name, partition, start.offset or 0, start.snapshot_id))
    return found


def _is_current(
    progress: "_Progress",
    subscription: RegisteredSubscription,
    topics: Collection[str],
    spec: SubscriptionSpec,
) -> bool:
    if progress.subscription != subscription.uuid or progress.topic not in topics:
        return False
    return spec.reset_token is None or spec.reset_token == progress.reset_token


class _Progress(msgspec.Struct, frozen=True):
    """What is needed of a stored cursor; everything below `next` is acknowledged."""

    subscription: str
    topic: str
    next: Annotated[int, msgspec.Meta(ge=0)]
    reset_token: str | None = None
    snapshot: int | None = None
    v: Literal[1] = 1


def _progress(name: str, partition: int, data: bytes) -> _Progress:
    try:
        return msgspec.json.decode(data, type=_Progress)
    except msgspec.DecodeError as error:
        raise Corrupt(
            "CursorDamaged", f"the cursor of {name} in partition {partition}: {error}"
        ) from error


def _spec(subscription: RegisteredSubscription) -> SubscriptionSpec:
    try:
        return SubscriptionSpec.from_json(subscription.spec)
    except ValueError as error:  # pydantic's
        raise Invalid("InvalidSubscription", f"{subscription.name}: {error}") from error


def _topic_spec(topic: str, text: str) -> TopicSpec:
    try:
        return TopicSpec.from_json(text)
    except ValueError as error:
        raise Invalid("InvalidTopic", f"{topic}: {error}") from error


def open_store(given: StoreSettings) -> Coordination:
    """Return the store that the settings name, not yet connected."""
    return connect(
        given.place, prefix=given.prefix, tls=given.tls, user=given.user, password=given.password
    )


@dataclass(frozen=True, slots=True)
class Store:
    """Asks the coordination store; each question is a connection of its own."""

    settings: StoreSettings

    def check(self, topic: str) -> None:
        """Refuse a topic that this store does not know: its readers and jobs are in another."""

        async def ask(store: Coordination) -> bool:
            return topic in (await store.registry()).topics

        if not self._ask(ask):
            raise Invalid(
                "UnknownTopic",
                f"{topic} is not in the coordination store {self.settings.place}: nobody can say "
                "who reads it or works on its table; name the right store, or --force",
            )

    def subscribers(self, topic: str) -> Subscribers:
        """Return the topic's spec and every cursor on it."""

        async def ask(store: Coordination) -> Subscribers:
            registry = await store.registry()
            registered = registry.topics.get(topic)
            if registered is None:
                return Subscribers()
            spec = _topic_spec(topic, registered.spec)
            cursors: list[Cursor] = []
            for each in subscriptions_of(registry, topic):
                stored = await store.load_cursors(each.name, topic)
                cursors += cursors_of(each, registered.uuid, spec.partitions, stored)
            return Subscribers(spec, tuple(cursors))

        return self._ask(ask)

    def _ask(self, question: Callable[[Coordination], Awaitable[T]]) -> T:
        async def whole() -> T:
            store = open_store(self.settings)
            try:
                await store.start()
                return await question(store)
            finally:
                await store.close()

        return asyncio.run(whole())
