"""What a worker does about a partition, from what the registry says. Pure, and level-based.

nobody ever had it          the assigned worker takes it; unassigned: who comes first, or nobody
on this volume              this worker takes it, wherever it is assigned: its messages are here
… assigned elsewhere        … and drains it, if the other one is there to take it
drained                     the assigned worker takes it
given up by a person        the assigned worker takes it, behind a recorded gap
on another volume           nothing: it waits for that volume (G5)
its topic is being deleted  its worker drains it; nobody takes it
"""

from collections.abc import Container
from enum import StrEnum
from typing import Final

from tidewater_coordination.port import Ownership, WorkerInfo
from tidewater_coordination.rules import is_of

GAP_OFFSETS: Final = 10_000_000_000
"""More messages than a log can hold that waits for its table (100 GiB of the smallest)."""


def next_after_gap(frontier: int) -> int:
    """Return where a partition goes on whose messages from the frontier on are lost.

    A round number, so that people see it.
    """
    return (frontier // GAP_OFFSETS + 2) * GAP_OFFSETS


class Action(StrEnum):
    """What to do."""

    OPEN = "open"
    """Take it."""
    KEEP = "keep"
    """Go on serving it."""
    DRAIN = "drain"
    """Bring all of it into the table and let it go."""
    LEAVE = "leave"
    """It is not ours; close it if it is open."""


def decide(
    me: WorkerInfo,
    assigned: str | None,
    owner: Ownership | None,
    live: Container[str],
    *,
    holds: bool,
    assigned_only: bool = False,
    deleting: bool = False,
) -> Action:
    """Say what `me` does about a partition.

    `holds`: its log is open here. `assigned_only`: nobody takes what nobody was assigned.
    `deleting`: its topic is on its way out.
    """
    is_here = owner is not None and is_of(owner, me) and owner.drained_at is None
    if deleting:
        if not is_here:
            return Action.LEAVE
        return Action.DRAIN if holds else Action.OPEN  # opened so that it can be drained
    wanted = assigned == me.worker_id or (assigned is None and not assigned_only)
    if holds:
        if not is_here:
            return Action.LEAVE
        stays = assigned in (None, me.worker_id) or assigned not in live
        return Action.KEEP if stays else Action.DRAIN
    if is_here:
        return Action.OPEN
    if not wanted:
        return Action.LEAVE
    if owner is None or owner.drained_at is not None:
        return Action.OPEN
    abandoned = owner.given_up is not None and not owner.is_live and assigned is not None
    return Action.OPEN if abandoned else Action.LEAVE
