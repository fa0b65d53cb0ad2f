"""What Topics said of their tables when they were last seen. Pure.

A spec that nobody could register (etcd was away, the object went a moment later) still counts for
one thing: a table that was to stay does. Losing this memory costs the word of such a Topic.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from tidewater_core.crd.topic import DeletionPolicy

WORDS_MAX: Final = 10_000
"""Topics of a namespace that are remembered, the last ones: who does not lead forgets none."""


def wants_table(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a Topic's table is to outlive it; asked of specs that cannot be read, too."""
    policy = (manifest.get("spec") or {}).get("deletionPolicy", DeletionPolicy.RETAIN)
    return str(policy) != DeletionPolicy.DELETE


class LastWords:
    """The word of each Topic of a namespace, by its uid."""

    def __init__(self) -> None:
        self._wants: dict[str, bool] = {}
        self._gone: set[str] = set()
        """Those that went with their word: a listing that is older changes nothing."""

    def hear(self, manifest: Mapping[str, Any], *, gone: bool) -> None:
        """Note what a watch told."""
        uid = str(manifest["metadata"]["uid"])
        if gone or uid not in self._gone:
            self._wants.pop(uid, None)
            self._wants[uid] = wants_table(manifest)
        if gone:
            self._gone.add(uid)
        while len(self._wants) > WORDS_MAX:
            first = next(iter(self._wants))
            del self._wants[first]
            self._gone.discard(first)

    def see(self, manifests: Iterable[Mapping[str, Any]]) -> None:
        """Note what a listing shows."""
        for manifest in manifests:
            self.hear(manifest, gone=False)

    def keep(self, uids: Collection[str]) -> None:
        """Forget all others: they are neither there nor registered."""
        self._wants = {uid: wants for uid, wants in self._wants.items() if uid in uids}
        self._gone &= self._wants.keys()

    @property
    def retained(self) -> frozenset[str]:
        """Who said that the table is to stay."""
        return frozenset(uid for uid, wants in self._wants.items() if wants)
