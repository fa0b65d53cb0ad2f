"""What storing cursors in etcd needs: transactions of a size, and revisions to stand on."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, TypeVar

from tidewater_coordination.port import CursorKey

CURSORS_PER_TXN: Final = 60
"""etcd takes 128 conditions in a transaction: one for each cursor and one for its partition."""
CURSOR_BYTES_PER_TXN: Final = 1_000_000
"""etcd takes requests of 1.5 MiB; a cursor larger than this goes alone."""
FORGET_AFTER: Final = 1_000
"""So many revisions are kept before anybody looks which of them are of something that is gone."""
Key = TypeVar("Key")
Known = TypeVar("Known")


class Revisions(dict[Key, Known], Generic[Key, Known]):
    """At which revisions a worker knows records: its writes are conditioned on them.

    Subscriptions and topics come and go for as long as a worker runs. What is forgotten is read
    again before it is written: a write stands on what was read, whenever that was.
    """

    def __init__(self) -> None:
        super().__init__()
        self._look_at = FORGET_AFTER

    @property
    def is_due(self) -> bool:
        """Say if as much again has come since somebody looked."""
        return len(self) >= self._look_at

    def forget_gone(self, is_there: Callable[[Key], bool]) -> None:
        """Forget what is of nothing any more."""
        for key in [key for key in self if not is_there(key)]:
            del self[key]
        self._look_at = max(FORGET_AFTER, 2 * len(self))


def portions(items: Mapping[CursorKey, bytes]) -> Iterator[dict[CursorKey, bytes]]:
    """Divide cursors into transactions that etcd takes."""
    some: dict[CursorKey, bytes] = {}
    size = 0
    for key, value in items.items():
        full = len(some) >= CURSORS_PER_TXN or size + len(value) > CURSOR_BYTES_PER_TXN
        if some and full:
            yield some
            some, size = {}, 0
        some[key] = value
        size += len(value)
    if some:
        yield some
