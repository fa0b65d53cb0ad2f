"""What a worker asks of the coordination store."""

from typing import Protocol

import msgspec


class RegisteredTopic(msgspec.Struct, frozen=True):
    """A topic as the registry has it."""

    topic: str
    """`namespace/name`."""
    uuid: str
    """Given when the topic was first registered; a re-created topic has another."""
    spec: str
    """The Topic's spec as JSON."""


class Coordination(Protocol):
    """Registry and ownership. Never data, never per-file state."""

    def register(self, topic: str, spec: str, uuid: str) -> RegisteredTopic:
        """Add a topic or change its spec; an existing one keeps its uuid."""

    def topics(self) -> list[RegisteredTopic]:
        """Return every topic."""

    def version(self) -> int:
        """Return a number that changes with every change of the registry."""

    def owner(self, topic: str, partition: int) -> str | None:
        """Return who owns a partition, or None."""

    def acquire(self, topic: str, partition: int, owner: str) -> int:
        """Take a partition; return its new epoch, higher than any before."""

    def close(self) -> None:
        """Let go of the store."""
