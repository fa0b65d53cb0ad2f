"""Recent latencies of a partition's log: what its sync mode costs here, for stats and status."""

from collections import deque
from typing import Final

SAMPLES: Final = 1024


class Latencies:
    """The last groups' write-and-sync times."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=SAMPLES)

    def add(self, seconds: float) -> None:
        """Note one group."""
        self._seconds.append(seconds)

    def quantiles_ms(self) -> dict[str, float]:
        """Return p50 and p99; empty before the first group."""
        if not self._seconds:
            return {}
        ordered = sorted(self._seconds)
        return {
            name: round(ordered[min(int(len(ordered) * q), len(ordered) - 1)] * 1000, 3)
            for name, q in (("p50", 0.50), ("p99", 0.99))
        }
