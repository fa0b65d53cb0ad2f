"""Idempotent producers (G8): which requests a partition has stored already. Pure.

A producer numbers its requests. A partition remembers the last `WINDOW` of each producer with
the offsets they got; a re-send within the window gets the same offsets, one older than the window
is refused because nothing can be said about it. Numbers may have gaps (the other partitions' share)
and may arrive out of order within the window.

The state is a function of the log: each request is a run in the frame's `tw_producer` column. It
is saved beside a segment when that begins, so that recovery reads one segment, not all.
"""

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from tidewater_core.errors import Conflict, Invalid

WINDOW: Final = 256
"""Requests of one producer that are remembered."""
PRODUCERS_MAX: Final = 10_000
"""Producers that a partition remembers; the one that was silent longest is forgotten."""
PRODUCER_BYTES_MAX: Final = 128
SEQUENCE_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """The identity that a producer gave a request."""

    producer: str
    sequence: int

    def __post_init__(self) -> None:
        """Refuse what could not be stored and found again."""
        if not self.producer or len(self.producer.encode()) > PRODUCER_BYTES_MAX:
            raise Invalid("InvalidProducer", f"a producer id has 1 to {PRODUCER_BYTES_MAX} bytes")
        if not 0 <= self.sequence <= SEQUENCE_MAX:
            raise Invalid("InvalidSequence", f"a sequence is a number from 0 to {SEQUENCE_MAX}")

    def encode(self) -> str:
        """Write as the log's `tw_producer` value."""
        return f"{self.producer}/{self.sequence}"

    @classmethod
    def decode(cls, text: str) -> "Request":
        """Read a `tw_producer` value."""
        producer, _, sequence = text.rpartition("/")
        return cls(producer, int(sequence))


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's messages are."""

    offset: int
    count: int


class Duplicate(Stored, frozen=True, array_like=True):
    """Where a re-sent request's messages are: nothing was stored now."""


class _Window:
    """One producer's last requests; the lowest number is the first to go."""

    __slots__ = ("lowest", "stored")

    def __init__(self, stored: dict[int, Stored]) -> None:
        self.stored = stored
        self.lowest = list(stored)
        heapify(self.lowest)

    def add(self, sequence: int, stored: Stored) -> None:
        if sequence not in self.stored:
            heappush(self.lowest, sequence)
        self.stored[sequence] = stored
        if len(self.stored) > WINDOW:
            del self.stored[heappop(self.lowest)]


class Producers:
    """The requests that a partition remembers."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Window] = OrderedDict()

    def __len__(self) -> int:
        """Count the producers."""
        return len(self._known)

    def find(self, request: Request, count: int) -> Stored | None:
        """Return where a re-sent request is; None for a new one; raise if it cannot be told."""
        window = self._known.get(request.producer)
        if window is None:
            return None
        stored = window.stored.get(request.sequence)
        if stored is not None:
            if stored.count != count:
                raise Conflict(
                    "SequenceReused",
                    f"producer {request.producer!r} used sequence {request.sequence} for "
                    f"{stored.count} messages before, now for {count}",
                )
            return stored
        if len(window.stored) >= WINDOW and request.sequence < window.lowest[0]:
            raise Conflict(
                "SequenceTooOld",
                f"producer {request.producer!r}: sequence {request.sequence} is older than the "
                f"last {WINDOW} requests; whether it was stored cannot be told",
            )
        return None

    def store(self, request: Request, stored: Stored) -> None:
        """Remember a request that is in the log."""
        window = self._known.get(request.producer)
        if window is None:
            window = self._known[request.producer] = _Window({})
            if len(self._known) > PRODUCERS_MAX:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(request.producer)
        window.add(request.sequence, stored)

    def to_bytes(self) -> bytes:
        """Encode for the file beside a segment."""
        return msgspec.json.encode(
            {name: list(window.stored.items()) for name, window in self._known.items()}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Producers":
        """Decode what `to_bytes` made."""
        producers = cls()
        for producer, window in msgspec.json.decode(
            data, type=dict[str, list[tuple[int, Stored]]]
        ).items():
            producers._known[producer] = _Window(dict(window))
        return producers
