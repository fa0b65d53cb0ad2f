"""What the edge process and the table process say to each other, as plain values.

The edge owns the log and tells the table process which partitions it owns (`TopicAssignment`)
and how far they are durable; the table process tells how far they are committed (`TopicState`).
Both sides are level-based: each message is the whole truth about its topic, so one that is
lost with a restart is made good by the next.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.errors import TidewaterError


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


class Commits(StrEnum):
    """Who commits the rows of a topic that are written here."""

    ALONE = "alone"
    """This worker, for itself: it has all of the topic's partitions."""
    HERE = "here"
    """This worker, for all owners of the topic's partitions."""
    ELSEWHERE = "elsewhere"
    """Another worker: files are handed over through the edge (`Offer`)."""


class TopicAssignment(msgspec.Struct, frozen=True):
    """A topic and those of its partitions that this worker owns."""

    topic: str
    """`namespace/name`."""
    uuid: str
    """Identity of the topic; a table made for another uuid is not ours."""
    spec: str
    """The Topic's spec as JSON."""
    partitions: dict[int, PartitionAssignment]
    commits: Commits = Commits.ALONE


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
    table_epoch: int = 0
    """With the reason `Fenced`: the epoch that the table carries. Whoever is the owner by the
    coordination store's word all the same (a registry that was restored, or begun anew beside a
    table that was kept) must acquire one above it."""


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


class Offered(msgspec.Struct, frozen=True):
    """A partition in an offer: what its owner holds, and the rows [first, end) that it brings."""

    epoch: int
    committed: int | None
    """The frontier as the owner last knew it."""
    first: int = 0
    end: int = 0
    """Equal to `first` for a partition without rows."""
    gap_end: int = 0


class Haste(IntEnum):
    """How soon an offer is to be committed."""

    INTERVAL = 0
    """With the next commit of the interval."""
    SOON = 1
    """A backlog: more waits behind it."""
    NOW = 2
    """Somebody waits for it."""


class Offer(msgspec.Struct, frozen=True):
    """Files that are written and wait to be committed by the topic's committing worker.

    It may be sent any number of times and to any number of workers: the frontier in the table
    decides, and what landed is never added again.
    """

    id: str
    topic: str
    topic_uuid: str
    table_uuid: str
    partitions: dict[int, Offered]
    spec_id: int = 0
    """The partition spec that the files were written with."""
    files: bytes = b""
    """The files' descriptors as an Iceberg manifest (Avro); empty if only epochs are offered."""
    haste: Haste = Haste.INTERVAL
    pinned: tuple[int, ...] = ()
    """Snapshots that readers of the sender need."""


class OfferAnswer(msgspec.Struct, frozen=True):
    """What became of an offer."""

    landed: bool
    """All of it is in the table. If not, the sender asks the table before anything else."""
    reason: str = ""
    message: str = ""
    snapshot_id: int | None = None
    commit_id: str = ""
    committed_at_us: int = 0
    next: dict[int, int] = {}
    """The frontiers of the offered partitions."""
    starts: dict[int, int] = {}
    tick_ms: int = -1
    """Until the next commit of the interval; -1 if nobody knows."""


class Sifted(NamedTuple):
    """The rows of [start, end) that somebody wants: all other offsets of it were looked at."""

    start: int
    end: int
    rows: pa.RecordBatch
    """In the table's columns, by offset."""


class Followed(msgspec.Struct, frozen=True):
    """A snapshot of a topic's table, for readers of what is committed."""

    snapshot_id: int | None
    partitions: dict[int, PartitionState]


class TableEngine(Protocol):
    """What the link serves for the table process. Any thread may call any method."""

    def assign(self, topics: list[TopicAssignment]) -> None:
        """Take the full set of topics owned now; start, update and stop what differs."""

    def durable(self, topic: str, ends: dict[int, int]) -> None:
        """Note how far partitions are durable in the log."""

    def flush(
        self,
        topic: str,
        upto: dict[int, int],
        timeout_s: float,
        answer: Callable[[FlushResult | TidewaterError], None],
    ) -> None:
        """Commit until every frontier reaches `upto`; `answer` is called once, later.

        However many wait, other calls go on. `Overloaded` if there are too many.
        """

    def history(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        max_rows: int,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read [start, end) from the table in offset order, contiguous, at most `max_rows`.

        `columns`: only these, and `tw_offset`.
        """

    def sift(
        self, topic: str, partition: int, start: int, end: int, wanted: FilterSpec
    ) -> Iterator[Sifted]:
        """Read what a filter wants of [start, end); the answers follow each other without a gap."""

    def follow(
        self,
        topic: str,
        known: int | None,
        timeout_s: float,
        answer: Callable[[Followed | TidewaterError], None],
    ) -> None:
        """Call `answer` once, when the table's snapshot is not `known` or the time is up.

        However many ask, the catalog is asked once per `reader.pollInterval`.
        """

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """Return the first offset in the table whose time is not before `timestamp_us`."""

    def frontier_at(self, topic: str, snapshot_id: int | None, tag: str | None) -> dict[int, int]:
        """Return each partition's frontier in a snapshot, named by its id or tag."""

    def bounds(self, topic: str) -> dict[int, PartitionState]:
        """Return how far each partition is in the table now."""

    def stats(self, topic: str) -> dict[str, Any]:
        """Table health from metadata."""

    def commit_offer(self, offer: Offer, answer: Callable[[OfferAnswer], None]) -> None:
        """Take another worker's files into the next commit; `answer` is called once, later."""

    def drop_table(self, topic: str) -> bool:
        """Drop the table of a topic that is being deleted, with its files; False if there is none.

        Only when no partition of the topic is assigned here any more; `Conflict` if the table
        belongs to another topic.
        """

    def close(self, deadline_s: float) -> None:
        """Commit everything durable, then stop; bounded by the deadline."""
