"""A namespace in memory: objects, registry and workers that do what real ones do.

The operator's plan is tried on it without a cluster: effects are applied one at a time, so that
a test can stop after any of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tidewater_coordination import rules
from tidewater_coordination.port import (
    Ownership,
    RegisteredSubscription,
    RegisteredTopic,
    Registry,
    TopicPhase,
    WorkerInfo,
)
from tidewater_core.crd.topic import DeletionPolicy, TopicSpec
from tidewater_core.names import ANNOTATION_LEFTOVER as LEFTOVER
from tidewater_operator.life import (
    AcceptLoss,
    Action,
    Assign,
    BeginDeletion,
    RegisterSubscription,
    RegisterTopic,
    UnregisterSubscription,
    UnregisterTopic,
)
from tidewater_operator.model.names import labels, ordinal_of, set_name, worker_name
from tidewater_operator.observed import Observed, Snapshot
from tidewater_operator.plan import Plan
from tidewater_operator.report import WorkerReport
from tidewater_operator.settings import OperatorSettings

NAMESPACE = "shop"
START = datetime(2026, 1, 1, tzinfo=UTC)

SETTINGS = OperatorSettings.model_validate(
    {
        "etcd": {"endpoints": ["http://etcd:2379"]},
        "catalog": {"properties": {"type": "rest", "uri": "http://catalog:8181"}},
        "workerImage": "tidewater-worker:1",
    }
)


def manifest(kind: str, name: str, uid: str, spec: dict[str, Any], **meta: Any) -> dict[str, Any]:
    """Return an object as the API server has it."""
    return {
        "apiVersion": "tidewater.dev/v1alpha1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid,
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **meta,
        },
        "spec": spec,
    }


@dataclass
class World:
    """Everything that there is."""

    topics: dict[str, dict[str, Any]] = field(default_factory=dict)
    subscriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    sets: dict[str, int] = field(default_factory=dict)
    """Pool → replicas of its StatefulSet."""
    set_status: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Pool → what else its StatefulSet's status says."""
    claims: set[str] = field(default_factory=set)
    """Workers whose volume is there."""
    claim_sizes: dict[str, str] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Workers whose pod does not run."""
    leaving: set[str] = field(default_factory=set)
    """Workers whose pod is being deleted; their session lives on for a moment."""
    registered: dict[str, RegisteredTopic] = field(default_factory=dict)
    registered_subscriptions: dict[str, RegisteredSubscription] = field(default_factory=dict)
    assignments: dict[str, dict[int, str]] = field(default_factory=dict)
    owners: dict[str, dict[int, Ownership]] = field(default_factory=dict)
    reports: dict[str, WorkerReport] | None = None
    """What workers say; None: each that is there answers, and has nothing to tell."""
    is_terminating: bool = False
    now: datetime = START
    unused_since: dict[str, datetime] = field(default_factory=dict)
    numbers: int = 0
    volumes: dict[str, str] = field(default_factory=dict)
    """Worker → identity of its volume."""
    marks: dict[str, str] = field(default_factory=dict)
    """Worker → what is noted on its volume."""

    # ---- what people do

    def add_topic(self, name: str, annotations: dict[str, str] | None = None, **spec: Any) -> None:
        self.numbers += 1
        made = {"annotations": annotations or {}}
        self.topics[name] = manifest("Topic", name, f"uid-{self.numbers}", spec, **made)

    def add_subscription(self, name: str, **spec: Any) -> None:
        self.numbers += 1
        self.subscriptions[name] = manifest("Subscription", name, f"uid-{self.numbers}", spec)

    def add_pool(self, name: str, **spec: Any) -> None:
        self.numbers += 1
        self.pools[name] = manifest("Pool", name, f"uid-{self.numbers}", spec)

    def delete_pool(self, name: str) -> None:
        """Delete a pool; its workers go with it, and their volumes stay."""
        del self.pools[name]
        self.sets.pop(name, None)

    # ---- what is seen

    def workers(self) -> list[str]:
        return [
            worker_name(pool, ordinal)
            for pool, replicas in sorted(self.sets.items())
            for ordinal in range(replicas)
        ]

    def live(self) -> dict[str, WorkerInfo]:
        return {
            worker: WorkerInfo(worker, volume=self.volumes.get(worker, worker))
            for worker in self.workers()
            if worker not in self.away
        }

    def registry(self) -> Registry:
        sessions = {info.volume: info for info in self.live().values()}
        return Registry(
            1,
            {f"{NAMESPACE}/{name}": reg for name, reg in self.registered.items()},
            {f"{NAMESPACE}/{n}": reg for n, reg in self.registered_subscriptions.items()},
            {f"{NAMESPACE}/{name}": dict(to) for name, to in self.assignments.items()},
            self.live(),
            {
                f"{NAMESPACE}/{name}": {p: rules.with_life(o, sessions) for p, o in owned.items()}
                for name, owned in self.owners.items()
            },
        )

    def observed(self) -> Observed:
        young = (self.now - timedelta(seconds=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
        objects = {
            ("StatefulSet", set_name(pool)): {
                "metadata": {"name": set_name(pool)},
                "spec": {"replicas": replicas},
                "status": {
                    "replicas": replicas,
                    "readyReplicas": replicas,
                    **self.set_status.get(pool, {}),
                },
            }
            for pool, replicas in self.sets.items()
        }
        return Observed(
            cluster=Snapshot(
                namespace=NAMESPACE,
                is_terminating=self.is_terminating,
                topics=tuple(self.topics.values()),
                subscriptions=tuple(self.subscriptions.values()),
                pools=tuple(self.pools.values()),
                objects=objects,
                claims=tuple(self._claim(worker) for worker in sorted(self.claims)),
                pods=tuple(self._pod(worker, young) for worker in self.workers()),
            ),
            registry=self.registry(),
            now=self.now,
            reports=self._reports(),
            unused_since=self.unused_since,
        )

    def _reports(self) -> dict[str, WorkerReport]:
        if self.reports is not None:
            return self.reports
        return {worker: WorkerReport(worker) for worker in self.live()}

    def _pod(self, worker: str, made: str) -> dict[str, Any]:
        ready = "False" if worker in self.away else "True"
        return {
            "metadata": {
                "name": worker,
                "labels": labels(self._pool_of(worker)),
                "creationTimestamp": made,
                **({"deletionTimestamp": made} if worker in self.leaving else {}),
            },
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }

    def _claim(self, worker: str) -> dict[str, Any]:
        return {
            "metadata": {
                "name": f"data-{worker}",
                "uid": worker,
                "labels": labels(self._pool_of(worker)),
                "annotations": {k: v for k, v in [(LEFTOVER, self.marks.get(worker))] if v},
            },
            "spec": {"resources": {"requests": {"storage": self.claim_sizes.get(worker, "10Gi")}}},
        }

    def _pool_of(self, worker: str) -> str:
        return worker.removeprefix("tidewater-").rpartition("-")[0]

    # ---- what the operator does

    def effects(self, plan: Plan) -> Iterator[Callable[[], None]]:
        """Yield everything that a plan does, in the operator's order."""
        for made in plan.make_pools:
            name = made["metadata"]["name"]
            yield lambda name=name, made=made: self._make_pool(name, made)  # type: ignore[misc]
        for case in plan.pools:
            if case.pool is not None and not case.paused and case.name in self.pools:
                yield lambda case=case: self._scale(case.name, case.replicas)  # type: ignore[misc]
        for growth in plan.grow:
            worker = growth.claim.removeprefix("data-")
            yield lambda w=worker, s=growth.size: self.claim_sizes.update({w: s})  # type: ignore[misc]
        for claim, logs in plan.mark_claims.items():
            worker = claim.removeprefix("data-")
            yield lambda w=worker, logs=logs: self.marks.update({w: logs})  # type: ignore[misc]
        for claim in plan.drop_claims:
            yield lambda claim=claim: self._drop_claim(claim.removeprefix("data-"))  # type: ignore[misc]
        for name in plan.drop_pools:
            yield lambda name=name: self.delete_pool(name)  # type: ignore[misc]
        for action in plan.registry:
            yield lambda action=action: self.tell(action)  # type: ignore[misc]

    def _make_pool(self, name: str, made: dict[str, Any]) -> None:
        self.add_pool(name, **made["spec"])
        self.pools[name]["metadata"]["labels"] = made["metadata"]["labels"]

    def _scale(self, pool: str, replicas: int) -> None:
        self.sets[pool] = replicas
        for ordinal in range(replicas):
            worker = worker_name(pool, ordinal)
            if worker not in self.claims:
                self.claims.add(worker)
                self.numbers += 1
                self.volumes[worker] = f"volume-{self.numbers}"

    def _drop_claim(self, worker: str) -> None:
        held = [
            (topic, owner.partition)
            for topic, owned in self.owners.items()
            for owner in owned.values()
            if owner.worker_id == worker and owner.drained_at is None and owner.given_up is None
        ]
        assert held == [], f"G5: the volume of {worker} is deleted with {held} on it"
        assert worker not in self.workers(), f"{worker} still runs"
        self.claims.discard(worker)

    def tell(self, action: Action) -> None:
        """Do what the registry would."""
        name = action.name
        match action:
            case RegisterTopic():
                known = self.registered.get(name)
                uuid = known.uuid if known else action.uid
                phase = known.phase if known else TopicPhase.ACTIVE
                self.registered[name] = RegisteredTopic(name, uuid, action.spec, phase)
            case BeginDeletion():
                found = self.registered[name]
                if found.uuid == action.uuid:
                    self.registered[name] = rules.moved_on(found, TopicPhase.DELETING)
            case UnregisterTopic():
                for part in (self.registered, self.assignments, self.owners):
                    part.pop(name, None)
            case AcceptLoss():
                known = self.registered[name]
                accepted = rules.accept_loss(known, action.accepted, action.give_up)
                if known.uuid == action.uuid and accepted is not None:
                    live = {info.volume: info for info in self.live().values()}
                    for number in action.give_up:
                        owner = rules.with_life(self.owners[name][number], live)
                        lost = rules.give_up(name, number, owner, action.reason)
                        self.owners[name][number] = lost
                    self.registered[name] = accepted
            case Assign():
                self.assignments[name] = dict(action.workers)
            case RegisterSubscription():
                self.registered_subscriptions[name] = RegisteredSubscription(
                    name, action.uid, action.spec
                )
            case UnregisterSubscription():
                self.registered_subscriptions.pop(name, None)

    # ---- what workers do

    def work(self) -> None:
        """Let each live worker drain what is to go and take what is to come."""
        live = self.live()
        for name, reg in list(self.registered.items()):
            spec = TopicSpec.from_json(reg.spec)
            owned = self.owners.setdefault(name, {})
            for number in range(spec.partitions):
                target = self.assignments.get(name, {}).get(number)
                owner = owned.get(number)
                if owner is not None and owner.drained_at is None and owner.given_up is None:
                    self._hold(name, owner, target, live, reg.phase)
                elif reg.phase == TopicPhase.ACTIVE and target in live:
                    owned[number] = self._grant(name, number, owner, live[target])
            drained = not rules.undrained(owned)
            wants_drop = spec.deletion_policy is DeletionPolicy.DELETE and live
            if reg.phase == TopicPhase.DELETING and drained and wants_drop:
                self.registered[name] = rules.moved_on(reg, TopicPhase.DROPPED)

    def _hold(
        self,
        name: str,
        owner: Ownership,
        target: str | None,
        live: dict[str, WorkerInfo],
        phase: TopicPhase,
    ) -> None:
        me = next((info for info in live.values() if info.volume == owner.volume), None)
        if me is None:
            return  # its volume is away
        leaves = phase != TopicPhase.ACTIVE or (target in live and target != owner.worker_id)
        if leaves:
            self.owners[name][owner.partition] = rules.released(owner, 0)
        elif owner.session != me.volume:
            self.owners[name][owner.partition] = self._grant(name, owner.partition, owner, me)

    def _grant(
        self, name: str, partition: int, owner: Ownership | None, worker: WorkerInfo
    ) -> Ownership:
        record, _ = rules.grant(name, partition, owner, worker, session=worker.volume)
        return rules.begun(name, partition, record, record.epoch, None)

    def lose_volume(self, worker: str) -> None:
        """Delete a worker's volume; it comes back with an empty one."""
        self.numbers += 1
        self.volumes[worker] = f"volume-{self.numbers}"

    def holders(self, topic: str) -> dict[int, str]:
        """Return who serves each partition of a topic now."""
        live = {info.volume for info in self.live().values()}
        return {
            number: owner.worker_id
            for number, owner in self.owners.get(topic, {}).items()
            if owner.volume in live and owner.drained_at is None and owner.given_up is None
        }

    def members(self, pool: str) -> list[str]:
        """Return the workers that a pool's StatefulSet asks for."""
        return [worker for worker in self.workers() if ordinal_of(pool, worker) is not None]
