"""From what was found in a namespace to what must be done. Pure: the whole of the decision.

pools     which there must be, how many workers each has for now, which may go
registry  topics, subscriptions, who should have which partition
volumes   which grow, which are let go
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from tidewater_core.crd.pool import Pool
from tidewater_core.names import ANNOTATION_LEFTOVER, API_VERSION, LABEL_MADE_BY, LABEL_POOL
from tidewater_operator.assign import Crew, Holder, Place, assign
from tidewater_operator.life import (
    AcceptLoss,
    Action,
    Assign,
    Refusal,
    SubscriptionCase,
    TopicCase,
    ends,
    is_held,
    pool_of,
    registered_spec,
    subscription_actions,
    subscription_cases,
    topic_actions,
    topic_cases,
)
from tidewater_operator.model.compare import quantity
from tidewater_operator.model.names import (
    MANAGER,
    Manifest,
    ordinal_of,
    set_name,
    shared_labels,
    worker_name,
    worker_of_claim,
)
from tidewater_operator.observed import Observed, is_paused, read_pool
from tidewater_operator.settings import OperatorSettings
from tidewater_operator.times import parse_time

STARTING_S: Final = 60
"""A worker whose pod is younger than this is expected to be there in a moment."""
MOVES_MAX: Final = 16
"""Partitions of a pool that drain at the same time."""


@dataclass(frozen=True)
class PoolCase:
    """A pool and what is to become of it."""

    manifest: Manifest
    pool: Pool | None
    """None if its spec cannot be read."""
    refusal: Refusal | None = None
    paused: bool = False
    replicas: int = 0
    """Workers for now: those that are being drained are still there."""
    live_replicas: int = 0
    """Workers that the StatefulSet asks for already."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Worker → partitions whose messages may be on its volume alone."""
    unheard: Sequence[str] = ()
    """Workers that are too many and have not said what is on their volumes."""
    topics: int = 0
    partitions: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def draining(self) -> list[str]:
        """Workers that are too many and still hold something."""
        wanted = self.pool.spec.replicas if self.pool else 0
        return [
            worker
            for worker in sorted(self.held)
            if (ordinal := ordinal_of(self.name, worker)) is not None and ordinal >= wanted
        ]


@dataclass(frozen=True)
class Growth:
    """A volume that must grow."""

    claim: str
    size: str


@dataclass(frozen=True)
class Plan:
    """Everything that must be done."""

    topics: Sequence[TopicCase] = ()
    subscriptions: Sequence[SubscriptionCase] = ()
    pools: Sequence[PoolCase] = ()
    make_pools: Sequence[Manifest] = ()
    drop_pools: Sequence[str] = ()
    unused_pools: Sequence[str] = ()
    """Made by us and needed by nobody; they go after a while."""
    registry: Sequence[Action] = ()
    grow: Sequence[Growth] = ()
    drop_claims: Sequence[str] = ()
    mark_claims: Mapping[str, str] = field(default_factory=dict)
    """Volume → logs on it that may have messages which are nowhere else, to be noted on it."""
    assignments: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Topic → partition → worker, as it should be."""


def plan(seen: Observed, settings: OperatorSettings) -> Plan:
    """Decide everything."""
    if seen.cluster.is_terminating:
        # Its workers bring what they have into the tables as they stop. One whose topic is no
        # longer registered would let go of it instead: the registry goes after the namespace.
        return Plan()
    topics = topic_cases(seen, allow_foreign=settings.tables.allow_foreign)
    subscriptions = subscription_cases(seen)
    needed = _needed_pools(seen, topics)
    # A paused topic gets nothing new. What it may have had stays: its registry may be lost.
    wanted = _needed_pools(seen, [case for case in topics if not case.paused])
    pools = [_pool_case(seen, manifest, needed) for manifest in seen.cluster.pools]
    there = {case.name for case in pools}
    unused = [case.name for case in pools if _is_unused(case, needed)]
    actions = topic_actions(seen, topics)
    assignments = _assignments(seen, topics, pools, actions)
    current = seen.registry.assignments
    prefix = f"{seen.cluster.namespace}/"
    return Plan(
        topics=topics,
        subscriptions=subscriptions,
        pools=pools,
        make_pools=[
            _made(seen.cluster.namespace, name, settings) for name in sorted(wanted - there)
        ],
        drop_pools=[name for name in unused if _may_go(seen, name, settings)],
        unused_pools=unused,
        registry=[
            *actions,
            *(
                Assign(name, tuple(sorted(workers.items())))
                for name, workers in sorted(assignments.items())
                if current.get(prefix + name) != workers
            ),
            *subscription_actions(seen, subscriptions),
        ],
        grow=_growth(seen, pools),
        drop_claims=_free_claims(seen, pools, needed),
        mark_claims=_marks(seen),
        assignments=assignments,
    )


def takes_away(decided: Plan) -> bool:
    """Tell whether a plan lets go of something for good: a worker, its volume, what is registered.

    Such a plan is made again, on what etcd's majority says and what is there after that, before
    anything of it is done.
    """
    return bool(
        decided.drop_claims
        or decided.drop_pools
        or ends(decided.registry)
        or any(
            case.replicas < case.live_replicas
            for case in decided.pools
            if case.pool is not None and not case.paused
        )
    )


# ---- pools


def _needed_pools(seen: Observed, topics: Sequence[TopicCase]) -> frozenset[str]:
    """Return the pools that topics need: those that are served, and those that are drained."""
    needed = set()
    for case in topics:
        waits = case.refusal is not None and case.refusal.reason == "PreviousDeleting"
        if case.topic is not None and (case.refusal is None or waits):
            needed.add(pool_of(case.name, case.topic.spec))
    for full, reg in seen.registry.topics.items():
        spec = registered_spec(reg)
        if spec is not None:
            needed.add(pool_of(full.partition("/")[2], spec))
    # A volume with messages that are nowhere else needs its worker back, whoever serves the topic.
    held = _held_workers(seen)
    for claim in seen.cluster.claims:
        if worker_of_claim(claim["metadata"]["name"]) in held:
            needed.add(str(claim["metadata"].get("labels", {}).get(LABEL_POOL, "default")))
    return frozenset(needed)


def _held_workers(seen: Observed) -> set[str]:
    """Return the workers on whose volumes messages may be that are nowhere else."""
    return {
        owner.worker_id
        for owners in seen.registry.owners.values()
        for owner in owners.values()
        if is_held(owner)
    }


def _made(namespace: str, name: str, settings: OperatorSettings) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": "Pool",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {**shared_labels(), LABEL_MADE_BY: "operator"},
        },
        "spec": settings.pool_defaults.model_dump(by_alias=True, exclude_none=True, mode="json"),
    }


def _pool_case(seen: Observed, manifest: Manifest, needed: frozenset[str]) -> PoolCase:
    name = str(manifest["metadata"]["name"])
    pool = read_pool(manifest)
    live = seen.cluster.objects.get(("StatefulSet", set_name(name)))
    live_replicas = int(live["spec"].get("replicas", 1)) if live else 0
    case = PoolCase(manifest, None, paused=is_paused(manifest), live_replicas=live_replicas)
    case = replace(case, held=_held_by_worker(seen, name), **_load(seen, name))
    if isinstance(pool, str):
        return replace(case, refusal=Refusal("InvalidSpec", pool), replicas=live_replicas)
    claims = {claim["metadata"]["name"] for claim in seen.cluster.claims}
    ordinals = [
        ordinal
        for worker in case.held
        # Without its volume there is nothing to bring back.
        if (ordinal := ordinal_of(name, worker)) is not None and f"data-{worker}" in claims
    ]
    extra = _too_many(seen, case, pool.spec.replicas)
    unheard = [worker for worker in extra if worker not in seen.reports]
    unnoted = [worker for worker in extra if f"data-{worker}" in _marks(seen)]
    ordinals += [
        ordinal
        for worker in (*unheard, *unnoted)
        if (ordinal := ordinal_of(name, worker)) is not None
    ]
    # A record that cannot be read may be of any worker: then none of them goes.
    least = live_replicas if seen.registry.unreadable else 0
    replicas = max([pool.spec.replicas, least, *(ordinal + 1 for ordinal in ordinals)])
    return replace(case, pool=pool, replicas=replicas, unheard=unheard)


def _too_many(seen: Observed, case: PoolCase, wanted: int) -> list[str]:
    """Return the workers that are too many and are there.

    They stay until they have said what is on their volumes, and that is noted: there may be logs of
    topics that are gone, which no record tells of, and the volume goes with the worker. One that
    was told to stop already is not called back.
    """
    claims = {claim["metadata"]["name"] for claim in seen.cluster.claims}
    is_made = ("StatefulSet", set_name(case.name)) in seen.cluster.objects
    found = []
    for worker, pod in sorted(seen.cluster.worker_pods.items()):
        ordinal = ordinal_of(case.name, worker)
        if ordinal is None or ordinal < wanted or (is_made and ordinal >= case.live_replicas):
            continue
        is_there = worker in seen.registry.workers and "deletionTimestamp" not in pod["metadata"]
        if is_there and f"data-{worker}" in claims:
            found.append(worker)
    return found


def _held_by_worker(seen: Observed, pool: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for owners in seen.registry.owners.values():
        for owner in owners.values():
            if is_held(owner) and ordinal_of(pool, owner.worker_id) is not None:
                found[owner.worker_id] = found.get(owner.worker_id, 0) + 1
    return found


def _load(seen: Observed, pool: str) -> dict[str, Any]:
    """Count the topics and partitions of a pool."""
    sizes = [
        spec.partitions
        for full, reg in seen.registry.topics.items()
        if (spec := registered_spec(reg)) is not None
        and pool_of(full.partition("/")[2], spec) == pool
    ]
    return {"topics": len(sizes), "partitions": sum(sizes)}


def _is_unused(case: PoolCase, needed: frozenset[str]) -> bool:
    made = case.manifest["metadata"].get("labels", {}).get(LABEL_MADE_BY) == "operator"
    if not made or case.paused or case.held or case.name in needed:
        return False
    return case.name.startswith("topic-") or not _is_a_persons(case.manifest)


def _is_a_persons(manifest: Manifest) -> bool:
    """Tell whether somebody else has set something in an object's spec: then it is theirs."""
    return any(
        entry.get("manager") != MANAGER and "f:spec" in (entry.get("fieldsV1") or {})
        for entry in manifest["metadata"].get("managedFields") or ()
        if entry.get("subresource") != "status"
    )


def _may_go(seen: Observed, name: str, settings: OperatorSettings) -> bool:
    if seen.registry.unreadable:
        return False
    if name.startswith("topic-"):
        return True  # its one topic is gone
    since = seen.unused_since.get(name)
    return (
        since is not None
        and (seen.now - since).total_seconds() >= settings.intervals.unused_pool.seconds
    )


# ---- who should have what


def _assignments(
    seen: Observed,
    topics: Sequence[TopicCase],
    pools: Sequence[PoolCase],
    actions: Sequence[Action],
) -> dict[str, dict[int, str]]:
    """Return the assignment of every topic that is served by a pool that we may touch."""
    lost = {(a.name, number) for a in actions if isinstance(a, AcceptLoss) for number in a.give_up}
    found: dict[str, dict[int, str]] = {}
    for pool in pools:
        if pool.pool is None or pool.paused:
            continue
        sizes = {
            case.name: size
            for case in topics
            if not case.paused and (size := _size(seen, case, pool.name)) is not None
        }
        if not sizes:
            continue
        crew = _crew(seen, pool.name, pool.pool.spec.replicas)
        found |= assign(sizes, crew, _current(seen, sizes), _holders(seen, sizes, lost), MOVES_MAX)
    return found


def _size(seen: Observed, case: TopicCase, pool: str) -> int | None:
    """Return a topic's number of partitions if this pool serves it."""
    spec = case.topic.spec if case.topic is not None and case.refusal is None else None
    if spec is None:
        # What was refused goes on as it is registered.
        reg = seen.registered(case.name)
        spec = registered_spec(reg) if reg is not None and reg.uuid == case.uid else None
    if spec is None or pool_of(case.name, spec) != pool:
        return None
    return spec.partitions


def _crew(seen: Observed, pool: str, replicas: int) -> Crew:
    members = [worker_name(pool, ordinal) for ordinal in range(replicas)]
    live = [worker for worker in members if worker in seen.registry.workers]
    pods = seen.cluster.worker_pods
    starting = [
        worker
        for worker in members
        if worker in pods
        and worker not in live
        and "deletionTimestamp" not in pods[worker]["metadata"]
        and _age_s(pods[worker], seen.now) < STARTING_S
    ]
    # A leaving worker is live, too: what it holds can be drained.
    return Crew(members, live=live, starting=starting)


def _age_s(manifest: Manifest, now: datetime) -> float:
    made = parse_time(manifest["metadata"].get("creationTimestamp"))
    return 0.0 if made is None else (now - made).total_seconds()


def _current(seen: Observed, sizes: Mapping[str, int]) -> dict[str, Mapping[int, str]]:
    """Return what was decided before; of a registry that was lost, what the status remembers.

    Logs are where they were: a worker that gets another one's partition would leave them behind.
    """
    prefix = f"{seen.cluster.namespace}/"
    remembered = {
        topic["metadata"]["name"]: {
            int(part["partition"]): str(part["worker"])
            for part in (topic.get("status") or {}).get("partitions") or ()
            if part.get("worker")
        }
        for topic in seen.cluster.topics
    }
    return {
        name: seen.registry.assignments.get(prefix + name) or remembered.get(name, {})
        for name in sizes
    }


def _holders(seen: Observed, sizes: Mapping[str, int], lost: set[Place]) -> dict[Place, Holder]:
    prefix = f"{seen.cluster.namespace}/"
    return {
        (name, partition): Holder(owner.worker_id, owner.is_live)
        for name in sizes
        for partition, owner in seen.registry.owners.get(prefix + name, {}).items()
        if is_held(owner) and (name, partition) not in lost
    }


# ---- volumes


def _growth(seen: Observed, pools: Sequence[PoolCase]) -> list[Growth]:
    """Return the volumes that are smaller than their pool asks for."""
    found = []
    for case in pools:
        if case.pool is None or case.paused:
            continue
        size = case.pool.spec.storage.size
        for claim in claims_of(seen, case.name):
            asked = claim["spec"].get("resources", {}).get("requests", {}).get("storage", "0")
            if bytes_of(asked) < size:
                found.append(Growth(claim["metadata"]["name"], str(size)))
    return found


def claims_of(seen: Observed, pool: str) -> list[Manifest]:
    """Return the volumes of a pool's workers."""
    return [
        claim
        for claim in seen.cluster.claims
        if ordinal_of(pool, worker_of_claim(claim["metadata"]["name"])) is not None
    ]


def bytes_of(amount: object) -> int:
    """Read a quantity of bytes as the API server writes it; 0 if it is none."""
    return int(quantity(amount) or 0)


def evidence_on(claim: Manifest) -> str:
    """Return what is noted of logs on a volume that a person has to look at; empty: nothing."""
    return str((claim["metadata"].get("annotations") or {}).get(ANNOTATION_LEFTOVER, ""))


def _marks(seen: Observed) -> dict[str, str]:
    """Return what is to be noted on volumes: it must outlive the worker that told.

    A worker that names no log may not have looked yet: what is noted stays until a person has it.
    """
    found = {}
    for claim in seen.cluster.claims:
        name = str(claim["metadata"]["name"])
        report = seen.reports.get(worker_of_claim(name))
        if report is not None and report.evidence not in ("", evidence_on(claim)):
            found[name] = report.evidence
    return found


def _free_claims(seen: Observed, pools: Sequence[PoolCase], needed: frozenset[str]) -> list[str]:
    """Return the volumes whose worker is gone for good and on which nothing is left.

    Nothing of it holds without the registry's word: a registry that was never used says nothing,
    and a record that cannot be read may say that any of them is needed.
    """
    if not seen.registry_is_known or seen.registry.unreadable:
        return []
    held = _held_workers(seen)
    by_name = {case.name: case for case in pools}
    found = []
    for claim in seen.cluster.claims:
        name = str(claim["metadata"]["name"])
        worker = worker_of_claim(name)
        pool = claim["metadata"].get("labels", {}).get(LABEL_POOL, "")
        ordinal = ordinal_of(pool, worker)
        if ordinal is None or worker in held or "deletionTimestamp" in claim["metadata"]:
            continue
        if evidence_on(claim):
            continue
        if worker in seen.cluster.worker_pods or worker in seen.registry.workers:
            continue
        case = by_name.get(pool)
        if case is None:
            stays = pool in needed or ("StatefulSet", set_name(pool)) in seen.cluster.objects
        else:
            stays = (
                case.pool is None or case.paused or ordinal < max(case.replicas, case.live_replicas)
            )
        if not stays:
            found.append(name)
    return found
