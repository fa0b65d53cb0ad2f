"""Which consumers a subscription has. Pure.

A consumer is there while it waits in a pull or stream, holds messages, or was heard of (pull, ack,
extend, nack) not longer than `timeout_s` ago. Names are the consumers' own: one that comes back
under its name is the same consumer.
"""

from collections.abc import Callable
from typing import Final

from tidewater_core.errors import Conflict, Invalid, Overloaded

CONSUMERS_MAX: Final = 1_000
"""Consumers of one subscription on one worker."""
NAME_CHARS_MAX: Final = 128
TIMEOUT_S_MIN: Final = 1.0
"""A consumer between two pulls is not gone, however short its deadlines are."""


class _Member:
    __slots__ = ("seen", "waiting")

    def __init__(self, seen: float) -> None:
        self.seen = seen
        self.waiting = 0


class Members:
    """The consumers of one subscription."""

    def __init__(self, timeout_s: float, *, is_exclusive: bool) -> None:
        self._members: dict[str, _Member] = {}
        self.change(timeout_s, is_exclusive=is_exclusive)

    def change(self, timeout_s: float, *, is_exclusive: bool) -> None:
        """Go by another rule from now on; whoever is there stays."""
        self.timeout_s = max(timeout_s, TIMEOUT_S_MIN)
        self.is_exclusive = is_exclusive

    @property
    def names(self) -> list[str]:
        """The consumers, in the order they came."""
        return list(self._members)

    def enter(self, name: str, now: float) -> bool:
        """Note that a consumer waits; tell whether it is new. Ends with `leave_wait`."""
        is_new = self._see(name, now)
        self._members[name].waiting += 1
        return is_new

    def leave_wait(self, name: str, now: float) -> None:
        """Note that a consumer's pull is over."""
        member = self._members.get(name)
        if member is not None:
            member.waiting = max(member.waiting - 1, 0)
            member.seen = now

    def touch(self, name: str, now: float) -> None:
        """Note a sign of life of a consumer that is there."""
        member = self._members.get(name)
        if member is not None:
            member.seen = now

    def remove(self, name: str) -> bool:
        """Forget a consumer; tell whether it was there."""
        return self._members.pop(name, None) is not None

    def expire(self, now: float, holds: Callable[[str], bool]) -> bool:
        """Forget the consumers that are gone; tell whether there were any."""
        gone = [
            name
            for name, member in self._members.items()
            if not member.waiting and member.seen + self.timeout_s <= now and not holds(name)
        ]
        for name in gone:
            del self._members[name]
        return bool(gone)

    def next_expiry(self) -> float | None:
        """Return when the next consumer may be gone; None while all wait."""
        return min(
            (m.seen + self.timeout_s for m in self._members.values() if not m.waiting),
            default=None,
        )

    def _see(self, name: str, now: float) -> bool:
        if not name or len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise Invalid(
                "InvalidConsumer",
                f"a consumer's name is 1 to {NAME_CHARS_MAX} printable characters",
            )
        member = self._members.get(name)
        if member is not None:
            member.seen = now
            return False
        if self.is_exclusive and self._members:
            holder = next(iter(self._members))
            raise Conflict(
                "ExclusiveTaken",
                f"consumer {holder!r} has this Exclusive subscription; it is free again when that "
                f"leaves or was silent for {self.timeout_s:g} s",
                round(self.timeout_s * 1000),
            )
        if len(self._members) >= CONSUMERS_MAX:
            raise Overloaded(
                "TooManyConsumers", f"a subscription has at most {CONSUMERS_MAX} consumers", 1_000
            )
        self._members[name] = _Member(now)
        return True
