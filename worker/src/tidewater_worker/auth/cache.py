"""What is remembered for a while: bounded, and never a moment past its time. Pure."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values that run out; past `entries_max` the oldest are forgotten."""

    def __init__(self, entries_max: int) -> None:
        self._max = entries_max
        self._entries: dict[K, tuple[float, V]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, now: float) -> V | None:
        """Return what is remembered at `now`."""
        entry = self._entries.get(key)
        return entry[1] if entry is not None and now < entry[0] else None

    def put(self, key: K, value: V, until: float) -> None:
        """Remember a value; what is remembered under the key already goes."""
        self._entries.pop(key, None)
        self._entries[key] = (until, value)
        if len(self._entries) > self._max:
            del self._entries[next(iter(self._entries))]

    def drop(self, key: K) -> None:
        """Forget a value."""
        self._entries.pop(key, None)


class Quota:
    """So many a second, and a number at once; counts what it refuses. For lines in the log."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._rate, self._burst = per_second, float(burst)
        self._left, self._at = float(burst), 0.0
        self.refused = 0
        """Since the last one that was let through."""

    def take(self, now: float) -> int | None:
        """Return how many were refused before this one, or None: this one is, too."""
        self._left = min(self._left + (now - self._at) * self._rate, self._burst)
        self._at = now
        if self._left < 1:
            self.refused += 1
            return None
        self._left -= 1
        refused, self.refused = self.refused, 0
        return refused
