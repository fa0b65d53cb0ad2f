"""The commit of many owners' rows at once, as a generator that does nothing itself.

One worker commits for all owners of a topic's partitions. Each of them is a `Member`: what it
holds, and which rows its files have. On the state just loaded every member is judged alone by
the same rule as ever (`frontier.decide`), and what is wrong with one is told to that one only:

    landed                     told so: an earlier attempt got through
    fenced, moved back, recut  told so: it asks the table itself, and acts on what it finds there
    epoch first                raised by a commit of its own, for all such members together
    go                         committed, all of them in one

Invariants, whatever is sent: those of `commit.run_commit`, and

* No two members of one commit speak of the same partition: the higher epoch counts, and of two
  equals the one that came last (the earlier one's process has cut again since).
* A member is told that it landed only after a state was seen in which it has.

Nothing here need be remembered: a member that hears nothing asks the table.
"""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

from tidewater_core.errors import Corrupt, Invalid, TidewaterError
from tidewater_worker.table.commit import (
    Halted,
    Identity,
    Load,
    Reply,
    Wait,
    check_head,
    check_identity,
)
from tidewater_worker.table.frontier import (
    Claim,
    EpochFirst,
    Fenced,
    Frontier,
    Go,
    Landed,
    MovedBack,
    Recut,
    Span,
    decide,
)
from tidewater_worker.table.view import TableView


@dataclass(frozen=True, slots=True)
class Member:
    """One owner's part of a joint commit."""

    key: str
    """The same for every copy of one offer."""
    order: int
    """Later ones have higher numbers."""
    claims: Mapping[int, Claim]
    spans: Mapping[int, Span]


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another member speaks of the same partitions with more right."""

    partitions: tuple[int, ...]


Settlement = Landed | Fenced | MovedBack | Recut | Superseded | Halted


@dataclass(frozen=True, slots=True)
class RaiseEpochs:
    """Commit an empty snapshot that carries these epochs."""

    view: TableView
    claims: Mapping[int, Claim]


@dataclass(frozen=True, slots=True)
class AddMembers:
    """Commit the rows of these members on this state."""

    view: TableView
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Tell a member what became of it; it takes no further part."""

    member: Member
    how: Settlement
    view: TableView | None
    fresh: bool = False
    """It landed with the commit just answered."""


JointStep = Load | RaiseEpochs | AddMembers | Settle | Wait


@dataclass(frozen=True, slots=True)
class JointPlan:
    """What to do with the members on one state of the table."""

    settled: Mapping[str, Settlement]
    raising: Mapping[int, Claim]
    going: tuple[Member, ...]


def plan_joint(found: Mapping[int, Frontier], members: Iterable[Member]) -> JointPlan:
    """Judge every member on the table just loaded."""
    settled: dict[str, Settlement] = {}
    able: dict[str, tuple[Member, EpochFirst | Go]] = {}
    for member in members:
        verdict = decide(found, member.claims, member.spans)
        if isinstance(verdict, (EpochFirst, Go)):
            able[member.key] = (member, verdict)
        else:
            settled[member.key] = verdict
    first: dict[int, tuple[int, int]] = {}
    for member, _ in able.values():
        for partition, claim in member.claims.items():
            first[partition] = max(first.get(partition, (-1, -1)), (claim.epoch, member.order))
    raising: dict[int, Claim] = {}
    going: list[Member] = []
    for key, (member, verdict) in able.items():
        beaten = tuple(
            p for p, claim in member.claims.items() if first[p] != (claim.epoch, member.order)
        )
        if beaten:
            settled[key] = Superseded(beaten)
        elif isinstance(verdict, EpochFirst):
            raising.update({p: member.claims[p] for p in verdict.partitions})
        elif member.spans:
            going.append(member)
        else:
            settled[key] = Landed()
    return JointPlan(settled, raising, tuple(going))


def run_joint(
    identity: Identity, members: Iterable[Member], view: TableView | None = None
) -> Generator[JointStep, Reply, None]:
    """Bring the members' epochs and rows into the table, each once; settle every one of them.

    `view` may be a state seen earlier: a proposal on a state that has passed is refused.
    """
    waiting = {member.key: member for member in members}
    failures = 0
    while waiting:
        problem: Halted | None = None
        if view is None:
            reply = yield Load()
            if isinstance(reply, (Invalid, Corrupt)):
                problem = Halted(reply.reason, reply.message)
            elif isinstance(reply, TidewaterError):
                failures += 1
                yield Wait(failures, reply)
                continue
            else:
                assert reply is not None
                view = reply
                problem = check_head(view, {p for m in waiting.values() for p in m.claims})
        problem = problem or _stranger(view, identity)
        if problem is not None:
            for member in waiting.values():
                yield Settle(member, problem, view)
            return
        assert view is not None
        plan = plan_joint(view.frontiers, waiting.values())
        for key, how in plan.settled.items():
            yield Settle(waiting.pop(key), how, view)
        step = _next_step(view, plan)
        if step is None:
            continue
        reply = yield step
        if not isinstance(reply, TableView):
            assert reply is not None
            view = None
            failures += 1
            yield Wait(failures, reply)
            continue
        view = reply
        if isinstance(step, AddMembers):
            for member in step.members:
                yield Settle(waiting.pop(member.key), Landed(), view, fresh=True)


def _stranger(view: TableView | None, identity: Identity) -> Halted | None:
    """Refuse a table that is not ours, or not yet: adopting one is its new owners' own business."""
    if view is None:
        return None
    ours = check_identity(view, identity)
    if isinstance(ours, Halted):
        return ours
    return Halted("NotAdopted", "the table is of a topic that is gone") if ours else None


def _next_step(view: TableView, plan: JointPlan) -> RaiseEpochs | AddMembers | None:
    if plan.raising:
        return RaiseEpochs(view, plan.raising)
    return AddMembers(view, plan.going) if plan.going else None
