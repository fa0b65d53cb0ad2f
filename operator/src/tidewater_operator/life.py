"""The life of topics and subscriptions: what the registry must be told. Pure.

Objects go at once when a person deletes them; the registry remembers what is still to be done
(docs/rfcs/0006-deletion-without-finalizers.md):

    object there          → registered, active
    gone, or another uid  → deleting: workers drain and let go
    drained (and dropped) → unregistered; a new object of the name may follow
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tidewater_coordination.port import Ownership, RegisteredTopic, TopicPhase
from tidewater_core.crd.change import subscription_change_problems, topic_change_problems
from tidewater_core.crd.subscription import Subscription, SubscriptionSpec
from tidewater_core.crd.topic import DeletionPolicy, Topic, TopicSpec, table_identifier
from tidewater_core.names import ANNOTATION_ACCEPT_LOSS, TopicName, dedicated_pool
from tidewater_operator.model.names import Manifest
from tidewater_operator.observed import Observed, is_paused, read_subscription, read_topic

SPECS_MAX: Final = 10_000
"""Specs that are remembered: reading one takes half a millisecond, and every pass needs all."""


@dataclass(frozen=True)
class Refusal:
    """Why an object cannot be served as it is."""

    reason: str
    message: str


@dataclass(frozen=True)
class TopicCase:
    """A Topic object and what is to become of it."""

    manifest: Manifest
    topic: Topic | None
    refusal: Refusal | None = None
    paused: bool = False

    @property
    def name(self) -> str:
        """Its name within the namespace."""
        return str(self.manifest["metadata"]["name"])

    @property
    def uid(self) -> str:
        """The identity that the API server gave it."""
        return str(self.manifest["metadata"]["uid"])


@dataclass(frozen=True)
class SubscriptionCase:
    """A Subscription object and what is to become of it."""

    manifest: Manifest
    subscription: Subscription | None
    refusal: Refusal | None = None
    paused: bool = False

    @property
    def name(self) -> str:
        """Its name within the namespace."""
        return str(self.manifest["metadata"]["name"])


# ---- what the registry is told


@dataclass(frozen=True)
class RegisterTopic:
    """Add a topic, or change its spec."""

    name: str
    spec: str
    uid: str


@dataclass(frozen=True)
class BeginDeletion:
    """Tell the workers to drain a topic for good."""

    name: str
    uuid: str


@dataclass(frozen=True)
class UnregisterTopic:
    """Forget a topic."""

    name: str
    why: str


@dataclass(frozen=True)
class GiveUp:
    """Pass on a person's word that a volume is lost."""

    name: str
    partition: int
    reason: str


@dataclass(frozen=True)
class Assign:
    """Say which worker should have which partition."""

    name: str
    workers: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class RegisterSubscription:
    """Add a subscription, or change its spec."""

    name: str
    spec: str
    uid: str


@dataclass(frozen=True)
class UnregisterSubscription:
    """Forget a subscription."""

    name: str


Action = (
    RegisterTopic
    | BeginDeletion
    | UnregisterTopic
    | GiveUp
    | Assign
    | RegisterSubscription
    | UnregisterSubscription
)


def pool_of(name: str, spec: TopicSpec) -> str:
    """Return the pool that serves a topic."""
    return dedicated_pool(name) if spec.dedicated else spec.pool


# ---- topics


def topic_cases(seen: Observed, *, allow_foreign: bool) -> list[TopicCase]:
    """Judge every Topic object; of two that want one table the older one has it."""
    by_age = sorted(
        seen.cluster.topics,
        key=lambda m: (m["metadata"].get("creationTimestamp") or "", m["metadata"]["name"]),
    )
    tables: dict[tuple[str, ...], str] = {}
    for name, reg in seen.registry.topics.items():
        spec = registered_spec(reg)
        if spec is not None:
            tables[table_identifier(TopicName.parse(name), spec)] = name.partition("/")[2]
    cases = []
    for manifest in by_age:
        topic = read_topic(manifest)
        if isinstance(topic, str):
            refusal = Refusal("InvalidSpec", topic)
            cases.append(TopicCase(manifest, None, refusal, is_paused(manifest)))
            continue
        refused = _refusal(seen, topic, tables, allow_foreign=allow_foreign)
        if refused is None:
            tables[topic.table_identifier] = topic.metadata.name
        cases.append(TopicCase(manifest, topic, refused, is_paused(manifest)))
    return cases


def _refusal(
    seen: Observed, topic: Topic, tables: dict[tuple[str, ...], str], *, allow_foreign: bool
) -> Refusal | None:
    name, identifier = topic.metadata.name, topic.table_identifier
    reg = seen.registered(name)
    if reg is not None and (reg.uuid != topic.metadata.uid or reg.phase != TopicPhase.ACTIVE):
        return Refusal(
            "PreviousDeleting",
            "an earlier topic of this name is being drained; this one follows when it is gone",
        )
    if identifier[:-1] != (topic.metadata.namespace,) and not allow_foreign:
        return Refusal(
            "ForeignTable",
            f"table {'.'.join(identifier)} is not in the catalog namespace "
            f"{topic.metadata.namespace}, and the operator's settings allow no other",
        )
    if tables.get(identifier, name) != name:
        return Refusal(
            "TableTaken",
            f"table {'.'.join(identifier)} is topic {tables[identifier]}'s; two topics cannot "
            "share one",
        )
    old = None if reg is None else registered_spec(reg)
    if old is not None and (found := topic_change_problems(old, topic.spec)):
        return Refusal("InvalidChange", f"{'; '.join(found)}. It goes on as it was")
    return None


def registered_spec(reg: RegisteredTopic) -> TopicSpec | None:
    """Read the spec of a registered topic; None if another version wrote what we cannot read."""
    return _topic_spec(reg.spec)


@lru_cache(maxsize=SPECS_MAX)
def _topic_spec(text: str) -> TopicSpec | None:
    try:
        return TopicSpec.from_json(text)
    except ValueError:
        return None


@lru_cache(maxsize=SPECS_MAX)
def _subscription_spec(text: str) -> SubscriptionSpec | None:
    try:
        return SubscriptionSpec.from_json(text)
    except ValueError:
        return None


def topic_actions(seen: Observed, cases: Iterable[TopicCase]) -> list[Action]:
    """Say what the registry must be told of topics, deletions first."""
    by_name = {case.name: case for case in cases}
    found: list[Action] = []
    for full, reg in sorted(seen.registry.topics.items()):
        name = full.partition("/")[2]
        case = by_name.get(name)
        if seen.cluster.is_terminating:
            found.append(UnregisterTopic(name, "its namespace goes"))
        elif case is None or case.uid != reg.uuid:
            found.extend(_deletion(seen, name, reg, case))
    if seen.cluster.is_terminating:
        return found
    for case in by_name.values():
        if case.paused or case.refusal is not None or case.topic is None:
            continue
        reg_now = seen.registered(case.name)
        spec = case.topic.spec.to_json()
        if reg_now is None or reg_now.spec != spec:
            found.append(RegisterTopic(case.name, spec, case.uid))
        found.extend(give_ups(seen, case))
    return found


def _deletion(
    seen: Observed, name: str, reg: RegisteredTopic, successor: TopicCase | None
) -> list[Action]:
    if successor is not None and successor.paused:
        return []
    if reg.phase == TopicPhase.ACTIVE:
        return [BeginDeletion(name, reg.uuid)]
    owners = seen.registry.owners.get(f"{seen.cluster.namespace}/{name}", {})
    left = [owner for owner in owners.values() if is_held(owner)]
    if left:
        # Who made the new one may say that the old one's volume is lost.
        return [] if successor is None else give_ups(seen, successor)
    spec = registered_spec(reg)
    if spec is not None and spec.deletion_policy is DeletionPolicy.DELETE:
        given_up = any(owner.given_up is not None for owner in owners.values())
        if reg.phase != TopicPhase.DROPPED and not given_up:
            return []  # a worker drops the table first
        return [UnregisterTopic(name, "it is drained and its table was dropped")]
    return [UnregisterTopic(name, "it is drained; its table stays")]


def is_held(owner: Ownership) -> bool:
    """Tell whether a partition may have messages that are on its volume alone."""
    return owner.drained_at is None and owner.given_up is None


def accepted_loss(manifest: Manifest) -> str:
    """Return the word of a person that volumes are lost, if we have not acted on it yet."""
    word = str((manifest["metadata"].get("annotations") or {}).get(ANNOTATION_ACCEPT_LOSS, ""))
    return "" if word == (manifest.get("status") or {}).get("acceptedLoss", "") else word


def give_ups(seen: Observed, case: TopicCase) -> list[Action]:
    """Give up the partitions that `tidewater.dev/accept-loss` names, once for each new value.

    `"0,2"` or `"all"`, and anything behind a space (to make it new). Only partitions whose worker
    is not there: one that is can be drained.
    """
    word = accepted_loss(case.manifest)
    if not word:
        return []
    named = {part.strip() for part in word.split(" ")[0].split(",")}
    owners = seen.registry.owners.get(f"{seen.cluster.namespace}/{case.name}", {})
    return [
        GiveUp(case.name, number, f"annotation {ANNOTATION_ACCEPT_LOSS}: {word[:100]}")
        for number, owner in sorted(owners.items())
        if ("all" in named or str(number) in named) and is_held(owner) and not owner.is_live
    ]


# ---- subscriptions


def subscription_cases(seen: Observed) -> list[SubscriptionCase]:
    """Judge every Subscription object."""
    topics = {manifest["metadata"]["name"] for manifest in seen.cluster.topics}
    cases = []
    for manifest in seen.cluster.subscriptions:
        subscription = read_subscription(manifest)
        paused = is_paused(manifest)
        if isinstance(subscription, str):
            refusal = Refusal("InvalidSpec", subscription)
            cases.append(SubscriptionCase(manifest, None, refusal, paused))
            continue
        refused = _subscription_refusal(seen, subscription, topics)
        cases.append(SubscriptionCase(manifest, subscription, refused, paused))
    return cases


def _subscription_refusal(
    seen: Observed, subscription: Subscription, topics: set[str]
) -> Refusal | None:
    topic = subscription.spec.topic
    if topic not in topics:
        return Refusal("TopicNotFound", f"there is no topic {topic!r} in this namespace")
    full = f"{seen.cluster.namespace}/{subscription.metadata.name}"
    reg = seen.registry.subscriptions.get(full)
    if reg is not None and reg.uuid == subscription.metadata.uid:
        old = _subscription_spec(reg.spec)
        if old is not None and (found := subscription_change_problems(old, subscription.spec)):
            return Refusal("InvalidChange", f"{'; '.join(found)}. It goes on as it was")
    return None


def subscription_actions(seen: Observed, cases: Iterable[SubscriptionCase]) -> list[Action]:
    """Say what the registry must be told of subscriptions."""
    by_name = {case.name: case for case in cases}
    found: list[Action] = []
    for full, reg in sorted(seen.registry.subscriptions.items()):
        case = by_name.get(full.partition("/")[2])
        if (
            seen.cluster.is_terminating
            or case is None
            or (reg.uuid != case.manifest["metadata"]["uid"] and not case.paused)
        ):
            found.append(UnregisterSubscription(full.partition("/")[2]))
    if seen.cluster.is_terminating:
        return found
    gone = {action.name for action in found if isinstance(action, UnregisterSubscription)}
    for case in by_name.values():
        if case.paused or case.refusal is not None or case.subscription is None:
            continue
        known = seen.registry.subscriptions.get(f"{seen.cluster.namespace}/{case.name}")
        spec = case.subscription.spec.to_json()
        if known is None or case.name in gone or known.spec != spec:
            uid = str(case.manifest["metadata"]["uid"])
            found.append(RegisterSubscription(case.name, spec, uid))
    return found
