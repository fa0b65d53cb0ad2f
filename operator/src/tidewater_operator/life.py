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

from tidewater_coordination.port import (
    GIVEN_UP_MAX,
    AcceptedLoss,
    Ownership,
    RegisteredTopic,
    TopicPhase,
)
from tidewater_core.crd.change import subscription_change_problems, topic_change_problems
from tidewater_core.crd.subscription import Subscription, SubscriptionSpec
from tidewater_core.crd.topic import DeletionPolicy, Topic, TopicSpec, table_identifier
from tidewater_core.names import ANNOTATION_ACCEPT_LOSS, TopicName, dedicated_pool
from tidewater_operator.last_words import wants_table
from tidewater_operator.model.names import Manifest, worker_of_claim
from tidewater_operator.observed import Observed, is_paused, read_subscription, read_topic

WORD_CHARS_MAX: Final = 1_000
SILENT_S_MAX: Final = 60
"""More than a session lasts: who has one all that time is there, whether or not it answers."""
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
    keeps_table: bool = True
    """Then the progress of its subscriptions stays, too: a topic that is made again goes on."""


@dataclass(frozen=True)
class AcceptLoss:
    """Act on a person's word that volumes are lost."""

    name: str
    uuid: str
    """Of the topic as it is registered."""
    accepted: AcceptedLoss
    give_up: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """What the gap is remembered by."""
        return f"annotation {ANNOTATION_ACCEPT_LOSS}: {self.accepted.word[:100]}"


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
    | AcceptLoss
    | Assign
    | RegisterSubscription
    | UnregisterSubscription
)


def ends(actions: Iterable[Action]) -> bool:
    """Tell whether any of these ends something that is registered."""
    endings = BeginDeletion | UnregisterTopic | UnregisterSubscription
    return any(isinstance(action, endings) for action in actions)


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
    # Ours last: what is registered here is not refused for the sake of another namespace.
    for name, reg in (*seen.elsewhere.items(), *seen.registry.topics.items()):
        spec = registered_spec(reg)
        if spec is not None:
            is_ours = name in seen.registry.topics
            known_as = name.partition("/")[2] if is_ours else name
            tables[table_identifier(TopicName.parse(name), spec)] = known_as
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
        if case is None or case.uid != reg.uuid or reg.phase != TopicPhase.ACTIVE:
            found.extend(_deletion(seen, name, reg, case))
    for case in by_name.values():
        reg_now = seen.registered(case.name)
        if case.paused or case.refusal is not None:
            found.extend(_protection(case, reg_now))
        if case.paused:
            continue
        if case.refusal is None and case.topic is not None:
            spec = case.topic.spec.to_json()
            if reg_now is None or reg_now.spec != spec:
                found.append(RegisterTopic(case.name, spec, case.uid))
        elif reg_now is None or reg_now.uuid != case.uid or reg_now.phase != TopicPhase.ACTIVE:
            continue  # else it is served by an earlier spec, and a person's word counts
        found.extend(accept_loss(seen, case, reg_now))
    return found


def _protection(case: TopicCase, reg: RegisteredTopic | None) -> list[Action]:
    """Have the table kept if the object says so, though nothing else of its spec is taken."""
    is_ours = reg is not None and reg.uuid == case.uid and reg.phase == TopicPhase.ACTIVE
    if reg is None or not is_ours or not wants_table(case.manifest):
        return []
    return _retained(case.name, reg)


def _retained(name: str, reg: RegisteredTopic) -> list[Action]:
    """Register that a table stays, and what was registered besides."""
    spec = registered_spec(reg)
    if spec is None or spec.deletion_policy is DeletionPolicy.RETAIN:
        return []
    kept = spec.model_copy(update={"deletion_policy": DeletionPolicy.RETAIN})
    return [RegisterTopic(name, kept.to_json(), reg.uuid)]


def _deletion(
    seen: Observed, name: str, reg: RegisteredTopic, successor: TopicCase | None
) -> list[Action]:
    if successor is not None and successor.paused:
        return []
    has_table = reg.phase != TopicPhase.DROPPED
    if has_table and reg.uuid in seen.retained and (first := _retained(name, reg)):
        return first  # deleted before its last word could be registered: that, and nothing else
    if reg.phase == TopicPhase.ACTIVE:
        return [BeginDeletion(name, reg.uuid)]
    full = f"{seen.cluster.namespace}/{name}"
    left = [owner for owner in seen.registry.owners.get(full, {}).values() if is_held(owner)]
    if any(key.startswith(f"owners/{full}/") for key in seen.registry.unreadable):
        return []  # who knows who holds it
    if left:
        # Who made the new one may say that the old one's volume is lost.
        return [] if successor is None else accept_loss(seen, successor, reg)
    spec = registered_spec(reg)
    if spec is not None and spec.deletion_policy is DeletionPolicy.DELETE:
        if reg.phase != TopicPhase.DROPPED:
            return []  # a worker drops the table first, also behind a volume that was given up
        why = "it is drained and its table was dropped"
        return [UnregisterTopic(name, why, keeps_table=False)]
    return [UnregisterTopic(name, "it is drained; its table stays")]


def is_held(owner: Ownership) -> bool:
    """Tell whether a partition may have messages that are on its volume alone."""
    return owner.drained_at is None and owner.given_up is None


def has_lost_its_volume(seen: Observed, owner: Ownership) -> bool:
    """Tell whether a worker came back with another volume than the one that holds a partition."""
    successor = seen.registry.workers.get(owner.worker_id)
    return successor is not None and owner.volume not in ("", successor.volume)


def _may_come_back(seen: Observed, owner: Ownership) -> bool:
    """Tell whether a worker that is away may be on its way back with its volume."""
    claims = {worker_of_claim(claim["metadata"]["name"]) for claim in seen.cluster.claims}
    return owner.worker_id in claims and not has_lost_its_volume(seen, owner)


def word_of(manifest: Manifest) -> str:
    """Return what a person says of lost volumes."""
    annotations = manifest["metadata"].get("annotations") or {}
    return str(annotations.get(ANNOTATION_ACCEPT_LOSS, ""))[:WORD_CHARS_MAX]


def accept_loss(seen: Observed, case: TopicCase, reg: RegisteredTopic | None) -> list[Action]:
    """Give up the partitions that `tidewater.dev/accept-loss` names, once for each new value.

    `"0,2"` or `"all"`, and anything behind a space (to make it new). Only partitions whose worker
    is not there: one that is can be drained. Waited for, a minute at most, is one that has a
    session and does not answer, since a worker that died has one for some seconds more; and, if
    only "all" names it, one whose volume is there, since it may just be starting anew. `reg` is
    the topic that is registered under the name; one that is only about to be has lost nothing yet.
    """
    word = word_of(case.manifest)
    known = None if reg is None else reg.accepted
    if not word or (known is None and word == _told_as_accepted(case.manifest)):
        return []
    if reg is None:
        return [AcceptLoss(case.name, case.uid, AcceptedLoss(word))]
    now_s = int(seen.now.timestamp())
    owners = seen.registry.owners.get(f"{seen.cluster.namespace}/{case.name}", {})
    named = {part.strip() for part in word.split(" ")[0].split(",")}
    if known is None or known.word != word:
        numbers = [n for n in sorted(owners) if "all" in named or str(n) in named]
        until_s = now_s + SILENT_S_MAX
    else:
        numbers, until_s = list(known.waits), known.until_s
    held = {n: owners[n] for n in numbers if n in owners and is_held(owners[n])}
    gone = [n for n, owner in held.items() if not owner.is_live]
    waits = []
    if now_s < until_s:
        waits = [
            n
            for n, owner in held.items()
            if (owner.is_live and owner.worker_id not in seen.reports)
            or (n in gone and str(n) not in named and _may_come_back(seen, owner))
        ]
    gone = [n for n in gone if n not in waits]
    give_up, later = tuple(gone[:GIVEN_UP_MAX]), gone[GIVEN_UP_MAX:]
    accepted = AcceptedLoss(word, tuple(sorted([*later, *waits])), until_s)
    if accepted == known:
        return []
    return [AcceptLoss(case.name, reg.uuid, accepted, give_up)]


def _told_as_accepted(manifest: Manifest) -> str:
    return str((manifest.get("status") or {}).get("acceptedLoss", ""))


def accepted_word(manifest: Manifest, reg: RegisteredTopic | None) -> str:
    """Return the last word that was acted on, for the status."""
    known = None if reg is None else reg.accepted
    if known is not None and known.word == word_of(manifest) and not known.waits:
        return known.word
    return _told_as_accepted(manifest)


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
        if case is None or (reg.uuid != case.manifest["metadata"]["uid"] and not case.paused):
            found.append(UnregisterSubscription(full.partition("/")[2]))
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
