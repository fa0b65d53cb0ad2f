"""The memory tail: the newest frames of a partition, for readers that follow it live.

Each tail has its own bound (`log.tailCache`), and all of a worker have one together: hundreds of
partitions, each within its own, would else take more than the worker has. Where there is no more
room the oldest frame of all goes, whosever it is: readers find it in the log.
"""

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

import pyarrow as pa

from tidewater_worker.log.group import EncodedFrame
from tidewater_worker.log.reader import LogBatch

COMPACT_AFTER: Final = 1024
_UNBOUNDED: Final = 1 << 62


class TailRoom:
    """Memory that the tails of a worker share. For one thread, the event loop's."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        self._oldest: list[tuple[int, int, Tail]] = []
        """A heap: when the oldest frame of each tail came, or one that it has dropped since."""
        self._order = count()

    def enter(self, tail: "Tail") -> None:
        """Take in a tail that is no longer empty."""
        heappush(self._oldest, (tail.oldest_us, next(self._order), tail))

    def leave(self, tail: "Tail") -> None:
        """Forget a tail."""
        self._oldest = [entry for entry in self._oldest if entry[2] is not tail]
        heapify(self._oldest)

    def make(self) -> None:
        """Let the oldest frames go until the rest fits."""
        while self.nbytes > self.bytes_max:
            at, _, tail = heappop(self._oldest)
            if tail.nbytes and tail.oldest_us <= at:
                tail.drop_oldest()
            if tail.nbytes:
                self.enter(tail)
            else:
                tail.is_in_room = False


class Tail:
    """Acknowledged frames in memory, newest last, at most `bytes_max` of them."""

    def __init__(self, start: int, bytes_max: int, room: TailRoom | None = None) -> None:
        self._bytes_max = bytes_max
        self._room = room or TailRoom(_UNBOUNDED)
        self.is_in_room = False
        self._bases: list[int] = []
        self._frames: list[EncodedFrame] = []
        self._head = 0
        self.nbytes = 0
        self.start = start
        """First offset in memory; below it a reader goes to the segments."""
        self.end = start

    def append(self, frames: list[EncodedFrame]) -> None:
        """Add frames that are acknowledged, drop the oldest past the bound."""
        for frame in frames:
            assert frame.base_offset == self.end, "the tail is contiguous"
            self._bases.append(frame.base_offset)
            self._frames.append(frame)
            self.nbytes += frame.nbytes
            self._room.nbytes += frame.nbytes
            self.end += frame.rows
        self._shrink()
        if self.nbytes and not self.is_in_room:
            self.is_in_room = True
            self._room.enter(self)
        self._room.make()

    def change(self, bytes_max: int) -> None:
        """Take another bound, at once."""
        self._bytes_max = bytes_max
        self._shrink()

    def anew(self, start: int) -> "Tail":
        """Return an empty one in its place."""
        bytes_max = self._bytes_max
        self.close()
        return Tail(start, bytes_max, self._room)

    def close(self) -> None:
        """Give back all memory."""
        self.change(0)
        self._room.leave(self)
        self.is_in_room = False

    @property
    def oldest_us(self) -> int:
        """Return when the oldest frame in memory came; there is one."""
        return self._frames[self._head].time_us

    def drop_oldest(self) -> None:
        """Let the oldest frame go; there is one."""
        dropped = self._frames[self._head]
        self._frames[self._head] = _DROPPED  # the list itself is cut in larger steps
        self._head += 1
        self.nbytes -= dropped.nbytes
        self._room.nbytes -= dropped.nbytes
        self.start = dropped.base_offset + dropped.rows
        if self._head >= COMPACT_AFTER:
            del self._bases[: self._head], self._frames[: self._head]
            self._head = 0

    def _shrink(self) -> None:
        while self.nbytes > self._bytes_max:
            self.drop_oldest()

    def read(self, offset: int, end: int, max_bytes: int) -> list[LogBatch]:
        """Return frames from the one that holds `offset`; empty if it is not in memory."""
        if not self.start <= offset < min(end, self.end):
            return []
        i = bisect_right(self._bases, offset, lo=self._head) - 1
        found: list[LogBatch] = []
        while i < len(self._frames) and max_bytes > 0 and self._bases[i] < end:
            frame = self._frames[i]
            body = frame.body()
            batch = pa.ipc.read_record_batch(body, frame.schema)
            found.append(LogBatch(frame.base_offset, frame.rows, batch, body.size))
            max_bytes -= body.size
            i += 1
        return found

    def offset_at(self, time_us: int) -> int | None:
        """Return the first offset in memory not before `time_us`; None: look elsewhere."""
        frames = self._frames[self._head :]
        if not frames or frames[0].time_us >= time_us:
            return None
        # All rows of a frame share its time, so frames are enough.
        i = bisect_right(frames, time_us - 1, key=lambda frame: frame.time_us)
        return frames[i].base_offset if i < len(frames) else self.end


_DROPPED: Final = EncodedFrame(-1, 0, b"", [], pa.schema([]), 0, 0)
