"""Carrying out a joint commit for the owners of a topic's partitions."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from tidewater_core.clock import IdSource
from tidewater_worker.ports import OfferAnswer
from tidewater_worker.table.commit import (
    AddRows,
    Halted,
    Identity,
    Load,
    Outcome,
    RaiseEpoch,
    Reply,
    Wait,
)
from tidewater_worker.table.committer import Committer
from tidewater_worker.table.frontier import UNWRITTEN, Fenced, Landed, MovedBack, Recut
from tidewater_worker.table.joint import (
    AddMembers,
    JointStep,
    Member,
    RaiseEpochs,
    Settle,
    Settlement,
    Superseded,
    run_joint,
)
from tidewater_worker.table.offers import OfferBox, Waiting, claims_of, not_landed, spans_of
from tidewater_worker.table.snapshot import Prepared
from tidewater_worker.table.view import TableView

log = logging.getLogger(__name__)

OWN: str = "own"
"""Key of the committing worker's own rows."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A joint commit that is over."""

    own: Outcome | None
    """How our own rows fared; None if there were none, or they must be tried alone."""
    view: TableView | None
    """The newest state seen."""
    landed: bool
    """A commit went through."""


class JointRun:
    """One joint commit under way."""

    def __init__(
        self,
        identity: Identity,
        taken: Sequence[Waiting],
        own: tuple[Member, Prepared] | None,
        box: OfferBox,
        ids: IdSource,
        view: TableView | None,
        tick_ms: Callable[[], int],
    ) -> None:
        self._box, self._ids, self._tick_ms = box, ids, tick_ms
        self._files = {w.member.key: w.files for w in taken}
        self._spec_ids = {w.member.key: w.spec_id for w in taken}
        self._pinned = frozenset[int]().union(*(w.pinned for w in taken))
        members = [w.member for w in taken]
        if own is not None:
            member, prepared = own
            members.append(member)
            self._files[OWN] = list(prepared.files)
            if prepared.spec is not None:
                self._spec_ids[OWN] = prepared.spec.spec_id
        self._prepared: tuple[frozenset[str], Prepared] | None = None
        self._generator: Generator[JointStep, Reply, None] = run_joint(
            identity, self._same_spec(members), view
        )
        self._own: Outcome | None = None
        self._view = view
        self._landed = False

    def _same_spec(self, members: list[Member]) -> list[Member]:
        """Keep the members whose files are partitioned alike: a manifest has one spec."""
        specs = {self._spec_ids[m.key] for m in members if m.spans and m.key in self._spec_ids}
        newest = max(specs, default=0)
        kept = []
        for member in members:
            if member.spans and self._spec_ids.get(member.key) != newest:
                self._tell(member, not_landed("OtherSpec", "the table's partitioning is changing"))
            else:
                kept.append(member)
        return kept

    def drive(self, committer: Committer) -> Ended | Wait:
        """Go on until it ends or has to wait."""
        reply: Reply = None
        while True:
            try:
                step = self._generator.send(reply)
            except StopIteration:
                return Ended(self._own, self._view, self._landed)
            reply = None
            match step:
                case Wait():
                    return step
                case Settle():
                    self._settle(step)
                case Load():
                    reply = committer.perform(step, {}, None)
                case RaiseEpochs(view, claims):
                    reply = committer.perform(RaiseEpoch(view, adopt=False), claims, None)
                case AddMembers(view, members):
                    prepared = self._prepare(view, members)
                    reply = committer.perform(
                        AddRows(view), claims_of(members), prepared, self._pinned
                    )
            if isinstance(reply, TableView):
                self._view = reply

    def _prepare(self, view: TableView, members: tuple[Member, ...]) -> Prepared:
        """Join the files of members; the same members keep their snapshot over all attempts."""
        keys = frozenset(member.key for member in members)
        if self._prepared is None or self._prepared[0] != keys:
            files = [file for member in members for file in self._files[member.key]]
            spec_id = self._spec_ids[members[0].key]
            prepared = Prepared(
                snapshot_id=self._ids.snapshot_id(),
                commit_id=self._ids.uuid(),
                spans=spans_of(members),
                files=files,
                spec=view.metadata.specs()[spec_id],
            )
            self._prepared = (keys, prepared)
        return self._prepared[1]

    def _settle(self, step: Settle) -> None:
        self._landed = self._landed or step.fresh
        if step.member.key == OWN:
            if not isinstance(step.how, Superseded):
                self._own = Outcome(step.how, step.view, step.fresh)
            return
        self._tell(step.member, self._answer(step))

    def _answer(self, step: Settle) -> OfferAnswer:
        if not isinstance(step.how, Landed):
            log.info("offer=%s did not land: %s", step.member.key, step.how)
            return not_landed(*_why(step.how))
        view = step.view
        assert view is not None
        partitions = step.member.claims
        return OfferAnswer(
            landed=True,
            snapshot_id=view.snapshot_id,
            commit_id=str(self._prepared[1].commit_id) if step.fresh and self._prepared else "",
            committed_at_us=view.committed_at_us,
            next={p: view.frontiers.get(p, UNWRITTEN).next for p in partitions},
            starts={p: view.starts.get(p, 0) for p in partitions},
            tick_ms=self._tick_ms(),
        )

    def _tell(self, member: Member, answer: OfferAnswer) -> None:
        told = self._box.settled(member.key)
        if told is not None:
            told(answer)

    def abandon(self) -> None:
        """Give up; everybody asks the table."""
        self._generator.close()
        self._box.refuse("CommitterChanged", "the committing worker's own partitions changed")


def _why(how: Settlement) -> tuple[str, str]:
    """Name a settlement other than landed for its sender."""
    match how:
        case Fenced(partitions):
            return "Fenced", f"the table carries epochs {partitions}"
        case MovedBack(partitions):
            return "MovedBack", f"the table's frontier moved back: {partitions}"
        case Recut(partitions):
            return "Recut", f"some rows are there already: {_short(partitions)}"
        case Superseded(partitions):
            return "Superseded", f"a later offer has partitions {partitions}"
        case Halted(reason, message):
            return reason, message
        case Landed():
            return "", ""


def _short(partitions: Mapping[int, int]) -> str:
    return ", ".join(f"{p} up to {next_ - 1}" for p, next_ in sorted(partitions.items()))
