"""What the link has said about a topic and its thread has not taken in yet. Thread-safe."""

import threading
from collections import Counter
from collections.abc import Mapping

from tidewater_worker.ports import TopicAssignment


class Inbox:
    """Notes from the link; the newest of each kind counts."""

    def __init__(self, assignment: TopicAssignment) -> None:
        self.changed = threading.Condition()
        """Guards the notes; notified when the topic's state has changed."""
        self._assignment = assignment
        self._ends: dict[int, int] = {}
        self._flush_upto: dict[int, int] = {}
        self._pins: Counter[int] = Counter()
        self._hurry = False
        self._announce = True

    def assign(self, assignment: TopicAssignment) -> None:
        """Note a newer assignment, and that its sender wants to be told the state."""
        with self.changed:
            for number, part in self._assignment.partitions.items():
                now = assignment.partitions.get(number)
                if now is None or (now.epoch, now.directory) != (part.epoch, part.directory):
                    # What was durable in another life of the log says nothing about this one.
                    self._ends.pop(number, None)
            self._assignment = assignment
            self._announce = True

    def durable(self, ends: Mapping[int, int]) -> None:
        """Note how far partitions are durable."""
        with self.changed:
            for partition, end in ends.items():
                self._ends[partition] = max(end, self._ends.get(partition, 0))

    def take(self) -> tuple[TopicAssignment, dict[int, int]]:
        """Return the assignment, and how far partitions are durable."""
        with self.changed:
            return self._assignment, dict(self._ends)

    def want(self, upto: Mapping[int, int]) -> None:
        """Note that somebody waits for these offsets to be in the table."""
        with self.changed:
            for partition, end in upto.items():
                self._flush_upto[partition] = max(end, self._flush_upto.get(partition, 0))

    def wanted(self, partition: int) -> int:
        """Return the offset below which somebody waits for rows."""
        with self.changed:
            return self._flush_upto.get(partition, 0)

    def hurry(self) -> None:
        """Note that the process is closing: whatever waits is to be flushed at once."""
        with self.changed:
            self._hurry = True

    @property
    def in_haste(self) -> bool:
        """Say if the process is closing."""
        return self._hurry

    def announce(self) -> bool:
        """Say once if the state is to be told although it has not changed."""
        with self.changed:
            wanted, self._announce = self._announce, False
            return wanted

    def pin(self, snapshot_id: int, count: int) -> None:
        """Keep a snapshot while it is read (count 1), or let go of it (count -1)."""
        with self.changed:
            self._pins[snapshot_id] += count
            if self._pins[snapshot_id] <= 0:
                del self._pins[snapshot_id]

    def pinned(self) -> frozenset[int]:
        """Return the snapshots that live readers need."""
        with self.changed:
            return frozenset(self._pins)
