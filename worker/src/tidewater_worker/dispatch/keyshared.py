"""Which consumer a key or a partition belongs to. Pure.

Keys lie on a ring of consumers (consistent hashing): when one comes or goes, only the keys between
it and its neighbours move. Whose turn it is says nothing about who still holds messages: the order
of a key across a change of members is `delivery`'s work.
"""

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

POINTS: Final = 64
"""Points of each consumer on the ring: shares differ by some 15 %."""


@lru_cache(maxsize=4096)
def _points(consumer: str) -> tuple[int, ...]:
    """Spread a consumer over the ring; the same on every worker."""
    data = consumer.encode("utf-8", "surrogatepass")
    points: list[int] = []
    for block in range(POINTS * 4 // 64):
        digest = blake2b(data, digest_size=64, salt=block.to_bytes(16, "big")).digest()
        points += (int.from_bytes(digest[i : i + 4], "big") for i in range(0, 64, 4))
    return tuple(points)


def key_hash(key: bytes) -> int:
    """Return a key's place on the ring. Keys that share one keep their common order."""
    # CRC-32 alone is linear: similar keys of one length would lie in patterns.
    return (zlib.crc32(key) * 0x9E3779B1) & 0xFFFFFFFF


class Ring:
    """Consumers and the keys that belong to each."""

    def __init__(self, consumers: Sequence[str]) -> None:
        placed = sorted((point, name) for name in set(consumers) for point in _points(name))
        self._points = [point for point, _ in placed]
        self._names = [name for _, name in placed]

    def owner(self, place: int) -> str | None:
        """Return whose a place on the ring is; None without consumers."""
        if not self._points:
            return None
        return self._names[bisect_right(self._points, place) % len(self._points)]


def partition_owner(partition: int, consumers: Sequence[str]) -> str | None:
    """Return whose turn a partition is (Failover): they are dealt out over all consumers.

    A function of the names alone, so that every worker of a topic deals in the same way.
    """
    ordered = sorted(consumers)
    return ordered[partition % len(ordered)] if ordered else None
