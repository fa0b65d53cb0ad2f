"""What dispatch needs of the coordination store: a part of its port."""

from collections.abc import Mapping
from typing import Protocol

from tidewater_coordination.port import CursorKey, Registry


class ProgressPort(Protocol):
    """Where subscriptions and their progress are kept."""

    async def registry(self) -> Registry:
        """Return the registry."""

    async def changed(self, since: int, timeout_s: float) -> int:
        """Wait until the registry's version is not `since`; return it."""

    async def load_cursors(self, subscription: str, topic: str) -> dict[int, bytes]:
        """Return a subscription's stored progress by partition."""

    async def store_cursors(
        self,
        items: Mapping[CursorKey, bytes],
        epochs: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Store progress, all or nothing; durable when it returns."""
