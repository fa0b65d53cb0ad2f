"""Offers of other workers that wait for the next joint commit. Thread-safe."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

from pyiceberg.manifest import DataFile

from tidewater_core.errors import Overloaded, Retryable
from tidewater_worker.ports import Haste, Offer, OfferAnswer
from tidewater_worker.table.descriptors import unpack_files
from tidewater_worker.table.frontier import Claim, Span
from tidewater_worker.table.joint import Member
from tidewater_worker.table.pace import EARLY_PART

OFFERS_MAX: Final = 1_000
"""Owners of one topic's partitions whose files may wait at the same time."""

ASKED_AGAIN: Final = "AskedAgain"
"""The reason that goes to the sender of an offer of which another copy came."""
Answer = Callable[[OfferAnswer], None]


@dataclass(slots=True)
class Waiting:
    """An offer and who waits for its answer."""

    member: Member
    files: list[DataFile]
    spec_id: int
    haste: Haste
    pinned: frozenset[int]
    answer: Answer | None
    """None for the committing worker's own rows."""


_orders: Final = count(1)


def next_order() -> int:
    """Return a number that is higher than all before."""
    return next(_orders)


def not_landed(reason: str, message: str) -> OfferAnswer:
    """Say that the sender has to ask the table."""
    return OfferAnswer(landed=False, reason=reason, message=message)


def waiting_of(offer: Offer, answer: Answer) -> Waiting:
    """Read an offer, or raise what is wrong with it."""
    claims = {
        p: Claim(part.epoch, part.committed, part.gap_end) for p, part in offer.partitions.items()
    }
    spans = {
        p: Span(part.first, part.end)
        for p, part in offer.partitions.items()
        if part.end > part.first
    }
    return Waiting(
        member=Member(offer.id, next_order(), claims, spans),
        files=unpack_files(offer.files, offer.spec_id, spans),
        spec_id=offer.spec_id,
        haste=offer.haste,
        pinned=frozenset(offer.pinned),
        answer=answer,
    )


class OfferBox:
    """What other workers have offered and no commit has taken yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Waiting] = {}
        self._taken: dict[str, Waiting] = {}
        self._closed = False

    def add(self, waiting: Waiting) -> None:
        """Take an offer; a copy of one that is here takes over its answer."""
        key = waiting.member.key
        with self._lock:
            if self._closed:
                raise Retryable("NotCommitter", "the topic was let go by this worker", 100)
            before = self._taken.get(key) or self._waiting.get(key)
            if before is None and len(self._waiting) >= OFFERS_MAX:
                raise Overloaded("OffersWaiting", f"{OFFERS_MAX} offers wait already", 500)
            told = None
            if before is None:
                self._waiting[key] = waiting
            else:
                before.answer, told = waiting.answer, before.answer
                before.haste = max(before.haste, waiting.haste)
        if told is not None:
            told(not_landed(ASKED_AGAIN, "another copy of this offer is here"))

    def take(self) -> list[Waiting]:
        """Return all offers for a commit that begins now."""
        with self._lock:
            self._taken = self._waiting
            self._waiting = {}
            return list(self._taken.values())

    def settled(self, key: str) -> Answer | None:
        """Return who waits for the answer to an offer that was taken, and forget it."""
        with self._lock:
            taken = self._taken.pop(key, None)
            return taken.answer if taken is not None else None

    def due(self, now: float, committed_at: float, interval_s: float) -> float | None:
        """Return when to commit what waits: once per interval, sooner for those in haste."""
        if not self._waiting:  # a topic on one worker never has any
            return None
        with self._lock:
            haste = max((waiting.haste for waiting in self._waiting.values()), default=None)
        if haste is None:
            return None
        if haste is Haste.NOW:
            return now
        part = EARLY_PART if haste is Haste.SOON else 1.0
        return max(now, committed_at + interval_s * part)

    def refuse(self, reason: str, message: str, *, close: bool = False) -> None:
        """Send everybody back to the table."""
        with self._lock:
            refused = [*self._waiting.values(), *self._taken.values()]
            self._waiting, self._taken = {}, {}
            self._closed = self._closed or close
        for waiting in refused:
            if waiting.answer is not None:
                waiting.answer(not_landed(reason, message))


def claims_of(members: Iterable[Member]) -> Mapping[int, Claim]:
    """Join what members hold."""
    return {p: claim for member in members for p, claim in member.claims.items()}


def spans_of(members: Iterable[Member]) -> Mapping[int, Span]:
    """Join the rows of members."""
    return {p: span for member in members for p, span in member.spans.items()}
