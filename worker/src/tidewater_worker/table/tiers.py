"""When to merge small manifests into larger ones. Pure.

Each commit adds a manifest of one or a few files. Left alone, the manifest list grows by one
entry per commit and every commit rewrites it. So manifests are merged as in a log-structured
tree: ten of one tier become one of the next. A file's entry is rewritten once per tier, at most
three times, so the cost of a commit stays flat however long the history is. Larger manifests are
left to the maintenance job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FANOUT: Final = 10
"""How many manifests of one tier become one of the next."""
MERGED_FILES_MAX: Final = 1_000
"""A manifest with this many files is never merged again."""


@dataclass(frozen=True, slots=True)
class ManifestSize:
    """What the plan needs to know of a manifest."""

    files: int
    """Live data files that it names."""
    spec_id: int
    """Its partition spec: only manifests of one spec can be merged."""
    mergeable: bool
    """False for delete manifests."""


def tier_of(files: int) -> int:
    """Return 0 for fewer than 10 files, 1 for fewer than 100, and so on."""
    tier = 0
    while files >= FANOUT ** (tier + 1):
        tier += 1
    return tier


def plan_merge(manifests: Sequence[ManifestSize]) -> tuple[int, ...]:
    """Choose the positions of the manifests to merge into one; empty if there is nothing to do.

    At most one merge per commit, of the lowest tier that is full, so that no commit takes much
    longer than another.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for position, manifest in enumerate(manifests):
        if manifest.mergeable and 0 < manifest.files < MERGED_FILES_MAX:
            groups.setdefault((tier_of(manifest.files), manifest.spec_id), []).append(position)
    for _, positions in sorted(groups.items()):
        if len(positions) >= FANOUT:
            chosen: list[int] = []
            files = 0
            for position in positions[:FANOUT]:
                files += manifests[position].files
                if files > MERGED_FILES_MAX:
                    break
                chosen.append(position)
            if len(chosen) > 1:
                return tuple(chosen)
    return ()
