"""How a subscription delivers, and the words for what happens to a delivery. Pure."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Order(Enum):
    """Which messages keep their order."""

    NONE = "none"
    KEY = "key"
    PARTITION = "partition"


class Outcome(Enum):
    """What became of an ack, nack or extend."""

    DONE = "done"
    STALE = "stale"
    """The delivery it names is over: the message went to somebody else, or back."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a subscription's spec says about deliveries."""

    order: Order = Order.NONE
    ack_deadline_s: float = 30.0
    deliveries_max: int | None = None
    """After so many a message is dead; None: it is delivered for ever."""
    backoff_initial_s: float = 1.0
    backoff_multiplier: float = 2.0
    backoff_max_s: float = 300.0

    def backoff_s(self, deliveries: int) -> float:
        """Return the wait after so many deliveries."""
        if self.backoff_initial_s <= 0:
            return 0.0
        # The power alone would overflow for a message that is delivered for ever.
        steps = min(deliveries - 1, 64)
        return min(self.backoff_initial_s * self.backoff_multiplier**steps, self.backoff_max_s)


class Leased(NamedTuple):
    """One delivery of one message."""

    offset: int
    lease: int
    delivery: int
    """1 for the first time."""
