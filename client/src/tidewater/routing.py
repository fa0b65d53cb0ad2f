"""Which worker to ask: the owner of a partition if it is known and can be reached, else the given.

Any worker answers any request, so a wrong guess costs a step and never a mistake: a key is put
into its partition by the worker, whatever the client thought. Decisions only; the caller connects.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidewater.errors import Invalid, NotFound, TidewaterError
from tidewater.origin import Origin
from tidewater_core.clock import Clock, SystemClock

REFRESH_S: Final = 60.0
"""Owners are asked for again after this long: partitions move rarely."""
ASK_AGAIN_S: Final = 1.0
"""After a refusal owners are asked for at most this often."""
AVOID_S: Final = 60.0
"""An owner that could not be reached is not tried for this long."""
CONNECT_S: Final = 1.0
"""How long an owner's address may take to answer: from outside the cluster it never will."""


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners' addresses by partition; empty where nobody has it, or nobody says."""

    urls: tuple[str, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Owners":
        """Read a topic's description."""
        found = sorted(metadata.get("partitions", ()), key=lambda part: int(part["partition"]))
        return cls(tuple(str(part.get("url") or "") for part in found))

    def partition_of(self, key: bytes) -> int | None:
        """Return the partition of a key."""
        return zlib.crc32(key) % len(self.urls) if self.urls else None


class Routes:
    """Where the partitions of one topic are, as far as this client knows and can reach."""

    def __init__(self, base: Origin, *, direct: bool = True, clock: Clock | None = None) -> None:
        """Begin with the server that was given."""
        self.base = base
        self._direct = direct
        self._clock = clock or SystemClock()
        self._owners = Owners(())
        self._ask_at = 0.0 if direct else float("inf")
        self._asked_at = float("-inf")
        self._avoided: dict[Origin, float] = {}

    @property
    def partitions(self) -> int:
        """How many partitions the topic has; 0: not known."""
        return len(self._owners.urls)

    @property
    def should_ask(self) -> bool:
        """Tell whether it is time to ask who owns what."""
        return self._clock.monotonic() >= self._ask_at

    def asked(
        self, metadata: Mapping[str, Any] | None, error: TidewaterError | None = None
    ) -> None:
        """Note a topic's description; None: it could not be had, for this reason."""
        now = self._clock.monotonic()
        self._asked_at = now
        # One who may not know is not told a second later either.
        soon = metadata is None and not isinstance(error, Invalid)
        self._ask_at = now + (ASK_AGAIN_S if soon else REFRESH_S)
        if metadata is not None:
            self._owners = Owners.of(metadata)

    def refused(self) -> None:
        """Note that an owner did not do what it was asked: it may be one no more."""
        if self._direct:
            self._ask_at = min(self._ask_at, self._asked_at + ASK_AGAIN_S)

    def failed(self, origin: Origin, error: TidewaterError) -> bool:
        """Note an error; tell whether to go another way at once."""
        self.refused()
        if origin == self.base or not (
            error.reason == "Unreachable" or isinstance(error, NotFound)
        ):
            return False
        self._avoided[origin] = self._clock.monotonic() + AVOID_S
        return True

    def partition_of(self, key: bytes) -> int | None:
        """Return the partition of a key; None while that makes no difference."""
        return self._owners.partition_of(key)

    def origin_of(self, partition: int | None) -> Origin:
        """Return whom to ask about a partition."""
        if partition is None or not 0 <= partition < len(self._owners.urls):
            return self.base
        return self._reachable(self._owners.urls[partition])

    def besides(self, partition: int | None) -> set[int]:
        """Return the partitions that have an owner, and another one than this partition."""
        urls = self._owners.urls
        gone = urls[partition] if partition is not None and partition < len(urls) else ""
        return {n for n, url in enumerate(urls) if n != partition and url not in ("", gone)}

    def origins(self) -> list[Origin]:
        """Return whom to ask about all partitions, each once."""
        found = dict.fromkeys(self._reachable(url) for url in self._owners.urls)
        return list(found) or [self.base]

    def _reachable(self, url: str) -> Origin:
        if not self._direct or not url:
            return self.base
        origin = self.base.sibling(url)
        if origin is None:
            return self.base
        until = self._avoided.get(origin)
        if until is not None:
            if self._clock.monotonic() < until:
                return self.base
            del self._avoided[origin]
        return origin
