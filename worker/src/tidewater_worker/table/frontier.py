"""The frontier of each partition in the table, and what it allows. Pure.

    tidewater.partition.<p> = {"next": N, "epoch": E}

`next` is the offset of the first message that is not in the table; `epoch` is the ownership epoch
of the last writer. Both move only together with a new snapshot of `main`, so a commit that requires
the snapshot it was built on also requires the frontier it was decided on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tidewater_core.progress import Frontier as Frontier
from tidewater_core.progress import gap_value as gap_value
from tidewater_core.progress import parse_frontiers as parse_frontiers
from tidewater_core.progress import parse_gaps as parse_gaps
from tidewater_core.progress import parse_starts as parse_starts

UNWRITTEN: Final = Frontier()
"""A partition that no owner has written yet."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What this process holds of a partition."""

    epoch: int
    """Our ownership epoch."""
    committed: int | None
    """The frontier as we last saw or committed it; None before the first load."""
    gap_end: int = 0
    """A frontier below this is raised to it: what lies between was lost with a volume."""


@dataclass(frozen=True, slots=True)
class Span:
    """The offsets [first, end) of a partition in one batch."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Go:
    """The table stands exactly where the batch begins and the epoch is ours: commit."""


@dataclass(frozen=True, slots=True)
class Landed:
    """The whole batch is in the table already: an earlier attempt got through."""


@dataclass(frozen=True, slots=True)
class EpochFirst:
    """The table still carries lower epochs: commit ours before any row."""

    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fenced:
    """Other owners have these partitions: stop them."""

    partitions: dict[int, int]
    """Partition to the epoch found in the table."""


@dataclass(frozen=True, slots=True)
class MovedBack:
    """The catalog no longer knows commits that it acknowledged."""

    partitions: dict[int, tuple[int, int]]
    """Partition to (the frontier we knew, the frontier found)."""


@dataclass(frozen=True, slots=True)
class Recut:
    """Some rows of the batch are in the table: drop them and cut the batch anew from here."""

    partitions: dict[int, int]
    """Partition to the frontier found."""


Verdict = Go | Landed | EpochFirst | Fenced | MovedBack | Recut


def decide(
    found: Mapping[int, Frontier], claims: Mapping[int, Claim], batch: Mapping[int, Span]
) -> Verdict:
    """Say what may be done with a batch on the table just loaded.

    The order of the checks is the order of what may not be got wrong: being fenced ends
    everything; a frontier that moved back must be said before it is overwritten; rows that are
    in the table are never sent again; only then may epochs and rows be written.
    """
    table = {p: found.get(p, UNWRITTEN) for p in claims}
    fenced = {p: table[p].epoch for p, claim in claims.items() if table[p].epoch > claim.epoch}
    if fenced:
        return Fenced(fenced)
    back = {
        p: (claim.committed, table[p].next)
        for p, claim in claims.items()
        if claim.committed is not None and table[p].next < claim.committed
    }
    if back:
        return MovedBack(back)
    if batch and all(table[p].next >= span.end for p, span in batch.items()):
        return Landed()
    ahead = {p: table[p].next for p, span in batch.items() if table[p].next != span.first}
    if ahead:
        return Recut(ahead)
    low = tuple(
        sorted(
            p
            for p, claim in claims.items()
            if table[p].epoch < claim.epoch or table[p].next < claim.gap_end
        )
    )
    return EpochFirst(low) if low else Go()
