"""What the edge process and the table process say to each other, as plain values.

The edge owns the log and tells the table process which partitions it owns (`TopicAssignment`)
and how far they are durable; the table process tells how far they are committed (`TopicState`).
Both sides are level-based: each message is the whole truth about its topic, so one that is
lost with a restart is made good by the next.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import pyarrow as pa


class Phase(StrEnum):
    """Where a partition stands between its log and its table."""

    OPENING = "opening"
    """The table is not loaded yet; the frontier is unknown."""
    RUNNING = "running"
    """Commits go through."""
    RETRYING = "retrying"
    """The last attempt failed in a way that may pass; nothing is lost, freshness suffers."""
    STOPPED = "stopped"
    """A person or another owner must act; `reason` and `message` say what (G7)."""


class PartitionAssignment(msgspec.Struct, frozen=True):
    """One partition that this worker owns."""

    epoch: int
    """The ownership epoch; a table that carries a higher one fences us."""
    directory: str
    """The partition's log directory."""
    durable_end: int
    """Offsets below this are fsynced: the table process may read them, and nothing past them."""
    gap_end: int = 0
    """The partition goes on here: what is missing before it was lost with a volume."""


class TopicAssignment(msgspec.Struct, frozen=True):
    """A topic and those of its partitions that this worker owns."""

    topic: str
    """`namespace/name`."""
    uuid: str
    """Identity of the topic; a table made for another uuid is not ours."""
    spec: str
    """The Topic's spec as JSON."""
    partitions: dict[int, PartitionAssignment]


class PartitionState(msgspec.Struct, frozen=True):
    """How far a partition is in the table."""

    next: int = 0
    """The committed frontier: every offset below it is in the table."""
    start: int = 0
    """The first offset that the table still keeps."""
    epoch: int = 0
    state: Phase = Phase.OPENING
    reason: str = ""
    message: str = ""
    gaps: tuple[tuple[int, int], ...] = ()
    """Offsets [start, end) that were lost with a volume that a person gave up."""


class TopicState(msgspec.Struct, frozen=True):
    """A topic's table as the table process last saw it."""

    topic: str
    partitions: dict[int, PartitionState]
    table_uuid: str = ""
    snapshot_id: int | None = None
    committed_at_us: int = 0
    """Wall clock of the last commit that this process made or saw; 0 before the first."""


class FlushResult(msgspec.Struct, frozen=True):
    """What a flush made visible."""

    snapshot_id: int | None
    frontier: dict[int, int]


class TableEngine(Protocol):
    """What the link serves for the table process. Any thread may call any method."""

    def assign(self, topics: list[TopicAssignment]) -> None:
        """Take the full set of topics owned now; start, update and stop what differs."""

    def durable(self, topic: str, ends: dict[int, int]) -> None:
        """Note how far partitions are durable in the log."""

    def flush(self, topic: str, upto: dict[int, int], timeout_s: float) -> FlushResult:
        """Commit until every frontier reaches `upto`; blocks."""

    def history(
        self, topic: str, partition: int, start: int, end: int, max_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read [start, end) from the table in offset order, contiguous, at most `max_rows`."""

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """Return the first offset in the table whose time is not before `timestamp_us`."""

    def frontier_at(self, topic: str, snapshot_id: int | None, tag: str | None) -> dict[int, int]:
        """Return each partition's frontier in a snapshot, named by its id or tag."""

    def bounds(self, topic: str) -> dict[int, PartitionState]:
        """Return how far each partition is in the table now."""

    def stats(self, topic: str) -> dict[str, Any]:
        """Table health from metadata."""

    def close(self, deadline_s: float) -> None:
        """Commit everything durable, then stop; bounded by the deadline."""
