"""Who may have a partition next: pure, so that both stores decide alike."""

from collections.abc import Collection, Mapping

import msgspec

from tidewater_coordination.port import (
    AcceptedLoss,
    Gap,
    Grant,
    Ownership,
    RegisteredTopic,
    Registry,
    TopicPhase,
    WorkerInfo,
)
from tidewater_core.errors import Conflict, Fenced


def grant(
    topic: str,
    partition: int,
    found: Ownership | None,
    worker: WorkerInfo,
    session: str,
    epoch_above: int = 0,
) -> tuple[Ownership, Grant]:
    """Decide on a worker's wish for a partition: its new record, or `Fenced`.

    The same volume may always have it back: whoever asks holds the lock on the log directory, so
    an earlier process of that volume appends no more. What another volume left (drained, or given
    up) stays in the record until the new owner has begun: an attempt that fails, or dies, must
    leave the next one as much to come after as it found.
    """
    there = None if found is None else standing(found)
    if there is not None and not is_of(there, worker) and there.drained_at is None:
        if there.is_live:
            raise Fenced(
                "OwnedElsewhere",
                f"{topic} partition {partition} belongs to worker {there.worker_id!r} (epoch "
                f"{there.epoch})",
            )
        if there.given_up is None:
            raise Fenced(
                "VolumeElsewhere",
                f"{topic} partition {partition} waits for the volume of worker "
                f"{there.worker_id!r}, which may hold messages that are nowhere else",
            )
    before = predecessor(found)
    epoch = max(0 if found is None else found.epoch, epoch_above) + 1
    record = Ownership(
        partition=partition,
        worker_id=worker.worker_id,
        epoch=epoch,
        volume=worker.volume,
        session=session,
        gap=None if before is None else before.gap,
        after=_left_by(before) if before is not None and not is_of(before, worker) else None,
    )
    return record, Grant(epoch, before)


def predecessor(found: Ownership | None) -> Ownership | None:
    """Return the last owner that has begun: whoever takes the partition comes after that one."""
    return found if found is None or found.after is None else found.after


def standing(found: Ownership) -> Ownership:
    """Return who has a partition: one that died before it began has nothing of it.

    Its epoch is spent all the same.
    """
    if found.after is None or found.is_live:
        return found
    return msgspec.structs.replace(found.after, epoch=found.epoch)


def _left_by(owner: Ownership) -> Ownership:
    return msgspec.structs.replace(owner, session="", is_live=False, url="", after=None)


def begun(
    topic: str, partition: int, found: Ownership | None, epoch: int, gap: Gap | None
) -> Ownership:
    """Return the record of an owner that has taken over all that was left to it, or `Fenced`.

    In one step with the gap that it begins behind: neither is ever there without the other.
    """
    record = held(topic, partition, found, epoch)
    return msgspec.structs.replace(record, after=None, gap=gap or record.gap)


def is_of(found: Ownership, worker: WorkerInfo) -> bool:
    """Tell whether a partition's messages are on a worker's volume."""
    if not found.volume:  # recorded before volumes had an identity
        return found.worker_id == worker.worker_id
    return found.volume == worker.volume


def released(found: Ownership, drained_at: int | None) -> Ownership:
    """Return the record of a partition that its owner lets go: as it was, if it had not begun."""
    if found.after is not None:
        return msgspec.structs.replace(found.after, epoch=found.epoch)
    return msgspec.structs.replace(found, session="", drained_at=drained_at)


def give_up(topic: str, partition: int, found: Ownership | None, reason: str) -> Ownership:
    """Decide on a person's word that a volume is lost: the record that says so, or `Conflict`."""
    found = None if found is None else standing(found)
    if found is None or found.drained_at is not None:
        raise Conflict(
            "NothingToGiveUp", f"no volume holds messages of {topic} partition {partition}"
        )
    if found.is_live:
        raise Conflict(
            "OwnerIsLive",
            f"worker {found.worker_id!r} is there and has {topic} partition {partition}: "
            "move it instead",
        )
    return msgspec.structs.replace(found, given_up=reason or "no reason given")


def accept_loss(
    found: RegisteredTopic, accepted: AcceptedLoss, given_up: Collection[int]
) -> RegisteredTopic | None:
    """Return a topic with a person's word acted on; None if that was done before.

    A word is met once: after that only the partitions that it waits for can be given up by it.
    """
    known = found.accepted
    is_new = known is None or known.word != accepted.word
    waits = set() if known is None else set(known.waits)
    if not is_new and (accepted == known or not {*given_up, *accepted.waits} <= waits):
        return None
    return msgspec.structs.replace(found, accepted=accepted)


_LIFE = tuple(TopicPhase)


def moved_on(found: RegisteredTopic, phase: TopicPhase) -> RegisteredTopic:
    """Return a topic in a phase, or in the one that it has if that is further on."""
    return msgspec.structs.replace(found, phase=max(found.phase, phase, key=_LIFE.index))


def undrained(owners: Mapping[int, Ownership]) -> list[Ownership]:
    """Return those of a topic's partitions whose messages have yet to come into the table.

    A partition that nobody ever had is not in the registry and has none; those of a volume that
    a person gave up never come.
    """
    return [
        owner
        for _, owner in sorted(owners.items())
        if owner.drained_at is None and (owner.given_up is None or owner.is_live)
    ]


def unreadable_topics(registry: Registry) -> set[str]:
    """Name the topics that are registered by a record which cannot be read."""
    return _unreadable(registry, "topics/")


def unreadable_subscriptions(registry: Registry) -> set[str]:
    """Name the subscriptions that are registered by a record which cannot be read."""
    return _unreadable(registry, "subscriptions/")


def _unreadable(registry: Registry, prefix: str) -> set[str]:
    return {key.removeprefix(prefix) for key in registry.unreadable if key.startswith(prefix)}


def reassigned(
    known: Mapping[int, str] | None, partition: int, worker_id: str, others: Mapping[int, str]
) -> dict[int, str]:
    """Return a topic's assignment with one partition given to a worker, and the rest as it was."""
    wanted = {**others, **(known or {}), partition: worker_id}
    return dict(sorted(wanted.items()))


def held(topic: str, partition: int, found: Ownership | None, epoch: int) -> Ownership:
    """Return the record if it has `epoch`; raise `Fenced` otherwise."""
    if found is None or found.epoch != epoch:
        there = "nobody" if found is None else f"{found.worker_id!r} with epoch {found.epoch}"
        raise Fenced("Fenced", f"{topic} partition {partition} has {there}, not epoch {epoch}")
    return found


def check_id_free(worker: WorkerInfo, live: WorkerInfo) -> None:
    """Raise if a live session of this id is on another volume: two machines with one name."""
    if live.volume != worker.volume:
        raise Fenced(
            "WorkerIdTaken",
            f"another worker with the id {worker.worker_id!r} and another volume is live",
        )


def record_of(owner: Ownership) -> bytes:
    """Write an ownership for the store, without what is only true for a moment."""
    return msgspec.json.encode(msgspec.structs.replace(owner, is_live=False, url=""))


def owner_of(record: str | bytes, live: Mapping[str, WorkerInfo]) -> Ownership:
    """Read an ownership from the store; `live` are the sessions by name."""
    return with_life(msgspec.json.decode(record, type=Ownership), live)


def with_life(owner: Ownership, live: Mapping[str, WorkerInfo]) -> Ownership:
    """Add to an ownership whether its session is there, and where."""
    worker = live.get(owner.session) if owner.session else None
    if worker is None:
        return owner
    return msgspec.structs.replace(owner, is_live=True, url=worker.url)
