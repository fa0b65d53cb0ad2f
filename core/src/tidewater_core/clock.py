"""Time, randomness and identifiers as inputs: the only file that may use the real ones.

Everything else takes a `Clock` and an `IdSource`, so that a test can decide what time it is and
replay a run exactly. The linter rejects the real clock and RNG elsewhere.
"""

import random
import secrets
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    """What time it is."""

    def now_us(self) -> int:
        """Return wall clock time: microseconds since 1970-01-01 UTC. It may jump."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; never goes back. For waits and ages."""


class IdSource(Protocol):
    """Where identifiers and chance come from."""

    def uuid(self) -> uuid.UUID:
        """Return a new random identifier."""

    def snapshot_id(self) -> int:
        """Return a new Iceberg snapshot id: positive, fits 63 bits."""

    def jitter(self) -> float:
        """Return a number in [0, 1) that spreads out retries."""


class SystemClock:
    """The machine's clock."""

    def now_us(self) -> int:
        """Return wall clock time in microseconds."""
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        """Return the monotonic clock in seconds."""
        return time.monotonic()


class SystemIds:
    """The machine's randomness."""

    def uuid(self) -> uuid.UUID:
        """Return a random UUID."""
        return uuid.uuid4()

    def snapshot_id(self) -> int:
        """Return a random positive 63-bit number."""
        return secrets.randbelow((1 << 63) - 1) + 1

    def jitter(self) -> float:
        """Return a random number in [0, 1); nobody's safety depends on it."""
        return random.random()  # noqa: S311
