"""What was produced, delivered and acknowledged, and which promises that breaks. Pure.

Times are of one clock. An ack counts as *stored* when its answer said so, and as *tried* from the
moment it was sent: without an answer it may have been stored or not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

G3: Final = "G3 One stream"
G4: Final = "G4 At least once"
G5: Final = "G5 One owner"
ORDERED: Final = {"Exclusive": "partition", "Failover": "partition", "KeyShared": "key"}
"""What keeps its order, by type of subscription."""
SHOWN_MAX: Final = 30
Place = tuple[int, int]
"""Partition and offset."""
Group = Callable[[Place], tuple[int, str]]
"""Tells which messages a message keeps its order with."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that a consumer got."""

    place: Place
    key: str
    value: str
    asked_at: float
    """When the pull was sent that brought it."""
    consumer: str


@dataclass(frozen=True, slots=True)
class Ack:
    """One message of one ack call."""

    place: Place
    sent_at: float
    stored_at: float | None = None
    """When the answer came that said it is stored; None: it may be, or not."""


@dataclass
class Story:
    """What happened to one subscription, in the order in which its consumers saw it."""

    kind: str
    prefix: str = ""
    """Of the keys that its filter wants."""
    deliveries: list[Delivery] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    refused: int = 0
    unknown: int = 0
    """Pulls without an answer: the consumer goes on under another name."""

    def wanted(self, produced: "Mapping[Place, tuple[str, str]]") -> "set[Place]":
        """Return those of the messages that it is to get."""
        return {place for place, (key, _) in produced.items() if key.startswith(self.prefix)}


@dataclass
class History:
    """All of it."""

    produced: dict[Place, tuple[str, str]] = field(default_factory=dict)
    """Acknowledged messages: key and value."""
    given_twice: list[str] = field(default_factory=list)
    stories: dict[str, Story] = field(default_factory=dict)

    def note_produced(self, place: Place, key: str, value: str) -> None:
        """Take a producer's acknowledgement."""
        before = self.produced.setdefault(place, (key, value))
        if before != (key, value):
            self.given_twice.append(f"{_at(place)} was given to {before[1]!r} and to {value!r}")


def violations(history: History, stored: Mapping[int, list[tuple[int, str]]]) -> list[str]:
    """Return every broken promise, in a line each; `stored`: what each partition reads as."""
    found = [f"{G5}: {told}" for told in history.given_twice]
    found += _stored(history, stored)
    values = {
        (partition, offset): value for partition, rows in stored.items() for offset, value in rows
    }
    for name, story in history.stories.items():
        told = [*_same(story, values), *_lost(history, story), *_again(story), *_order(story)]
        found += [f"{line} (subscription {name}, {story.kind})" for line in told]
    if len(found) > SHOWN_MAX:
        found = [*found[:SHOWN_MAX], f"… and {len(found) - SHOWN_MAX} more"]
    return found


def _at(place: Place) -> str:
    return f"partition {place[0]}, offset {place[1]}"


def _stored(history: History, stored: Mapping[int, list[tuple[int, str]]]) -> Iterator[str]:
    for partition, rows in stored.items():
        for expected, (offset, _) in enumerate(rows):
            if offset != expected:
                yield f"{G3}: partition {partition} has {offset} where {expected} is expected"
                break
    values = {(p, offset): value for p, rows in stored.items() for offset, value in rows}
    seen: dict[str, Place] = {}
    for place, value in values.items():
        if value in seen:
            yield f"G8 Idempotent producers: {value!r} at {_at(seen[value])} and at {_at(place)}"
        seen[value] = place
    for place, (_, value) in history.produced.items():
        if values.get(place) != value:
            there = values.get(place)
            yield f"G1 Durable: {_at(place)} was acknowledged as {value!r}, is {there!r}"


def _same(story: Story, values: Mapping[Place, str]) -> Iterator[str]:
    for delivery in story.deliveries:
        if not delivery.key.startswith(story.prefix):
            yield f"{G4}: {_at(delivery.place)} was delivered, which the filter does not want"
        if values.get(delivery.place) != delivery.value:
            yield (
                f"{G3}: {_at(delivery.place)} was delivered as {delivery.value!r}, and is "
                f"{values.get(delivery.place)!r}"
            )


def _lost(history: History, story: Story) -> Iterator[str]:
    delivered = {delivery.place for delivery in story.deliveries}
    acked = {ack.place for ack in story.acks}
    for place in sorted(story.wanted(history.produced)):
        if place not in delivered:
            yield f"{G4}: {_at(place)} was never delivered"
        elif place not in acked:
            yield f"{G4}: {_at(place)} was delivered and could never be acknowledged"


def _again(story: Story) -> Iterator[str]:
    stored: dict[Place, float] = {}
    for ack in story.acks:
        if ack.stored_at is not None:
            stored[ack.place] = min(ack.stored_at, stored.get(ack.place, ack.stored_at))
    for delivery in story.deliveries:
        if delivery.asked_at > stored.get(delivery.place, float("inf")):
            yield (
                f"{G4}: {_at(delivery.place)} was delivered to {delivery.consumer} by a pull that "
                f"was sent {delivery.asked_at - stored[delivery.place]:.3f} s after its ack was "
                "stored"
            )


def _order(story: Story) -> Iterator[str]:
    by = ORDERED.get(story.kind)
    if by is None:
        return
    keys = {delivery.place: delivery.key for delivery in story.deliveries}

    def group(place: Place) -> tuple[int, str]:
        return (place[0], keys[place] if by == "key" else "")

    yield from _first_seen(story.deliveries, group)
    yield from _ack_order(story, group)


def _first_seen(deliveries: Iterable[Delivery], group: Group) -> Iterator[str]:
    """First deliveries of a group come by offset."""
    newest: dict[tuple[int, str], int] = {}
    seen: set[Place] = set()
    for delivery in deliveries:
        place = delivery.place
        if place in seen:
            continue
        seen.add(place)
        of = group(place)
        if place[1] < newest.get(of, -1):
            yield f"{G4}, in order: {_at(place)} came after {newest[of]} of {of}"
        newest[of] = max(place[1], newest.get(of, -1))


def _ack_order(story: Story, group: Group) -> Iterator[str]:
    """Whatever is stored as acknowledged, all before it in its group was tried before."""
    tried: dict[Place, float] = {}
    for ack in story.acks:
        tried[ack.place] = min(ack.sent_at, tried.get(ack.place, ack.sent_at))
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place in {delivery.place for delivery in story.deliveries}:
        groups[group(place)].append(place[1])
    first_stored: dict[Place, float] = {}
    for ack in story.acks:
        if ack.stored_at is not None:
            known = first_stored.get(ack.place, ack.sent_at)
            first_stored[ack.place] = min(ack.sent_at, known)
    for of, offsets in groups.items():
        latest, which = 0.0, -1
        for offset in sorted(offsets):
            place = (of[0], offset)
            sent = first_stored.get(place)
            if sent is not None and latest > sent:
                yield f"{G4}, in order: {_at(place)} was acknowledged before {which} of {of}"
            mine = tried.get(place, float("inf"))
            if mine > latest:
                latest, which = mine, offset
