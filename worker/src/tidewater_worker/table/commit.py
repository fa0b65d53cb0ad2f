"""The commit protocol (DESIGN: "The commit"), as a generator that does nothing itself.

It yields what is to be done (`Load`, `RaiseEpoch`, `AddRows`, `Wait`) and is sent the outcome: a
`TableView` when it succeeded, the error when it did not. It ends with an `Outcome`.

Invariants, whatever is sent:

* Rows are proposed only on a state on which `frontier.decide` has said Go: the frontier is exactly
  where the batch begins, and the epoch is ours. The proposal requires that very state (table
  uuid, head of `main`, schema), so it lands on it or not at all.
* After any answer but success the table is loaded again before anything is proposed. Refused and
  unknown differ only in what is counted: the frontier alone says what landed.
* An epoch lower than ours is raised by a commit of its own before any row: from then on no
  older owner's requirement can hold.
* It never gives up on an error that may pass, and never goes on past one that will not.

Since no state lives outside the table, a process that dies anywhere begins again at `Load`.
"""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

from tidewater_core import names
from tidewater_core.errors import Corrupt, Invalid, TidewaterError
from tidewater_worker.table.frontier import (
    UNWRITTEN,
    Claim,
    EpochFirst,
    Fenced,
    Go,
    Landed,
    MovedBack,
    Recut,
    Span,
    decide,
    parse_frontiers,
)
from tidewater_worker.table.view import TableView


@dataclass(frozen=True, slots=True)
class Identity:
    """Which table is ours."""

    topic: str
    topic_uuid: str
    table_uuid: str | None = None
    """The table that this topic is bound to; None before it was first seen."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load the table."""


@dataclass(frozen=True, slots=True)
class RaiseEpoch:
    """Commit an empty snapshot that carries our epochs."""

    view: TableView
    adopt: bool
    """Take over a retained table of a topic of the same name: its epochs are of another life."""


@dataclass(frozen=True, slots=True)
class AddRows:
    """Commit the batch on this state."""

    view: TableView


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait before the next attempt, longer with each failure."""

    failures: int
    error: TidewaterError


Step = Load | RaiseEpoch | AddRows | Wait
Reply = TableView | TidewaterError | None


@dataclass(frozen=True, slots=True)
class Halted:
    """A person must act; all partitions of the topic stop (G7)."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended, and the state on which that was decided."""

    verdict: Landed | Fenced | MovedBack | Recut | Halted
    view: TableView | None
    fresh: bool = False
    """The last step was our own commit, answered."""


def check_identity(view: TableView, identity: Identity) -> Halted | bool:
    """Say if a table is ours (False), may be adopted (True), or neither."""
    if identity.table_uuid is not None and view.table_uuid != identity.table_uuid:
        return Halted(
            "TableReplaced",
            f"the table is {view.table_uuid}; this topic's rows are in {identity.table_uuid}",
        )
    if view.topic_uuid == identity.topic_uuid:
        return False
    if identity.table_uuid is not None:
        return Halted("TopicReplaced", f"the table was taken over by topic {view.topic_uuid}")
    if view.topic == identity.topic and view.frontiers:
        return True
    if view.topic:
        return Halted("TableNotOurs", f"the table belongs to topic {view.topic}")
    return Halted("TableNotOurs", "the table exists and was not made by Tidewater")


def check_head(view: TableView, partitions: Iterable[int]) -> Halted | None:
    """Notice a table that was rolled back: its rows went, its frontier stayed.

    The newest snapshot of `main` that mentions a partition must carry the frontier that the
    property has. Where older snapshots are expired there is nothing to compare, and nothing to say.
    """
    unseen = set(partitions)
    snapshot = view.metadata.current_snapshot()
    while snapshot is not None and unseen:
        summary = snapshot.summary.additional_properties if snapshot.summary else {}
        for partition, carried in parse_frontiers(summary).items():
            if partition not in unseen:
                continue
            unseen.discard(partition)
            found = view.frontiers.get(partition, UNWRITTEN)
            if carried.next < found.next:
                return Halted(
                    "TableRolledBack",
                    f"partition {partition}: the head {view.snapshot_id} has rows up to "
                    f"{carried.next - 1}, the frontier says {found.next - 1}. Roll the table "
                    f"forward, or set {names.frontier_property(partition)} to what the head "
                    "carries to have the rows committed again from the log",
                )
            if carried.next > found.next:
                return Halted(
                    "FrontierDamaged",
                    f"partition {partition}: the head {view.snapshot_id} has rows up to "
                    f"{carried.next - 1}, {names.frontier_property(partition)} says {found.next}",
                )
        parent = snapshot.parent_snapshot_id
        snapshot = view.metadata.snapshot_by_id(parent) if parent is not None else None
    return None


def run_commit(
    identity: Identity,
    claims: Mapping[int, Claim],
    batch: Mapping[int, Span],
    view: TableView | None = None,
) -> Generator[Step, Reply, Outcome]:
    """Bring our epochs, and the rows of `batch` if any, into the table, once.

    `view` may be a state seen earlier: a proposal on a state that has passed is refused.
    """
    failures = 0
    while True:
        if view is None:
            reply = yield Load()
            if isinstance(reply, (Invalid, Corrupt)):
                return Outcome(Halted(reply.reason, reply.message), None)
            if isinstance(reply, TidewaterError):
                failures += 1
                yield Wait(failures, reply)
                continue
            assert reply is not None
            view = reply
            rolled_back = check_head(view, claims)
            if rolled_back is not None:
                return Outcome(rolled_back, view)
        adopt = check_identity(view, identity)
        if isinstance(adopt, Halted):
            return Outcome(adopt, view)
        step = _next_step(view, claims, batch, adopt)
        if isinstance(step, Outcome):
            return step
        reply = yield step
        if isinstance(reply, TableView):
            view = reply
            if isinstance(step, AddRows):
                return Outcome(Landed(), view, fresh=True)
            continue
        assert reply is not None
        view = None
        failures += 1
        yield Wait(failures, reply)


def _next_step(
    view: TableView, claims: Mapping[int, Claim], batch: Mapping[int, Span], adopt: bool
) -> RaiseEpoch | AddRows | Outcome:
    if adopt:
        return RaiseEpoch(view, adopt=True)
    verdict = decide(view.frontiers, claims, batch)
    if isinstance(verdict, EpochFirst):
        return RaiseEpoch(view, adopt=False)
    if isinstance(verdict, Go):
        return AddRows(view) if batch else Outcome(Landed(), view)
    return Outcome(verdict, view)
