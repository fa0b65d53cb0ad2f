"""Idempotent producers (G8): which requests a partition has stored already. Pure.

A producer numbers its requests. A partition remembers the last `WINDOW` of each producer with
the offsets they got; a re-send within the window gets the same offsets, one older than the window
is refused because nothing can be said about it. Numbers may have gaps (the other partitions' share)
and may arrive out of order within the window.

The state is a function of the log: each request is a run in the frame's `tw_producer` column. It
is saved beside a segment when that begins, so that recovery reads one segment, not all:

    producers := magic "TWPRD001"  producer*                   (the longest silent first)
    producer  := name-length:u16  requests:u16  name (UTF-8)  request[requests]
    request   := sequence:u64  offset:u64  count:u64

Integers are little-endian. A partition takes no message while that is written, so each producer's
requests are kept as those bytes: saving them costs a copy.
"""

import re
import struct
from collections import OrderedDict
from dataclasses import InitVar, dataclass
from heapq import heapify, heappush, heappushpop
from typing import Final

import msgspec

from tidewater_core.errors import Conflict, Invalid

WINDOW: Final = 256
"""Requests of one producer that are remembered."""
PRODUCERS_MAX: Final = 10_000
"""Producers that a partition remembers unless told otherwise (`Limits.producers_max`); the one
that was silent longest is forgotten."""
MAGIC: Final = b"TWPRD001"
_PRODUCER: Final = struct.Struct("<HH")
_REQUEST: Final = struct.Struct("<QQQ")
PRODUCER_BYTES_MAX: Final = 128
SEQUENCE_MAX: Final = 2**63 - 1
_NOT_IN_IDS: Final = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]|^ | $")
"""An id travels in a header between workers: control characters would end that, and spaces at its
ends are lost."""


@dataclass(frozen=True, slots=True)
class Request:
    """The identity that a producer gave a request."""

    producer: str
    sequence: int
    is_logged: InitVar[bool] = False
    """It was read from a log, which may be older than a rule for ids."""

    def __post_init__(self, is_logged: bool) -> None:
        """Refuse what could not be stored and found again, or not be told to another worker."""
        if is_logged:
            return
        if _NOT_IN_IDS.search(self.producer):
            raise Invalid(
                "InvalidProducer",
                "a producer id has no control characters, and no space at its ends",
            )
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
        return cls(producer, int(sequence), is_logged=True)


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's messages are."""

    offset: int
    count: int


class Duplicate(Stored, frozen=True, array_like=True):
    """Where a re-sent request's messages are: nothing was stored now."""


def reused(request: Request, before: int, now: int) -> Conflict:
    """Say that a sequence stands for other messages."""
    return Conflict(
        "SequenceReused",
        f"producer {request.producer!r} used sequence {request.sequence} for {before} messages "
        f"before, now for {now}",
    )


class _Window:
    """One producer's last requests; the lowest number is the first to go."""

    __slots__ = ("_at", "data", "lowest")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        """Its requests as they are saved."""
        sequences = [sequence for sequence, _, _ in _REQUEST.iter_unpack(data)]
        self._at = {sequence: i * _REQUEST.size for i, sequence in enumerate(sequences)}
        self.lowest = sequences
        heapify(self.lowest)

    def __len__(self) -> int:
        return len(self._at)

    def find(self, sequence: int) -> Stored | None:
        at = self._at.get(sequence)
        if at is None:
            return None
        _, offset, count = _REQUEST.unpack_from(self.data, at)
        return Stored(offset, count)

    def add(self, sequence: int, stored: Stored) -> None:
        at = self._at.get(sequence)
        if at is None:
            if len(self._at) < WINDOW:
                heappush(self.lowest, sequence)
                at = len(self.data)
                self.data += bytes(_REQUEST.size)
            else:
                dropped = heappushpop(self.lowest, sequence)
                if dropped == sequence:
                    return
                at = self._at.pop(dropped)
            self._at[sequence] = at
        _REQUEST.pack_into(self.data, at, sequence, stored.offset, stored.count)


class Producers:
    """The requests that a partition remembers, of so many producers."""

    def __init__(self, producers_max: int = PRODUCERS_MAX) -> None:
        self._known: OrderedDict[str, _Window] = OrderedDict()
        self._producers_max = producers_max

    def __len__(self) -> int:
        """Count the producers."""
        return len(self._known)

    def keep(self, producers_max: int) -> None:
        """Remember so many from now on."""
        self._producers_max = producers_max
        while len(self._known) > producers_max:
            self._known.popitem(last=False)

    def find(self, request: Request, count: int) -> Stored | None:
        """Return where a re-sent request is; None for a new one; raise if it cannot be told."""
        window = self._known.get(request.producer)
        if window is None:
            return None
        stored = window.find(request.sequence)
        if stored is not None:
            if stored.count != count:
                raise reused(request, stored.count, count)
            return stored
        if len(window) >= WINDOW and request.sequence < window.lowest[0]:
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
            window = self._known[request.producer] = _Window()
            if len(self._known) > self._producers_max:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(request.producer)
        window.add(request.sequence, stored)

    def parts(self) -> list[bytes | bytearray]:
        """Encode for the file beside a segment, in pieces; the next `store` changes them."""
        parts: list[bytes | bytearray] = [MAGIC]
        for producer, window in self._known.items():
            name = producer.encode()
            parts += (_PRODUCER.pack(len(name), len(window)), name, window.data)
        return parts

    def to_bytes(self) -> bytes:
        """Encode in one piece."""
        return b"".join(self.parts())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Producers":
        """Decode what `to_bytes` made, all of it; `ValueError` for anything else."""
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError("not a list of producers")
        producers = cls()
        at = len(MAGIC)
        while at < len(data):
            if at + _PRODUCER.size > len(data):
                raise ValueError("a list of producers that is cut off")
            name_bytes, requests = _PRODUCER.unpack_from(data, at)
            name_at = at + _PRODUCER.size
            requests_at = name_at + name_bytes
            at = requests_at + requests * _REQUEST.size
            if at > len(data):
                raise ValueError("a list of producers that is cut off")
            name = data[name_at:requests_at].decode()
            producers._known[name] = _Window(data[requests_at:at])
        return producers
