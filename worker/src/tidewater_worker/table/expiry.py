"""Which snapshots a commit also removes from the metadata. Pure.

Commit cost grows with the number of snapshots, so each commit removes the few that have become
too many or too old. Only metadata is touched: the files that no snapshot needs any more are
removed by the maintenance job.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

REMOVED_MAX: Final = 20
"""Most snapshots that one commit removes: a long backlog of them is worked off in small steps."""


@dataclass(frozen=True, slots=True)
class SnapshotAge:
    """What the plan needs to know of a snapshot."""

    snapshot_id: int
    timestamp_ms: int
    sequence_number: int


def plan_expiry(
    snapshots: Iterable[SnapshotAge],
    *,
    keep: frozenset[int],
    count_max: int,
    age_ms_max: int,
    now_ms: int,
    removed_max: int = REMOVED_MAX,
    held_from: int | None = None,
) -> list[int]:
    """Choose the snapshots to remove, oldest first.

    `keep` are the ones that a branch or tag names or a live reader pins, and the one that the new
    snapshot is built on; they do not count against `count_max`. The snapshot being committed is
    not among `snapshots` and takes one place. From the sequence number `held_from` on all stay: an
    upkeep job is at work on what they led to.
    """
    newest_first = sorted(
        (s for s in snapshots if s.snapshot_id not in keep),
        key=lambda s: (s.sequence_number, s.timestamp_ms),
        reverse=True,
    )
    places = max(0, count_max - 2)
    remove = [
        s.snapshot_id
        for place, s in enumerate(newest_first)
        if (place >= places or s.timestamp_ms < now_ms - age_ms_max)
        and (held_from is None or s.sequence_number < held_from)
    ]
    return remove[::-1][:removed_max]
