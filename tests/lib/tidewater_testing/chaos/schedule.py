"""What happens to the workers and when. Pure: the same seed makes the same story."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PAUSE_S: Final = (0.8, 4.0)
"""Between two events."""
FREEZE_S: Final = (0.3, 5.0)
DOWN_S: Final = (0.2, 3.0)
STORE_S: Final = (3.5, 8.0)
BESIDE: Final = ("store-away", "rewrite")
"""What happens to no worker."""
HARD_SHARE: Final = 0.25
"""So many events happen also to a worker that has yet to come back from the one before."""


class Kind(StrEnum):
    """What can happen."""

    KILL_EDGE = "kill-edge"
    KILL_TABLE = "kill-table"
    KILL_WORKER = "kill-worker"
    """All of its processes, and it stays away for a while."""
    FREEZE_EDGE = "freeze-edge"
    FREEZE_TABLE = "freeze-table"
    MOVE = "move"
    """A partition is assigned to another worker."""
    STORE_AWAY = "store-away"
    """Nobody reaches the coordination store for longer than a session lasts."""
    REWRITE = "rewrite"
    """Somebody else rewrites the table, expires snapshots and deletes files."""


WEIGHTS: Final = {
    Kind.KILL_EDGE: 5, Kind.KILL_TABLE: 2, Kind.KILL_WORKER: 2, Kind.FREEZE_EDGE: 4,
    Kind.FREEZE_TABLE: 1, Kind.MOVE: 6, Kind.STORE_AWAY: 1, Kind.REWRITE: 3,
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that happens to a worker."""

    at_s: float
    kind: Kind
    worker: str
    """To whom; for a move, who gets the partition."""
    partition: int = 0
    lasts_s: float = 0.0
    is_hard: bool = False
    """It happens also to a worker that does not answer."""

    def __str__(self) -> str:
        """Tell it in a line."""
        what = f" partition {self.partition}" if self.kind is Kind.MOVE else ""
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        whom = "" if self.kind in BESIDE else f" → {self.worker}"
        return f"{self.at_s:7.1f} s  {self.kind}{what}{whom}{lasts}"


def plan(seed: int, seconds: float, workers: Sequence[str], partitions: int) -> list[Event]:
    """Draw what happens in so many seconds."""
    draw = random.Random(f"chaos/{seed}")
    events: list[Event] = []
    at = draw.uniform(*PAUSE_S)
    while at < seconds:
        kind = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        worker = draw.choice(list(workers))
        partition = draw.randrange(partitions)
        lasts = 0.0
        if kind in (Kind.FREEZE_EDGE, Kind.FREEZE_TABLE):
            lasts = draw.uniform(*FREEZE_S)
        elif kind is Kind.KILL_WORKER:
            lasts = draw.uniform(*DOWN_S)
        elif kind is Kind.STORE_AWAY:
            lasts = draw.uniform(*STORE_S)
        moved = partition if kind is Kind.MOVE else 0
        events.append(Event(at, kind, worker, moved, lasts, draw.random() < HARD_SHARE))
        at += draw.uniform(*PAUSE_S)
    return events
