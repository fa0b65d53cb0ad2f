"""The status of Subscriptions and Pools. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from tidewater_core.crd.topic import TopicSpec
from tidewater_operator.conditions import Told, fails, holds, merge, unknown
from tidewater_operator.life import Refusal, SubscriptionCase, registered_spec
from tidewater_operator.model.names import (
    Manifest,
    ordinal_of,
    selector_text,
    set_name,
    worker_name,
    worker_of_claim,
)
from tidewater_operator.observed import Observed, conditions_of
from tidewater_operator.plan import PoolCase, bytes_of, claims_of
from tidewater_operator.report import SubscriptionReport, subscription_facts, topic_facts
from tidewater_operator.times import format_ms, format_rate, format_time


def _paused(paused: bool) -> Told:
    if paused:
        return holds("Paused", "Paused", "the annotation tidewater.dev/paused is there")
    return fails("Paused", "NotPaused")


# ---- subscriptions


def subscription_status(seen: Observed, case: SubscriptionCase) -> Manifest:
    """Return the whole status of a Subscription."""
    reg = seen.registry.subscriptions.get(f"{seen.cluster.namespace}/{case.name}")
    is_ours = reg is not None and reg.uuid == case.manifest["metadata"]["uid"]
    facts = subscription_facts(case.name, seen.reports.values()) if is_ours else None
    generation = int(case.manifest["metadata"].get("generation", 0))
    told = [
        _subscription_ready(case, is_ours),
        _active(facts),
        _lag_bounded(seen, case, facts),
        _paused(case.paused),
    ]
    status: Manifest = {
        "observedGeneration": generation,
        "conditions": merge(conditions_of(case.manifest), told, generation, format_time(seen.now)),
    }
    if is_ours and case.subscription is not None and case.subscription.spec.reset_token:
        status["resetToken"] = case.subscription.spec.reset_token
    if facts is not None:
        status |= {
            "consumers": facts.consumers,
            "backlog": facts.backlog,
            "oldestUnacked": format_ms(facts.oldest_unacked_ms),
            "redeliveries": facts.redeliveries,
            "deadLettered": facts.dead_lettered,
        }
    return {key: value for key, value in status.items() if value not in ("", None)}


def _subscription_ready(case: SubscriptionCase, is_ours: bool) -> Told:
    if case.refusal is not None:
        return fails("Ready", case.refusal.reason, case.refusal.message)
    if not is_ours:
        return fails("Ready", "Registering", "it is not in the registry yet")
    return holds("Ready", "Ready")


def _active(facts: SubscriptionReport | None) -> Told:
    if facts is None:
        return unknown("Active", "NoReport", "no worker told of its consumers")
    if facts.consumers:
        return holds("Active", "Consuming")
    return fails("Active", "NoConsumers", "no consumer is connected")


def _lag_bounded(seen: Observed, case: SubscriptionCase, facts: SubscriptionReport | None) -> Told:
    """Say whether the backlog is younger than what the topic keeps."""
    if facts is None or case.subscription is None:
        return unknown("LagBounded", "NoReport", "no worker told its backlog")
    reg = seen.registered(case.subscription.spec.topic)
    spec: TopicSpec | None = registered_spec(reg) if reg is not None else None
    keep = spec.retention.time if spec is not None and spec.retention is not None else None
    if keep is None:
        return holds("LagBounded", "KeptForEver", "the topic keeps everything")
    if (facts.oldest_unacked_ms or 0) < keep.ms:
        return holds("LagBounded", "WithinRetention", f"younger than the {keep} that are kept")
    return fails(
        "LagBounded",
        "BehindRetention",
        f"messages wait that are older than the {keep} that the topic keeps",
    )


# ---- pools


def pool_status(
    seen: Observed, case: PoolCase, problem: Refusal | None, refused_growth: Mapping[str, str]
) -> Manifest:
    """Return the whole status of a Pool; `problem` is what went wrong when it was applied."""
    name = case.name
    live = seen.cluster.objects.get(("StatefulSet", set_name(name)), {})
    state = live.get("status") or {}
    generation = int(case.manifest["metadata"].get("generation", 0))
    told = [
        _pool_ready(seen, case, problem, state),
        _scaling(case),
        _pool_degraded(seen, case),
        _grown(seen, case, refused_growth),
        _paused(case.paused),
    ]
    rates = [
        topic_facts(full.partition("/")[2], reg.uuid, seen.told).rate
        for full, reg in seen.registry.topics.items()
        if any(
            ordinal_of(name, worker) is not None
            for worker in seen.registry.assignments.get(full, {}).values()
        )
    ]
    containers = live.get("spec", {}).get("template", {}).get("spec", {}).get("containers") or [{}]
    status: Manifest = {
        "observedGeneration": generation,
        "replicas": int(state.get("replicas", 0)),
        "readyReplicas": int(state.get("readyReplicas", 0)),
        "updatedReplicas": int(state.get("updatedReplicas", 0)),
        "selector": selector_text(name),
        "topics": case.topics,
        "partitions": case.partitions,
        "rate": format_rate(sum(rates)),
        "image": containers[0].get("image", ""),
        "volumes": [_volume(claim) for claim in claims_of(seen, name)],
        "conditions": merge(conditions_of(case.manifest), told, generation, format_time(seen.now)),
    }
    return {key: value for key, value in status.items() if value not in ("", None)}


def _volume(claim: Manifest) -> Manifest:
    found = {
        "worker": worker_of_claim(claim["metadata"]["name"]),
        "size": claim["spec"].get("resources", {}).get("requests", {}).get("storage", ""),
        "capacity": (claim.get("status") or {}).get("capacity", {}).get("storage", ""),
    }
    return {key: value for key, value in found.items() if value}


def _pool_ready(
    seen: Observed, case: PoolCase, problem: Refusal | None, state: Mapping[str, Any]
) -> Told:
    if case.refusal is not None:
        return fails("Ready", case.refusal.reason, case.refusal.message)
    if problem is not None:
        return fails("Ready", problem.reason, problem.message)
    assert case.pool is not None
    wanted = case.pool.spec.replicas
    members = [worker_name(case.name, ordinal) for ordinal in range(wanted)]
    missing = [worker for worker in members if worker not in seen.registry.workers]
    unready = [w for w in members if not _is_ready(seen.cluster.worker_pods.get(w))]
    if not missing and not unready:
        return holds("Ready", "Ready", f"{wanted} workers are ready")
    for worker in dict.fromkeys([*missing, *unready]):
        if trouble := pod_trouble(seen.cluster.worker_pods.get(worker)):
            return fails("Ready", trouble.reason, f"{worker}: {trouble.message}")
    late = dict.fromkeys([*missing, *unready])
    updating = state.get("updateRevision") != state.get("currentRevision")
    reason = "Updating" if updating and wanted > 1 else "Starting"
    return fails("Ready", reason, f"{wanted - len(late)} of {wanted} workers are ready")


def _is_ready(pod: Manifest | None) -> bool:
    conditions = (pod or {}).get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def pod_trouble(pod: Manifest | None) -> Refusal | None:
    """Say why a pod does not run, if Kubernetes told."""
    if pod is None:
        return None
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Refusal("Unschedulable", str(condition.get("message", "")))
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            last = (container.get("lastState") or {}).get("terminated") or {}
            code = f", exit code {last['exitCode']}" if "exitCode" in last else ""
            said = str(last.get("message") or waiting.get("message") or "").strip()
            return Refusal(str(reason), f"{said or 'it does not start'}{code}")
    return None


def _scaling(case: PoolCase) -> Told:
    if case.pool is None:
        return unknown("Scaling", "InvalidSpec")
    wanted = case.pool.spec.replicas
    if case.draining:
        first = case.draining[0]
        return holds(
            "Scaling", "Draining", f"{len(case.draining)} workers are being drained, {first} first"
        )
    if case.live_replicas != wanted:
        return holds("Scaling", "Scaling", f"from {case.live_replicas} to {wanted} workers")
    return fails("Scaling", "Settled", f"{wanted} workers")


def _pool_degraded(seen: Observed, case: PoolCase) -> Told:
    away = sorted(worker for worker in case.held if worker not in seen.registry.workers)
    if away:
        count = sum(case.held[worker] for worker in away)
        return holds("Degraded", "WorkerAway", f"{count} partitions wait for {', '.join(away[:5])}")
    return fails("Degraded", "AsExpected")


def _grown(seen: Observed, case: PoolCase, refused: Mapping[str, str]) -> Told:
    if case.pool is None:
        return unknown("VolumeGrown", "InvalidSpec")
    size = case.pool.spec.storage.size
    claims = claims_of(seen, case.name)
    for claim in claims:
        if said := refused.get(claim["metadata"]["name"]):
            return fails("VolumeGrown", "NotExpandable", f"{claim['metadata']['name']}: {said}")
    larger = [c for c in claims if _asked(c) > size]
    if larger:
        name = larger[0]["metadata"]["name"]
        return fails("VolumeGrown", "CannotShrink", f"{name} has more than {size}; it stays so")
    if _late(claims, size):
        return fails("VolumeGrown", "Growing", f"volumes grow to {size}")
    return holds("VolumeGrown", "AsAsked", f"{size} each")


def _asked(claim: Manifest) -> int:
    return bytes_of(claim["spec"].get("resources", {}).get("requests", {}).get("storage", "0"))


def _late(claims: Sequence[Manifest], size: int) -> bool:
    """Tell whether a volume that is there has less than was asked for."""
    return any(
        0 < bytes_of((claim.get("status") or {}).get("capacity", {}).get("storage", "0")) < size
        or _asked(claim) < size
        for claim in claims
    )
