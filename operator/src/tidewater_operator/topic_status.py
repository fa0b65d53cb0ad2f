"""The status of a Topic: where each partition is, and what holds. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tidewater_coordination.port import Ownership, TopicPhase
from tidewater_core.crd.topic import DeletionPolicy, TopicSpec
from tidewater_operator.conditions import Told, fails, holds, merge, unknown
from tidewater_operator.last_words import wants_table
from tidewater_operator.life import (
    TopicCase,
    accepted_word,
    has_lost_its_volume,
    is_held,
    pool_of,
    registered_spec,
)
from tidewater_operator.model.names import Manifest
from tidewater_operator.observed import Observed, conditions_of
from tidewater_operator.report import PartitionReport, RefusedReport, TopicFacts, topic_facts
from tidewater_operator.times import (
    format_bytes_rate,
    format_ms,
    format_rate,
    format_time,
    from_us,
)

UNREADABLE: Final = "RecordUnreadable"
_SEVERITY: Final = {
    reason: place
    for place, reason in enumerate(
        (UNREADABLE, "VolumeLost", "", "WorkerAway", "NotAssigned", "Opening", "Moving")
    )
}
"""Reasons why a partition is not where it should be, the worst first; "" stands for whatever else
its worker says."""
_BEGINNING: Final = frozenset({"NotAssigned", "Opening"})
"""Reasons of partitions that only have to begin."""
_PASSING: Final = frozenset(
    {
        "", "BacklogFull", "Fenced", "LogLocked", "OwnedElsewhere", "OwnerAway", "OwnerSilent",
        "OwnerUnreachable", "PartitionMoving", "PartitionOpening", "SessionLost", "ShuttingDown",
        "StoreAway", "StoreContended", "TableProcessAway", "TableProcessBehind",
        "TableProcessSlow", "TopicDeleting",
    }
)  # fmt: skip
"""What a worker says of a partition that takes no message and needs nobody's help."""
_SERVED: Final = frozenset({"", "Moving"})
"""A partition that moves is served until it is drained."""
STALL_MS: Final = 30_000.0
"""Nothing has come into the table for so long, and a message has waited as long: it is stuck."""
_BAD_STATES: Final = frozenset({"stopped", "retrying"})


@dataclass(frozen=True)
class Spot:
    """Where a partition is."""

    partition: int
    owner: Ownership | None
    worker: str
    reason: str = ""
    """Why it is not where it should be; empty if it is."""
    message: str = ""


def is_served(spot: Spot) -> bool:
    """Tell whether a partition is served, by all that is known of its place."""
    return spot.reason in _SERVED


def spots(seen: Observed, name: str, partitions: int, facts: TopicFacts) -> list[Spot]:
    """Say of each partition where it is, and why it is not open if its worker told."""
    full = f"{seen.cluster.namespace}/{name}"
    owners = seen.registry.owners.get(full, {})
    wanted = seen.registry.assignments.get(full, {})
    return [
        _unreadable(seen, full, number)
        or _told_why(
            _spot(seen, number, owners.get(number), wanted, is_reported=number in facts.partitions),
            wanted.get(number, ""),
            facts.partitions.get(number),
            facts.owners.get(number, ""),
            _refusals(seen, full),
        )
        for number in range(partitions)
    ]


def _unreadable(seen: Observed, full: str, number: int) -> Spot | None:
    key = f"owners/{full}/{number}"
    if key not in seen.registry.unreadable:
        return None
    message = f"partition {number}: etcd has something unreadable at {key}; nobody can take it"
    return Spot(number, None, "", UNREADABLE, message)


def _refusals(seen: Observed, full: str) -> dict[str, RefusedReport]:
    """Return which workers do not serve what is registered of a topic, and why."""
    return {
        worker: refused
        for worker, report in seen.reports.items()
        for refused in report.refused
        if refused.topic == full
    }


def _told_why(
    spot: Spot,
    target: str,
    report: PartitionReport | None,
    reporter: str,
    refusals: Mapping[str, RefusedReport],
) -> Spot:
    """Add what the worker that should open a partition says of it: that is why it is not open."""
    if spot.reason not in ("Opening", "WorkerAway"):
        return spot
    worker = spot.owner.worker_id if spot.reason == "WorkerAway" and spot.owner else target
    refused = refusals.get(worker)
    if report is not None and not report.open and reporter == worker:
        reason, message = report.reason or "", report.message or ""
    elif report is None and refused is not None:
        reason, message = refused.reason, refused.message
    else:
        return spot
    if reason not in _PASSING:
        said = f"partition {spot.partition} cannot be opened by {worker}: {message or reason}"
        return replace(spot, reason=reason, message=said)
    return replace(spot, message=f"{spot.message}: {message}" if message else spot.message)


def _is_shut(part: PartitionReport) -> bool:
    """Tell whether a partition takes no message and does not come to by itself."""
    return not part.open and (part.reason or "") not in _PASSING


def _spot(
    seen: Observed,
    number: int,
    owner: Ownership | None,
    wanted: Mapping[int, str],
    *,
    is_reported: bool,
) -> Spot:
    target = wanted.get(number)
    if owner is not None and owner.is_live:
        if not is_reported and not seen.is_up(owner.worker_id):
            # Its session has not run out yet, but nobody answers and its pod is not there.
            message = f"partition {number} waits for {owner.worker_id}, whose pod is not ready"
            return Spot(number, owner, "", "WorkerAway", message)
        if target in (owner.worker_id, None):
            return Spot(number, owner, owner.worker_id)
        message = f"partition {number} moves from {owner.worker_id} to {target}"
        return Spot(number, owner, owner.worker_id, "Moving", message)
    if owner is not None and is_held(owner):
        worker = owner.worker_id
        if has_lost_its_volume(seen, owner):
            message = (
                f"partition {number}: {worker} came back with another volume; messages may be on "
                f"the lost one alone. If it will not come back: annotate the topic with "
                f'tidewater.dev/accept-loss="{number}"'
            )
            return Spot(number, owner, "", "VolumeLost", message)
        message = f"partition {number} waits for {worker}, whose volume has its messages"
        return Spot(number, owner, "", "WorkerAway", message)
    if target is None:
        return Spot(number, owner, "", "NotAssigned", f"partition {number} has no worker yet")
    if target not in seen.registry.workers:
        return Spot(number, owner, "", "Opening", f"partition {number} waits for {target} to start")
    return Spot(number, owner, "", "Opening", f"partition {number} opens on {target}")


def topic_status(
    seen: Observed, case: TopicCase, maintenance: Mapping[str, Any] | None, maintained: Told
) -> Manifest:
    """Return the whole status of a Topic."""
    before = case.manifest.get("status") or {}
    reg = seen.registered(case.name)
    is_ours = reg is not None and reg.uuid == case.uid
    spec = registered_spec(reg) if reg is not None and is_ours else None
    facts = topic_facts(case.name, case.uid, seen.told)
    places = spots(seen, case.name, spec.partitions, facts) if spec is not None else []
    is_active = spec is not None and reg is not None and reg.phase == TopicPhase.ACTIVE
    told = _served(case, spec, places, facts, seen) if spec and is_active else _unserved(case)
    told = [*told, maintained, _paused(case.paused)]
    generation = int(case.manifest["metadata"].get("generation", 0))
    if is_active and not _is_told(case, spec):
        # What is said below is about the spec that workers have; this one they get in a moment.
        generation = min(generation, int(before.get("observedGeneration", 0)))
    status: Manifest = {
        "observedGeneration": generation,
        "conditions": merge(conditions_of(case.manifest), told, generation, format_time(seen.now)),
        "acceptedLoss": accepted_word(case.manifest, reg),
    }
    if spec is not None:
        status |= _figures(case, spec, places, facts, before)
    # What was found out about jobs stands until something else is.
    if known := before.get("maintenance") if maintenance is None else maintenance:
        status["maintenance"] = dict(known)
    return {key: value for key, value in status.items() if value not in ("", None)}


def _is_told(case: TopicCase, registered: TopicSpec | None) -> bool:
    """Tell whether the registry has the spec as it is, or never gets it.

    That of a paused topic it gets some day: until then nobody has seen it. Of one that is refused
    it gets in a moment that the table stays.
    """
    if case.topic is None or case.refusal is not None:
        is_safe = registered is None or registered.deletion_policy is DeletionPolicy.RETAIN
        return is_safe or not wants_table(case.manifest)
    return registered is not None and registered.to_json() == case.topic.spec.to_json()


def _paused(paused: bool) -> Told:
    if paused:
        return holds("Paused", "Paused", "the annotation tidewater.dev/paused is there")
    return fails("Paused", "NotPaused")


def _unserved(case: TopicCase) -> list[Told]:
    if case.refusal is not None:
        reason, message = case.refusal.reason, case.refusal.message
    else:
        reason, message = "Registering", "it is not in the registry yet"
    return [
        fails("Ready", reason, message),
        fails("Assigned", reason),
        unknown("Committing", reason),
        unknown("FreshnessMet", reason),
        fails("Degraded", "NotServed"),
    ]


def _served(
    case: TopicCase, spec: TopicSpec, places: list[Spot], facts: TopicFacts, seen: Observed
) -> list[Told]:
    assigned = _assigned(places)
    committing = _committing(spec, facts, seen)
    stopped = [p for p in facts.partitions.values() if p.state == "stopped"]
    away = [spot for spot in places if not is_served(spot)]
    lost = [spot for spot in away if spot.reason not in _BEGINNING]
    moving = {spot.partition for spot in places if spot.reason == "Moving"}
    shut = [p for n, p in facts.partitions.items() if _is_shut(p) and n not in moving]
    kept = _refusals(seen, f"{seen.cluster.namespace}/{case.name}")
    silent = [spot for spot in places if spot.partition not in facts.partitions]
    if lost or stopped:
        worst = assigned if lost else committing
        degraded = holds("Degraded", worst.reason, worst.message)
    elif shut:
        said = f"partition {shut[0].partition}: {shut[0].message or 'it takes no messages'}"
        degraded = holds("Degraded", str(shut[0].reason), said)
    elif kept:
        worker, refused = min(kept.items())
        message = f"{worker} does not take the registered spec: {refused.message}"
        degraded = holds("Degraded", refused.reason, message)
    elif silent and not away:
        degraded = _unheard("Degraded", silent, seen)
    else:
        degraded = fails("Degraded", "AsExpected")
    ready = _ready(case, places, facts, assigned, committing, seen)
    return [ready, assigned, committing, _fresh(spec, facts), degraded]


def _ready(
    case: TopicCase,
    places: list[Spot],
    facts: TopicFacts,
    assigned: Told,
    committing: Told,
    seen: Observed,
) -> Told:
    """Say whether every partition takes messages; the worst that is known counts."""
    if case.refusal is not None:
        return fails("Ready", case.refusal.reason, case.refusal.message)
    if not all(is_served(spot) for spot in places):
        return fails("Ready", assigned.reason, assigned.message)
    if any(part.state == "stopped" for part in facts.partitions.values()):
        return fails("Ready", committing.reason, committing.message)
    moving = {spot.partition for spot in places if spot.reason == "Moving"}
    shut = [p for n, p in facts.partitions.items() if not p.open and n not in moving]
    if shut:
        said = shut[0].message or "its worker is still opening it"
        return fails("Ready", shut[0].reason or "Opening", f"partition {shut[0].partition}: {said}")
    if silent := [spot for spot in places if spot.partition not in facts.partitions]:
        return _unheard("Ready", silent, seen)
    return holds("Ready", "Ready", f"{len(places)} partitions take messages")


def _unheard(type_: str, silent: list[Spot], seen: Observed) -> Told:
    """Say that nobody told of some partitions, and why."""
    workers = {spot.worker for spot in silent}
    reason, why = "NoReport", "gave no answer"
    if large := workers & seen.too_large:
        workers, reason, why = large, "ReportTooLarge", "said more than the operator listens to"
    named = ", ".join(sorted(workers)[:5])
    return unknown(type_, reason, f"{len(silent)} partitions were not reported on: {named} {why}")


def _assigned(places: list[Spot]) -> Told:
    if bad := [spot for spot in places if spot.reason]:
        worst = min(bad, key=lambda spot: _SEVERITY.get(spot.reason, _SEVERITY[""]))
        found = [spot for spot in bad if spot.reason == worst.reason]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return fails("Assigned", worst.reason, worst.message + more)
    workers = len({spot.worker for spot in places})
    return holds("Assigned", "Assigned", f"{len(places)} partitions on {workers} workers")


def _committing(spec: TopicSpec, facts: TopicFacts, seen: Observed) -> Told:
    for state in ("stopped", "retrying"):
        bad = [p for p in facts.partitions.values() if p.state == state]
        if bad:
            first = bad[0]
            reason = first.reason or state.capitalize()
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            message = f"partition {first.partition} is {state}: {first.message or reason}{more}"
            return fails("Committing", reason, message)
    limit_ms = max(STALL_MS, 3 * spec.writer.flush_interval.ms)
    stuck = [p for p in facts.partitions.values() if _is_stuck(p, facts, seen, limit_ms)]
    if stuck:
        message = f"partition {stuck[0].partition}: nothing has come into the table for a while"
        return fails("Committing", "Stalled", message)
    missing = spec.partitions - len(facts.partitions)
    if missing > 0:
        return unknown("Committing", "NoReport", f"{missing} partitions were not reported on")
    opening = [p for p in facts.partitions.values() if p.state in ("opening", "closed")]
    if opening:
        message = f"partition {opening[0].partition} is {opening[0].state}"
        return unknown("Committing", "Opening", message)
    return holds("Committing", "Committing", "messages reach the table")


def _is_stuck(part: PartitionReport, facts: TopicFacts, seen: Observed, limit_ms: float) -> bool:
    """Tell whether a message has waited for long while nothing of its topic was committed.

    A table process that stands still says nothing: its last word was that all is well.
    """
    since_commit_ms = seen.now.timestamp() * 1_000 - facts.committed_at_ms
    return (part.oldest_uncommitted_ms or 0.0) > limit_ms and since_commit_ms > limit_ms


def _fresh(spec: TopicSpec, facts: TopicFacts) -> Told:
    age = facts.freshness_ms
    if age is not None and age > spec.freshness.ms:
        # No figure in the message: it would change with every look.
        message = f"messages older than {spec.freshness} are not in the table yet"
        return fails("FreshnessMet", "TooOld", message)
    missing = spec.partitions - len(facts.partitions)
    if age is None or missing > 0:
        # Those that nobody told of may have the oldest messages of all.
        return unknown("FreshnessMet", "NoReport", f"{missing} partitions were not reported on")
    if not facts.freshness_known:
        message = "a worker has yet to hear how far the table is"
        return unknown("FreshnessMet", "Opening", message)
    return holds("FreshnessMet", "Fresh", f"within {spec.freshness}")


def _figures(
    case: TopicCase,
    spec: TopicSpec,
    places: list[Spot],
    facts: TopicFacts,
    before: Mapping[str, Any],
) -> Manifest:
    known = {item["partition"]: item for item in before.get("partitions", ())}
    partitions = [
        _partition(spot, facts.partitions.get(spot.partition), known.get(spot.partition, {}))
        for spot in places
    ]
    found: Manifest = {
        "sync": facts.sync or str(spec.log.sync),
        "freshness": format_ms(facts.freshness_ms),
        "rate": format_rate(facts.rate),
        "bytesRate": format_bytes_rate(facts.bytes_per_s),
        "committed": _committed(partitions, facts),
        "lag": sum(part.lag for part in facts.partitions.values()),
        "pool": pool_of(case.name, spec),
        "workers": len({spot.worker for spot in places if spot.worker}),
        "partitions": partitions,
    }
    if facts.ack_ms is not None and facts.ack_ms.p99:
        found["ackLatency"] = {
            "p50": format_ms(facts.ack_ms.p50),
            "p99": format_ms(facts.ack_ms.p99),
        }
    elif "ackLatency" in before:
        found["ackLatency"] = before["ackLatency"]
    table = _table(case, facts)
    found["table"] = table if facts.table is not None else before.get("table") or table
    return found


def _committed(partitions: list[Manifest], facts: TopicFacts) -> int:
    """Count the messages in the table; where nobody reports, what was last known counts."""
    total = 0
    for item in partitions:
        report = facts.partitions.get(item["partition"])
        gap = item.get("gap", "0-0").split("-")
        known = item["committedOffset"] - (int(gap[1]) - int(gap[0]))
        total += report.messages if report is not None else max(known, 0)
    return total


def _partition(spot: Spot, report: PartitionReport | None, before: Mapping[str, Any]) -> Manifest:
    owner = spot.owner
    found: Manifest = {
        "partition": spot.partition,
        "worker": spot.worker,
        "epoch": owner.epoch if owner is not None else 0,
        # While nobody reports, what was last known stands.
        "startOffset": report.start if report else before.get("startOffset", 0),
        "endOffset": report.end if report else before.get("endOffset", 0),
        "committedOffset": report.committed if report else before.get("committedOffset", 0),
    }
    if report is not None and report.state:
        found["state"] = report.state
    reason, message = spot.reason, spot.message
    if not reason and report is not None and (report.state in _BAD_STATES or _is_shut(report)):
        reason, message = report.reason or "", report.message or ""
    if reason:
        found["reason"], found["message"] = reason, message[:1_000]
    if owner is not None and owner.gap is not None:
        found["gap"] = f"{owner.gap.start}-{owner.gap.end}"
    return found


def _table(case: TopicCase, facts: TopicFacts) -> Manifest:
    identifier = ".".join(case.topic.table_identifier) if case.topic is not None else ""
    report = facts.table
    if report is None:
        return {"identifier": identifier}
    found: Manifest = {
        "identifier": report.table or identifier,
        "uuid": report.table_uuid,
        "snapshotId": "" if report.snapshot_id is None else str(report.snapshot_id),
        "rows": report.table_rows,
        "bytes": report.bytes,
        "files": report.files,
        "snapshots": report.snapshots,
        "manifests": report.manifests,
        "smallFiles": report.small_files,
        "debtFiles": report.debt_files or 0,
        "deleteFiles": report.delete_files,
    }
    if report.committed_at_us:
        found["lastCommitTime"] = format_time(from_us(report.committed_at_us))
    return {key: value for key, value in found.items() if value != ""}
