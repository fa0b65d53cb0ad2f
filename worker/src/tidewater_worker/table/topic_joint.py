"""One topic among several workers: handing files to the committing one, or being it.

    elsewhere: cut a batch ─▶ offer it ─▶ answered: landed ─▶ wait …
                                └▶ no answer, or not landed: ask the table, commit alone
    here:      wait until the interval is over ─▶ cut a batch ─▶ commit it with all offers

Which of them a worker is changes only who sends the commit. What may land is decided by the
frontier in the table, so two workers that both believe to be the committing one do no harm but
refuse each other now and then.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tidewater_core.errors import Corrupt, Invalid, TidewaterError
from tidewater_worker.ports import Commits, Haste, Offer, OfferAnswer, Offered
from tidewater_worker.table.commit import Identity, Outcome, Wait
from tidewater_worker.table.cut import Cut
from tidewater_worker.table.descriptors import pack_files
from tidewater_worker.table.frontier import Claim, Span
from tidewater_worker.table.holding import OWN, JointRun
from tidewater_worker.table.joint import Member
from tidewater_worker.table.offers import ASKED_AGAIN, Waiting, next_order, waiting_of
from tidewater_worker.table.pace import aligned_due
from tidewater_worker.table.topic_base import TopicBase
from tidewater_worker.table.view import TableView

log = logging.getLogger(__name__)

ANSWER_S_MAX: Final = 90.0
"""An offer without any answer by then, and two intervals, is taken for lost. The edge knows sooner
if the committing worker is away; this is for an edge that is away itself."""
LEAD_S_MIN: Final = 0.05
LEAD_FACTOR: Final = 1.5
"""Files are cut so much earlier than the commit of the interval as it last took to make them."""

Hand = Callable[["JointTopic", Offer], None]
"""Sends an offer; the topic's `answered` is called once, later."""


@dataclass(slots=True)
class Handed:
    """An offer under way."""

    offer: Offer
    identity: Identity
    claims: Mapping[int, Claim]
    deadline: float
    answer: OfferAnswer | None = None


def offer_of(
    identity: Identity,
    claims: Mapping[int, Claim],
    cut: Cut | None,
    view: TableView | None,
    offer_id: str,
    haste: Haste,
    pinned: frozenset[int],
) -> Offer:
    """Describe files, or epochs alone, for the committing worker."""
    prepared = cut.prepared if cut is not None else None
    spans: Mapping[int, Span] = prepared.spans if prepared is not None else {}
    nothing = Span(0, 0)
    files, spec_id = b"", 0
    if prepared is not None and prepared.spec is not None:
        assert view is not None, "files are cut on a state of the table"
        spec_id = prepared.spec.spec_id
        files = pack_files(prepared.files, prepared.spec, view.metadata.schema())
    return Offer(
        id=offer_id,
        topic=identity.topic,
        topic_uuid=identity.topic_uuid,
        table_uuid=identity.table_uuid or "",
        partitions={
            p: Offered(
                epoch=claim.epoch,
                committed=claim.committed,
                first=spans.get(p, nothing).first,
                end=spans.get(p, nothing).end,
                gap_end=claim.gap_end,
            )
            for p, claim in claims.items()
        },
        spec_id=spec_id,
        files=files,
        haste=haste,
        pinned=tuple(sorted(pinned)),
    )


class JointTopic(TopicBase):
    """The part of a topic's run that deals with other workers."""

    hand: Hand | None = None
    """Set where there is an edge to send offers through."""
    _handed: Handed | None = None
    _joint: JointRun | None = None
    _tick_at: float | None = None
    """When the committing worker will commit next, as far as it told."""
    _lead_s: float = LEAD_S_MIN
    _epochs_handed: bool = False

    @abstractmethod
    def step(self) -> float | None:
        """Do what is due."""

    @abstractmethod
    def _begin(
        self, identity: Identity, claims: Mapping[int, Claim], view: TableView | None
    ) -> float | None:
        """Commit alone."""

    @abstractmethod
    def _finish(self, outcome: Outcome) -> float | None:
        """Act on how a commit ended."""

    @abstractmethod
    def _committed(
        self, cut: Cut, nexts: Mapping[int, int], starts: Mapping[int, int], now: float
    ) -> None:
        """Note that a batch is in the table."""

    # Asked by any thread.

    def take_offer(self, offer: Offer, answer: Callable[[OfferAnswer], None]) -> None:
        """Take files of another worker into the next commit."""
        self.offers.add(waiting_of(offer, answer))

    def answered(self, offer_id: str, answer: OfferAnswer) -> None:
        """Take the answer to our own offer; the scheduler must be poked."""
        with self.inbox.changed:
            handed = self._handed
            if handed is not None and handed.offer.id == offer_id and answer.reason != ASKED_AGAIN:
                handed.answer = answer

    # Elsewhere: handing over.

    @property
    def _hands_over(self) -> bool:
        return self._role is Commits.ELSEWHERE and self.hand is not None

    def _hand_over(self, identity: Identity, claims: Mapping[int, Claim]) -> float | None:
        """Offer what was cut, or the claims' epochs alone, to the committing worker."""
        now = self._clock.monotonic()
        haste = Haste.INTERVAL
        if self._cut is None or self.inbox.in_haste or self._is_wanted:
            haste = Haste.NOW
        elif self._backlog:
            haste = Haste.SOON
        commit_id = self._cut.prepared.commit_id if self._cut is not None else self._ids.uuid()
        offer = offer_of(
            identity, claims, self._cut, self._view, str(commit_id), haste, self.inbox.pinned()
        )
        if self._cut is not None:
            self._lead_s = max(LEAD_S_MIN, (now - self._cut_at) * LEAD_FACTOR)
        interval_s = self.where.spec.writer.flush_interval.seconds
        deadline = now + ANSWER_S_MAX + 2 * interval_s
        self._handed = Handed(offer, identity, claims, deadline)
        assert self.hand is not None
        self.hand(self, offer)
        return self._await_answer()

    @property
    def _is_wanted(self) -> bool:
        return any(
            run.waiting and run.next < self.inbox.wanted(number)
            for number, run in self._partitions.items()
        )

    def _await_answer(self) -> float | None:
        """Go on once the answer is there, or will not come."""
        now = self._clock.monotonic()
        handed = self._handed
        assert handed is not None
        if handed.answer is None and now < handed.deadline:
            if handed.offer.haste is not Haste.NOW and (self.inbox.in_haste or self._is_wanted):
                # Another copy of the same offer, by somebody who now waits for it.
                handed.offer = msgspec.structs.replace(handed.offer, haste=Haste.NOW)
                assert self.hand is not None
                self.hand(self, handed.offer)
            return handed.deadline
        self._handed = None
        answer = handed.answer
        if answer is None or not answer.landed or not self._covers(answer):
            why = f"{answer.reason}: {answer.message}" if answer is not None else "no answer"
            log.info("not landed elsewhere topic=%s %s", self.where.topic, why)
            # The table alone knows what became of it.
            return self._begin(handed.identity, handed.claims, None)
        self._failures = 0
        if answer.tick_ms >= 0:
            self._tick_at = now + answer.tick_ms / 1000
        cut, self._cut = self._cut, None
        if cut is not None:
            self._snapshot_id = answer.snapshot_id
            self._committed_at_us = answer.committed_at_us
            self._committed(cut, answer.next, answer.starts, now)
            self._get_committer().counters.handed_over += 1
        return now

    def _covers(self, answer: OfferAnswer) -> bool:
        spans = self._cut.prepared.spans if self._cut is not None else {}
        return all(answer.next.get(p, -1) >= span.end for p, span in spans.items())

    # Here: committing for all.

    def _joint_due(self, now: float) -> float | None:
        """Return when the offers that wait are to be committed; None if there are none."""
        interval_s = self.where.spec.writer.flush_interval.seconds
        return self.offers.due(now, self._joint_at, interval_s)

    def _aligned(self, due: float, since: float) -> float:
        """Move a flush by age to the commits of the interval, which many workers share."""
        interval_s = self.where.spec.writer.flush_interval.seconds
        if self._role is Commits.HERE:
            return min(due, aligned_due(since, interval_s, self._joint_at, 0.0))
        if self._role is Commits.ELSEWHERE and self._tick_at is not None:
            lead_s = min(self._lead_s, interval_s / 2)
            return min(due, aligned_due(since, interval_s, self._tick_at, lead_s))
        return due

    def _begin_joint(self, taken: Sequence[Waiting]) -> float | None:
        """Commit all offers, and what was cut here."""
        try:
            committer = self._get_committer()
            identity = self._identity()
        except TidewaterError as error:
            self.offers.refuse(error.reason, error.message)
            self._cut = None
            if isinstance(error, (Invalid, Corrupt)):
                return self._halt(error.reason, error.message)
            return self._fail(error)
        own = None
        self._claims = self._partitions.claims()
        if self._cut is not None:
            prepared = self._cut.prepared
            own = (Member(OWN, next_order(), self._claims, prepared.spans), prepared)
        self._joint = JointRun(
            identity, taken, own, self.offers, self._ids, self._view, self._tick_ms
        )
        committer.counters.offers += len(taken)
        return self._drive_joint()

    def _tick_ms(self) -> int:
        interval_s = self.where.spec.writer.flush_interval.seconds
        left = self._joint_at + interval_s - self._clock.monotonic()
        return max(0, round(left * 1000))

    def _drive_joint(self) -> float | None:
        """Go on with the joint commit under way until it ends or has to wait."""
        assert self._joint is not None
        ended = self._joint.drive(self._get_committer())
        if isinstance(ended, Wait):
            return self._retry_later(ended.failures, ended.error)
        self._joint = None
        if self._cut is None:
            self._failures = 0
            if ended.landed and ended.view is not None:
                self._view = ended.view
            for run in self._partitions.values():
                run.running()
            return self._clock.monotonic()
        if ended.own is None:
            return self._begin(self._identity(), self._claims, None)
        return self._finish(ended.own)

    def _abandon_joint(self) -> None:
        """Forget offers under way, both ways: the table tells everybody what landed."""
        self._handed = None
        if self._joint is not None:
            self._joint.abandon()
            self._joint = None
