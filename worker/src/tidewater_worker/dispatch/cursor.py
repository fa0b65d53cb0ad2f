"""What a subscription has acknowledged of one partition. Pure.

Everything below `next` is acknowledged, and the ranges beyond it. Ranges are sorted, not empty,
do not touch each other and begin past `next`: there is one way to write each set of offsets.

    stored := {"v":1, "next":n, "beyond":[gap, run, gap, run …], "failed":[gap, times, …], …}

`gap` counts the offsets that are open before a run of `run` acknowledged ones: small numbers,
however large the offsets are. `failed` says how often deliveries of open messages have failed,
each `gap` offsets after the one before it. The other fields say what the progress belongs to.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from tidewater_core.errors import Corrupt

RANGES_MAX: Final = 50_000
"""Acknowledged ranges beyond the contiguous offset; past it only gaps can be filled. Written down,
so many take 1.3 MB at most for offsets below 2^53 (two numbers each, of 12 digits on average), and
about 0.2 MB as a rule: etcd takes 1.5 MiB."""
FAILURES_MAX: Final = 1_000
"""Messages of a partition whose failed deliveries are stored."""


class Cursor:
    """A set of acknowledged offsets."""

    __slots__ = ("_ends", "_starts", "next")

    def __init__(self, next_offset: int = 0) -> None:
        self.next = next_offset
        """Every offset below this is acknowledged."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The acknowledged ranges past `next`, ends exclusive."""
        return list(zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        """Count the ranges past `next`."""
        return len(self._starts)

    def __contains__(self, offset: int) -> bool:
        """Tell whether an offset is acknowledged."""
        if offset < self.next:
            return True
        i = bisect_right(self._starts, offset) - 1
        return i >= 0 and offset < self._ends[i]

    def touches(self, offset: int) -> bool:
        """Tell whether acknowledging an offset makes no further range."""
        return offset in self or offset - 1 in self or offset + 1 in self

    def add(self, start: int, end: int) -> bool:
        """Acknowledge [start, end); tell whether that is news."""
        start = max(start, self.next)
        if start >= end:
            return False
        # All ranges that overlap or touch [start, end) become one.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            if self._starts[first] <= start and end <= self._ends[first]:
                return False
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        if start == self.next:
            self.next = end
            del self._starts[first:last], self._ends[first:last]
        else:
            self._starts[first:last] = [start]
            self._ends[first:last] = [end]
        return True

    def remove(self, offset: int) -> bool:
        """Take one acknowledgement back; tell whether there was one."""
        if offset not in self:
            return False
        if offset < self.next:
            if offset + 1 < self.next:
                self._starts.insert(0, offset + 1)
                self._ends.insert(0, self.next)
            self.next = offset
            return True
        i = bisect_right(self._starts, offset) - 1
        start, end = self._starts[i], self._ends[i]
        left = [(start, offset)] if start < offset else []
        right = [(offset + 1, end)] if offset + 1 < end else []
        pieces = left + right
        self._starts[i : i + 1] = [piece[0] for piece in pieces]
        self._ends[i : i + 1] = [piece[1] for piece in pieces]
        return True

    def acknowledged_from(self, offset: int) -> int:
        """Return the first offset at or past `offset` that is not acknowledged."""
        offset = max(offset, self.next)
        i = bisect_right(self._starts, offset) - 1
        return self._ends[i] if i >= 0 and offset < self._ends[i] else offset

    def open_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield what is not acknowledged of [start, end), as ranges."""
        start = max(start, self.next)
        i = bisect_right(self._ends, start)
        while start < end:
            if i >= len(self._starts) or self._starts[i] >= end:
                yield start, end
                return
            if start < self._starts[i]:
                yield start, self._starts[i]
            start = self._ends[i]
            i += 1

    def count_open(self, end: int) -> int:
        """Count the offsets below `end` that are not acknowledged."""
        beyond = sum(
            min(stop, end) - start
            for start, stop in zip(self._starts, self._ends, strict=True)
            if start < end
        )
        return max(end - self.next, 0) - beyond

    @property
    def end(self) -> int:
        """The offset after the last one that is acknowledged."""
        return self._ends[-1] if self._ends else self.next

    def copy(self) -> "Cursor":
        """Return one that changes on its own."""
        twin = Cursor(self.next)
        twin._starts, twin._ends = list(self._starts), list(self._ends)
        return twin

    def below(self, end: int) -> "Cursor":
        """Return what is acknowledged below an offset; this one itself if that is all of it."""
        if self.end <= end:
            return self
        twin = Cursor(min(self.next, end))
        kept = bisect_left(self._starts, end)
        twin._starts = self._starts[:kept]
        twin._ends = [min(stop, end) for stop in self._ends[:kept]]
        return twin


class Begun(NamedTuple):
    """How progress began, kept with it (see `Progress`)."""

    reset_token: str | None = None
    reset_version: int = 0
    partitions: int | None = None
    table: str = ""


class Progress(msgspec.Struct, frozen=True):
    """A cursor and what it belongs to, as it is stored."""

    subscription: str
    """Identity of the subscription; a re-created one begins anew."""
    topic: str
    """Identity of the topic; a re-created one may have other messages at the same offsets."""
    next: int
    beyond: list[int] = []
    """gap, run, gap, run, … past `next`."""
    generation: int = 0
    """Counts seeks: what was delivered before one cannot be acknowledged after it."""
    reset_token: str | None = None
    """The resetToken that was acted on last."""
    snapshot: int | None = None
    """The table's snapshot when this was stored: a hint for people, never used to read."""
    reset_version: int = 0
    """The registry's version in which that token (or none) was seen: an owner whose view of the
    registry is older does not act on the token that it sees."""
    partitions: int | None = None
    """How many partitions the topic had when this began; of those that came later nothing was
    there before the subscription."""
    table: str = ""
    """Identity of the topic's table. Offsets go on with a table that was kept: a topic that is made
    again on it has the same messages below the offset that it begins at."""
    failed: list[int] = []
    """gap, times, gap, times, … from `next` on: failed deliveries of messages that are open."""
    v: int = 1

    @property
    def begun(self) -> Begun:
        """How it began."""
        return Begun(self.reset_token, self.reset_version, self.partitions, self.table)

    def is_of(self, subscription: str, topic: str, table: str) -> bool:
        """Tell whether it is a subscription's, and counts in a topic that has this table."""
        if self.subscription != subscription:
            return False
        return self.topic == topic or (bool(table) and self.table == table)


def encode_ranges(cursor: Cursor) -> list[int]:
    """Write the ranges past `next` as gaps and runs."""
    numbers: list[int] = []
    at = cursor.next
    for start, end in cursor.ranges:
        numbers += (start - at, end - start)
        at = end
    return numbers


def decode_ranges(next_offset: int, numbers: list[int]) -> Cursor:
    """Read what `encode_ranges` wrote."""
    if len(numbers) % 2 or any(number < 1 for number in numbers) or next_offset < 0:
        raise Corrupt("CursorCorrupt", f"a stored cursor at {next_offset} has impossible ranges")
    cursor = Cursor(next_offset)
    at = next_offset
    for i in range(0, len(numbers), 2):
        start = at + numbers[i]
        at = start + numbers[i + 1]
        cursor._starts.append(start)
        cursor._ends.append(at)
    return cursor


def encode_failures(next_offset: int, failures: Mapping[int, int]) -> list[int]:
    """Write how often deliveries failed, by offset; past the bound those that failed least go."""
    kept = list(failures.items())
    if len(kept) > FAILURES_MAX:
        kept = sorted(kept, key=lambda item: (-item[1], item[0]))[:FAILURES_MAX]
    numbers: list[int] = []
    at = next_offset
    for offset, times in sorted(kept):
        numbers += (offset - at, times)
        at = offset
    return numbers


def decode_failures(next_offset: int, numbers: list[int]) -> dict[int, int]:
    """Read what `encode_failures` wrote."""
    gaps, times = numbers[::2], numbers[1::2]
    if len(gaps) != len(times) or min(gaps, default=0) < 0 or min(times, default=1) < 1:
        raise Corrupt("CursorCorrupt", f"a stored cursor at {next_offset} has impossible counts")
    offsets = list(accumulate(gaps, initial=next_offset))[1:]
    return dict(zip(offsets, times, strict=True))


def decode_progress(data: bytes) -> Progress:
    """Read a stored cursor; one that cannot be read stops its partition (G7)."""
    try:
        progress = msgspec.json.decode(data, type=Progress)
    except msgspec.DecodeError as error:
        raise Corrupt("CursorCorrupt", f"a stored cursor cannot be read: {error}") from error
    if progress.v != 1:
        raise Corrupt("CursorVersion", f"a stored cursor has version {progress.v}; known is 1")
    return progress
