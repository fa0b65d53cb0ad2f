"""What a consumer holds: messages that wait in its buffer, are being worked on, or are settled.

    pulled ─add─▶ buffered ─take─▶ out ─settle─▶ settled ─told─▶ gone
                     └─ lost: its deadline passed, or somebody else has it

Time is an argument. One lock, because a blocking consumer's threads take and settle while the
thread that pulls adds and extends; nothing is called while it is held.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Generic, Protocol, TypeVar

from tidewater.origin import Origin


class Stage(Enum):
    """Where a delivery stands."""

    BUFFERED = "buffered"
    OUT = "out"
    """With the program."""
    SETTLED = "settled"
    """Acknowledged or given back by the program; the server may not know yet."""
    LOST = "lost"
    """The server has given it to somebody else, or will."""


class Lease:
    """One delivery of one message."""

    __slots__ = ("ack_id", "at", "due", "is_acked", "origin", "since", "stage")

    def __init__(
        self, ack_id: str, at: tuple[int, int], origin: Origin, now: float, due: float
    ) -> None:
        """Begin in the buffer."""
        self.ack_id = ack_id
        self.at = at
        """Partition and offset."""
        self.is_acked = False
        """The program is done with it; whether the server knows is another matter."""
        self.origin = origin
        """The worker that delivered it."""
        self.since = now
        self.due = due
        """When the server gives it to somebody else, unless it is extended."""
        self.stage = Stage.BUFFERED


class Item(Protocol):
    """What is handed out: a message, or an Arrow batch of many."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The deliveries that it stands for."""

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""


I = TypeVar("I", bound=Item)  # noqa: E741


class Held(Generic[I]):
    """The deliveries that a consumer holds."""

    def __init__(self, held_s_max: float = float("inf")) -> None:
        """Hold nothing. What was held for `held_s_max` may come a second time."""
        self._held_s_max = held_s_max
        self._lock = threading.Lock()
        self._buffer: deque[I] = deque()
        self._leases: dict[tuple[int, int], Lease] = {}
        """All that are buffered, out, or acknowledged without the server's word that it knows."""
        self._buffered = 0
        self._out = 0
        self._bytes = 0

    @property
    def buffered(self) -> int:
        """How many messages wait in the buffer."""
        return self._buffered

    @property
    def buffered_bytes(self) -> int:
        """About how many bytes wait in the buffer."""
        return self._bytes

    @property
    def out(self) -> int:
        """How many messages the program is working on."""
        return self._out

    def add(self, items: Iterable[I], now: float) -> list[Lease]:
        """Put what was pulled into the buffer; return what must be acknowledged again.

        A worker that has restarted delivers again what is still here: the new delivery then
        stands for the old one, and the program does not see the message twice.
        """
        again: list[Lease] = []
        with self._lock:
            for item in items:
                if len(item.leases) == 1 and (known := self._known(item.leases[0], now)):
                    new = item.leases[0]
                    known.ack_id, known.origin, known.due = new.ack_id, new.origin, new.due
                    if known.is_acked:
                        again.append(known)
                    continue
                self._buffer.append(item)
                self._bytes += item.nbytes
                self._buffered += len(item.leases)
                self._leases.update((lease.at, lease) for lease in item.leases)
        return again

    def _known(self, new: Lease, now: float) -> Lease | None:
        known = self._leases.get(new.at)
        if known is None:
            return None
        if known.stage is Stage.OUT and now - known.since >= self._held_s_max:
            # Whoever has it has had it for too long: another may try.
            self._out -= 1
            known.stage = Stage.LOST
            return None
        return known

    def take(self, count: int, now: float) -> list[I]:
        """Hand out up to `count` items; what the server has given to others meanwhile is not."""
        found: list[I] = []
        with self._lock:
            while self._buffer and len(found) < count:
                item = self._buffer.popleft()
                self._bytes -= item.nbytes
                kept = 0
                for lease in item.leases:
                    if lease.stage is not Stage.BUFFERED:
                        continue
                    self._buffered -= 1
                    if lease.due > now:
                        lease.stage = Stage.OUT
                        kept += 1
                    else:
                        self._drop(lease)
                self._out += kept
                if kept:
                    found.append(item)
        return found

    def settle(self, leases: Iterable[Lease], *, ack: bool) -> list[Lease]:
        """Note that the program is done with messages; return those that the server must be told.

        One that is settled already is not settled again. One that was lost is still told: an ack
        that comes late counts as long as nobody else has got the message.
        """
        told: list[Lease] = []
        with self._lock:
            for lease in leases:
                if lease.stage is Stage.SETTLED:
                    continue
                if lease.stage is Stage.OUT:
                    self._out -= 1
                elif lease.stage is Stage.BUFFERED:
                    self._buffered -= 1
                if not ack:
                    self._forget(lease)
                lease.is_acked = ack
                lease.stage = Stage.SETTLED
                told.append(lease)
        return told

    def told(self, leases: Iterable[Lease]) -> None:
        """Note that the server knows of acks; a later delivery is a new one."""
        with self._lock:
            for lease in leases:
                self._forget(lease)

    def due(self, now: float, margin_s: float) -> list[Lease]:
        """Return what must be extended now: it ends within `margin_s` and is not held too long."""
        with self._lock:
            return [
                lease
                for lease in self._leases.values()
                if lease.stage is not Stage.SETTLED
                and lease.due - now <= margin_s
                and now - lease.since < self._held_s_max
            ]

    def extended(self, leases: Iterable[Lease], due: float) -> None:
        """Note that the server holds them until `due`."""
        for lease in leases:
            lease.due = due

    def lost(self, leases: Iterable[Lease]) -> int:
        """Note that deliveries are over; return how many of them had been handed out.

        What is out stays known: when it is delivered here again, that is for whoever has it.
        """
        out = 0
        with self._lock:
            for lease in leases:
                if lease.stage is Stage.OUT:
                    lease.due = float("inf")
                    out += 1
                elif lease.stage is Stage.BUFFERED:
                    self._buffered -= 1
                    self._drop(lease)
        return out

    def clear(self) -> None:
        """Let go of everything in the buffer: it was given back."""
        with self._lock:
            for item in self._buffer:
                for lease in item.leases:
                    if lease.stage is Stage.BUFFERED:
                        self._drop(lease)
            self._buffer.clear()
            self._buffered = self._bytes = 0

    def _drop(self, lease: Lease) -> None:
        lease.stage = Stage.LOST
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        if self._leases.get(lease.at) is lease:
            del self._leases[lease.at]


def by_origin(leases: Iterable[Lease]) -> dict[Origin, list[Lease]]:
    """Sort deliveries by the worker that made them."""
    found: dict[Origin, list[Lease]] = {}
    for lease in leases:
        found.setdefault(lease.origin, []).append(lease)
    return found


def room(prefetch: int, waiting: int, held: "Held[I]", bytes_max: int, mean: float) -> int:
    """Return how many messages may be pulled: `prefetch`, or as many as somebody waits for."""
    free = max(prefetch, waiting) - held.buffered
    if free <= 0:
        return 0
    left = bytes_max - held.buffered_bytes
    if left <= 0:
        return 0
    return max(1, min(free, int(left / mean))) if mean > 0 else free


def chunks(leases: Sequence[Lease], size: int) -> list[Sequence[Lease]]:
    """Cut into requests of at most `size` ids."""
    return [leases[at : at + size] for at in range(0, len(leases), size)]
