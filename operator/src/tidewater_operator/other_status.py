"""The status of Subscriptions and Pools. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.names import ANNOTATION_LEFTOVER
from tidewater_operator.conditions import TRUE, Told, fails, holds, merge, status_of, unknown
from tidewater_operator.life import (
    Refusal,
    SubscriptionCase,
    has_lost_its_volume,
    is_held,
    registered_spec,
)
from tidewater_operator.model.compare import container_of
from tidewater_operator.model.names import (
    WORKER_CONTAINER,
    Manifest,
    ordinal_of,
    selector_text,
    set_name,
    worker_name,
    worker_of_claim,
)
from tidewater_operator.observed import Observed, conditions_of, is_pod_ready
from tidewater_operator.plan import PoolCase, bytes_of, claims_of, evidence_on
from tidewater_operator.report import SubscriptionReport, subscription_facts, topic_facts
from tidewater_operator.times import format_ms, format_rate, format_time
from tidewater_operator.topic_status import UNREADABLE, Spot, is_served, spots


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
    before = case.manifest.get("status") or {}
    generation = int(case.manifest["metadata"].get("generation", 0))
    is_told = _is_told(case, reg.spec if reg is not None and is_ours else None)
    if is_ours and not is_told:
        # What is said below is about the spec that workers have; this one they get in a moment.
        generation = min(generation, int(before.get("observedGeneration", 0)))
    places, is_silent = _places(seen, case)
    told = [
        _subscription_ready(
            case, is_ours, facts, places, _worker_refusal(seen, case), is_silent=is_silent
        ),
        _active(facts, is_silent=is_silent),
        _lag_bounded(seen, case, facts, is_silent=is_silent),
        _paused(case.paused),
    ]
    status: Manifest = {
        "observedGeneration": generation,
        "conditions": merge(conditions_of(case.manifest), told, generation, format_time(seen.now)),
        "resetToken": before.get("resetToken", ""),
    }
    if is_ours and is_told and case.subscription is not None:
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


def _is_told(case: SubscriptionCase, registered: str | None) -> bool:
    """Tell whether the registry has the spec as it is, or never gets it.

    That of a paused one it gets some day: until then nobody has seen it.
    """
    if case.subscription is None or case.refusal is not None:
        return True
    return registered == case.subscription.spec.to_json()


def _places(seen: Observed, case: SubscriptionCase) -> tuple[list[Spot], bool]:
    """Return where the topic's partitions are, and whether nobody told of some of them."""
    name = case.subscription.spec.topic if case.subscription is not None else ""
    reg = seen.registered(name)
    spec = registered_spec(reg) if reg is not None else None
    if reg is None or spec is None:
        return [], True
    facts = topic_facts(name, reg.uuid, seen.told)
    places = spots(seen, name, spec.partitions, facts)
    return places, len(facts.partitions) < spec.partitions


def _worker_refusal(seen: Observed, case: SubscriptionCase) -> Refusal | None:
    """Return why a worker does not serve the spec that is registered, if one does not."""
    full = f"{seen.cluster.namespace}/{case.name}"
    for worker, report in sorted(seen.reports.items()):
        for one in report.refused:
            if one.subscription == full:
                return Refusal(one.reason, f"{worker} does not take the spec: {one.message}")
    return None


def _subscription_ready(
    case: SubscriptionCase,
    is_ours: bool,
    facts: SubscriptionReport | None,
    places: list[Spot],
    refused: Refusal | None,
    *,
    is_silent: bool,
) -> Told:
    """Say whether consumers get the messages of every partition."""
    if case.refusal is not None:
        return fails("Ready", case.refusal.reason, case.refusal.message)
    if not is_ours:
        return fails("Ready", "Registering", "it is not in the registry yet")
    away = [spot for spot in places if not is_served(spot)]
    if away:
        return fails("Ready", away[0].reason, away[0].message)
    if refused is not None:
        return fails("Ready", refused.reason, refused.message)
    if facts is None or is_silent:
        return unknown("Ready", "NoReport", "not every worker of its topic has told of it")
    return holds("Ready", "Ready")


def _active(facts: SubscriptionReport | None, *, is_silent: bool) -> Told:
    if facts is not None and facts.consumers:
        return holds("Active", "Consuming")
    if facts is None or is_silent:
        return unknown("Active", "NoReport", "not every worker of its topic has told of consumers")
    return fails("Active", "NoConsumers", "no consumer is connected")


def _lag_bounded(
    seen: Observed, case: SubscriptionCase, facts: SubscriptionReport | None, *, is_silent: bool
) -> Told:
    """Say whether the backlog is younger than what the topic keeps."""
    if facts is None or case.subscription is None:
        return unknown("LagBounded", "NoReport", "no worker told its backlog")
    reg = seen.registered(case.subscription.spec.topic)
    spec: TopicSpec | None = registered_spec(reg) if reg is not None else None
    keep = spec.retention.time if spec is not None and spec.retention is not None else None
    if keep is None:
        return holds("LagBounded", "KeptForEver", "the topic keeps everything")
    if (facts.oldest_unacked_ms or 0) >= keep.ms:
        message = f"messages wait that are older than the {keep} that the topic keeps"
        return fails("LagBounded", "BehindRetention", message)
    if is_silent:
        return unknown("LagBounded", "NoReport", "not every worker of its topic has told of it")
    return holds("LagBounded", "WithinRetention", f"younger than the {keep} that are kept")


# ---- pools


def pool_status(
    seen: Observed,
    case: PoolCase,
    problem: Refusal | None,
    refused_growth: Mapping[str, str],
    *,
    is_written: bool = False,
) -> Manifest:
    """Return the whole status of a Pool.

    `problem` is what went wrong when it was applied; `is_written`: it was, since it was looked at.
    """
    name = case.name
    live = seen.cluster.objects.get(("StatefulSet", set_name(name)), {})
    state = live.get("status") or _counted(seen, name)
    generation = int(case.manifest["metadata"].get("generation", 0))
    if problem is None and (case.paused or is_written or _is_behind(live, state)):
        # Workers have been told of this spec, or are not to be: what is said is of the last one.
        known = (case.manifest.get("status") or {}).get("observedGeneration", 0)
        generation = min(generation, int(known))
    told = [
        _pool_ready(seen, case, problem, state),
        _scaling(seen, case),
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
    worker = container_of(live.get("spec", {}).get("template", {}), WORKER_CONTAINER)
    status: Manifest = {
        "observedGeneration": generation,
        "replicas": int(state.get("replicas", 0)),
        "readyReplicas": int(state.get("readyReplicas", 0)),
        "updatedReplicas": int(state.get("updatedReplicas", 0)),
        "selector": selector_text(name),
        "topics": case.topics,
        "partitions": case.partitions,
        "rate": format_rate(sum(rates)),
        "image": worker.get("image", ""),
        "volumes": [_volume(claim) for claim in claims_of(seen, name)],
        "conditions": merge(conditions_of(case.manifest), told, generation, format_time(seen.now)),
    }
    return {key: value for key, value in status.items() if value not in ("", None)}


def _is_behind(live: Manifest, state: Mapping[str, Any]) -> bool:
    """Tell whether a StatefulSet's status is about an earlier spec of it."""
    meta = live.get("metadata", {})
    known = int(meta.get("generation", 0))
    return "deletionTimestamp" in meta or int(state.get("observedGeneration", known)) < known


def _counted(seen: Observed, pool: str) -> Manifest:
    """Count workers while nobody else does: their StatefulSet is being made again."""
    pods = [p for w, p in seen.cluster.worker_pods.items() if ordinal_of(pool, w) is not None]
    ready = sum(1 for pod in pods if is_pod_ready(pod))
    return {"replicas": len(pods), "readyReplicas": ready}


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
    late = [worker for worker in members if not _is_there(seen, worker)]
    updating = state.get("updateRevision") != state.get("currentRevision")
    if not late and updating:  # between two workers: the next one goes in a moment
        done = int(state.get("updatedReplicas", 0))
        return fails("Ready", "Updating", f"{done} of {wanted} workers are as the spec has them")
    if not late:
        return holds("Ready", "Ready", f"{wanted} workers are ready")
    for worker in late:
        if trouble := pod_trouble(seen.cluster.worker_pods.get(worker)):
            return fails("Ready", trouble.reason, f"{worker}: {trouble.message}")
    reason = "Updating" if updating and wanted > 1 else "Starting"
    return fails("Ready", reason, f"{wanted - len(late)} of {wanted} workers are ready")


def _is_there(seen: Observed, worker: str) -> bool:
    """Tell whether a worker has its session and its pod takes requests."""
    pod = seen.cluster.worker_pods.get(worker)
    return worker in seen.registry.workers and is_pod_ready(pod)


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


def _scaling(seen: Observed, case: PoolCase) -> Told:
    """Say whether workers come or go: from the change of their number until all is done."""
    if case.pool is None:
        return unknown("Scaling", "InvalidSpec")
    wanted = case.pool.spec.replicas
    if case.draining:
        first = case.draining[0]
        return holds(
            "Scaling", "Draining", f"{len(case.draining)} workers are being drained, {first} first"
        )
    if case.unheard:
        message = f"{case.unheard[0]} has not said what is on its volume: it is waited for"
        return holds("Scaling", "Draining", message)
    leaving = [
        worker
        for worker in seen.cluster.worker_pods
        if (ordinal := ordinal_of(case.name, worker)) is not None and ordinal >= wanted
    ]
    if leaving or case.live_replicas not in (0, wanted):
        count = max(case.live_replicas, wanted + len(leaving))
        return holds("Scaling", "Scaling", f"from {count} to {wanted} workers")
    members = [worker_name(case.name, ordinal) for ordinal in range(wanted)]
    late = [worker for worker in members if not _is_there(seen, worker)]
    # A worker that is away at another time was not asked to come: that is Ready's to say.
    if late and (
        not case.live_replicas or status_of(conditions_of(case.manifest), "Scaling") == TRUE
    ):
        return holds("Scaling", "Scaling", f"from {wanted - len(late)} to {wanted} workers")
    return fails("Scaling", "Settled", f"{wanted} workers")


def _lost(seen: Observed, case: PoolCase) -> Counter[str]:
    """Count the partitions of workers that came back with another volume."""
    return Counter(
        owner.worker_id
        for owners in seen.registry.owners.values()
        for owner in owners.values()
        if owner.worker_id in case.held and is_held(owner) and has_lost_its_volume(seen, owner)
    )


def _pool_degraded(seen: Observed, case: PoolCase) -> Told:
    if seen.registry.unreadable:
        places = ", ".join(seen.registry.unreadable[:5])
        message = f"etcd has something unreadable at {places}: no worker and no volume is let go"
        return holds("Degraded", UNREADABLE, message)
    away = sorted(worker for worker in case.held if worker not in seen.registry.workers)
    if away:
        count = sum(case.held[worker] for worker in away)
        return holds("Degraded", "WorkerAway", f"{count} partitions wait for {', '.join(away[:5])}")
    lost = _lost(seen, case)
    if lost:
        parts, workers = sum(lost.values()), ", ".join(sorted(lost)[:5])
        message = f"{parts} partitions wait for a volume that {workers} came back without"
        return holds("Degraded", "VolumeLost", message)
    marked = [claim for claim in claims_of(seen, case.name) if evidence_on(claim)]
    if marked:
        name, more = marked[0]["metadata"]["name"], len(marked) - 1
        message = (
            f"volume {name}{f' (and {more} more)' if more else ''} stays: logs of topics that are "
            f"gone may have messages which are nowhere else: {evidence_on(marked[0])}. When you "
            f"have them, or need none, and once the worker is scaled in (it notes them again "
            f"while it lives): kubectl annotate pvc {name} {ANNOTATION_LEFTOVER}-"
        )
        return holds("Degraded", "LeftoverLog", message)
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
    late = _late(claims, size)
    if late:
        name, capacity = late[0]["metadata"]["name"], _capacity(late[0]) or "nothing"
        said = _resize_trouble(late[0]) or "its storage has not grown it yet"
        message = f"{len(late)} volumes grow to {size}; {name} has {capacity}: {said}"
        return fails("VolumeGrown", "Growing", message)
    return holds("VolumeGrown", "AsAsked", f"{size} each")


def _resize_trouble(claim: Manifest) -> str:
    """Return what Kubernetes says of a volume that grows: it waits for a restart, or it failed."""
    for condition in (claim.get("status") or {}).get("conditions") or ():
        if condition["status"] == "True":
            return f"{condition['type']} {condition.get('message', '')}".strip()
    return ""


def _asked(claim: Manifest) -> int:
    return bytes_of(claim["spec"].get("resources", {}).get("requests", {}).get("storage", "0"))


def _capacity(claim: Manifest) -> str:
    return str((claim.get("status") or {}).get("capacity", {}).get("storage", ""))


def _late(claims: Sequence[Manifest], size: int) -> list[Manifest]:
    """Return the volumes that have less than was asked for."""
    return [c for c in claims if 0 < bytes_of(_capacity(c) or "0") < size or _asked(c) < size]
