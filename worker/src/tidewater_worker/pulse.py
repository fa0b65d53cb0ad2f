"""How fast a partition is, and how fresh its table: kept in passing, at no cost while it is idle.

The log says (up to twenty times a second, and only if something came) how far it is, the table
process how far the table is. From both: messages and bytes per second over the last ten seconds,
the age of the oldest message that the table does not have, and how long messages took lately.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidewater_worker.log.appender import Appender

WINDOW_S: Final = 10.0
SAMPLE_S: Final = 1.0
MARK_S: Final = 0.25
"""Messages this close to each other count as one age."""
MARKS_MAX: Final = 256
"""Past it ages become coarser: the table is far behind then."""


class Pulse:
    """What is measured of one partition. Times are `Clock.monotonic`'s."""

    __slots__ = (
        "_bytes", "_end", "_found", "_lately", "_marks", "_messages", "_samples", "_segment",
        "quantiles_ms", "touched",
    )  # fmt: skip

    def __init__(self) -> None:
        self.touched = False
        """Something came since the quantiles were last computed."""
        self.quantiles_ms: dict[str, float] = {}
        self._end = 0
        self._found: tuple[int, float] | None = None
        """The mark of what was in the log at the start, until the table says what it has of it."""
        self._segment = (-1, 0)
        """The last segment's first offset, and its bytes."""
        self._messages = self._bytes = 0
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=int(WINDOW_S / SAMPLE_S) + 1)
        self._marks: deque[tuple[int, float]] = deque()
        """(end, since): messages below `end`, the first of which came at `since`."""
        self._lately: deque[tuple[float, float]] = deque(maxlen=int(WINDOW_S / SAMPLE_S) + 1)
        """(when, longest time that a message took to the table)."""

    def begin(self, appender: "Appender", now: float, age_s: float) -> None:
        """Start with a log as it was found; its last message is `age_s` old."""
        self._end = appender.durable_end
        self._segment = _last(appender)
        self._marks.clear()
        self._found = (self._end, now - max(age_s, 0.0)) if appender.segments else None

    @property
    def is_known(self) -> bool:
        """Tell whether the table has said how far it is; until then ages are of new messages."""
        return self._found is None

    def durable(self, appender: "Appender", end: int, now: float) -> None:
        """Note how far the log is."""
        base, size = _last(appender)
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, self._messages, self._bytes))
        if end > self._end:
            self._messages += end - self._end
            self._bytes += size - self._segment[1] if base == self._segment[0] else size
            self._mark(end, now)
        self._end, self._segment, self.touched = end, (base, size), True

    def _mark(self, end: int, now: float) -> None:
        marks = self._marks
        if marks and (now - marks[-1][1] < MARK_S or len(marks) >= MARKS_MAX):
            marks[-1] = (end, marks[-1][1])
        else:
            marks.append((end, now))

    def committed(self, frontier: int, now: float) -> None:
        """Note how far the table is."""
        found, self._found = self._found, None
        if found is not None and found[0] > frontier:
            self._marks.appendleft(found)  # the rest came into the table before it was asked
        longest = 0.0
        while self._marks and self._marks[0][0] <= frontier:
            longest = max(longest, now - self._marks.popleft()[1])
        if longest:
            if self._lately and now - self._lately[-1][0] < SAMPLE_S:
                at, known = self._lately[-1]
                self._lately[-1] = (at, max(known, longest))
            else:
                self._lately.append((now, longest))

    def oldest_s(self, now: float) -> float:
        """Return the age of the oldest message that is not in the table; 0 if all are."""
        return now - self._marks[0][1] if self._marks else 0.0

    def freshness_s(self, now: float) -> float:
        """Return how far the table was behind at worst, over the last ten seconds."""
        lately = (took for at, took in self._lately if now - at <= WINDOW_S)
        return max(self.oldest_s(now), max(lately, default=0.0))

    def rates(self, now: float) -> tuple[float, float]:
        """Return messages and bytes per second over the last ten seconds."""
        for at, messages, nbytes in self._samples:
            if now - at <= WINDOW_S + SAMPLE_S:
                past_s = max(now - at, SAMPLE_S)
                return (self._messages - messages) / past_s, (self._bytes - nbytes) / past_s
        return 0.0, 0.0


def _last(appender: "Appender") -> tuple[int, int]:
    if not appender.segments:
        return -1, 0
    last = appender.segments[-1]
    return last.base_offset, last.index.size
