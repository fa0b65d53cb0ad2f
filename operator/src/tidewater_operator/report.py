"""What workers say of themselves (`GET /v1/{namespace}`), read with tolerance.

A worker of another version may leave things out or add some; one that does not answer says
nothing. Neither may stop the operator: what is not known is shown as unknown.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

NAMED_MAX: Final = 3
"""Logs that are left over and named one by one."""
EVIDENCE_CHARS_MAX: Final = 1_000


class GapReport(msgspec.Struct, frozen=True):
    """Offsets that no message has: they were lost with a volume."""

    start: int = 0
    end: int = 0


class PartitionReport(msgspec.Struct, frozen=True):
    """A partition that a worker owns."""

    partition: int
    epoch: int = 0
    state: str = ""
    reason: str | None = None
    message: str | None = None
    start: int = 0
    end: int = 0
    committed: int = 0
    lag: int = 0
    open: bool = True
    """It takes messages."""
    oldest_uncommitted_ms: float | None = None
    gaps: tuple[GapReport, ...] = ()

    @property
    def messages(self) -> int:
        """Messages in the table, those that retention has removed included."""
        return self.committed - sum(gap.end - gap.start for gap in self.gaps)


class AckReport(msgspec.Struct, frozen=True):
    """Measured latency of acknowledgements, in milliseconds."""

    p50: float | None = None
    p99: float | None = None


class TableReport(msgspec.Struct, frozen=True):
    """The table's health as of the last commit."""

    table: str = ""
    """Its identifier."""
    table_uuid: str = ""
    snapshot_id: int | None = None
    committed_at_us: int = 0
    table_rows: int = 0
    bytes: int = 0
    files: int = 0
    snapshots: int = 0
    manifests: int = 0
    small_files: int = 0
    delete_files: int = 0
    debt_files: int | None = None
    """Files that compaction would join; None: this worker does not say."""
    debt_bytes: int | None = None


class TopicReport(msgspec.Struct, frozen=True):
    """A topic on one worker."""

    name: str
    uuid: str = ""
    phase: str = "active"
    partitions: tuple[PartitionReport, ...] = ()
    rate: float = 0.0
    bytes_per_s: float = 0.0
    sync: str = ""
    ack_ms: AckReport | None = None
    freshness_ms: float | None = None
    freshness_known: bool = True
    """Not before the table has said how far it is: then there may be older messages."""
    committed_at_ms: float = 0.0
    """Wall clock of the last commit that the worker made or saw; 0 before the first."""
    table: TableReport | None = None


class SubscriptionReport(msgspec.Struct, frozen=True):
    """A subscription on one worker: of the partitions that it owns."""

    name: str
    consumers: int = 0
    backlog: int = 0
    oldest_unacked_ms: float | None = None
    redeliveries: int = 0
    dead_lettered: int = 0


class DiskReport(msgspec.Struct, frozen=True):
    """The disk of a worker's logs."""

    bytes: int = 0
    free: int = 0


class LeftoverReport(msgspec.Struct, frozen=True):
    """A log of a topic that is gone, with messages that may be nowhere else."""

    topic: str
    partition: int = 0
    segments: int = 0
    bytes: int = 0


class RefusedReport(msgspec.Struct, frozen=True):
    """A registered spec that the worker does not serve."""

    topic: str = ""
    """Full name of the topic whose it is; empty if it is a subscription's."""
    subscription: str = ""
    reason: str = ""
    message: str = ""


class WorkerReport(msgspec.Struct, frozen=True):
    """All that a worker says."""

    worker: str = ""
    volume: str = ""
    ready: bool = False
    disk: DiskReport | None = None
    topics: tuple[TopicReport, ...] = ()
    subscriptions: tuple[SubscriptionReport, ...] = ()
    refused: tuple[RefusedReport, ...] = ()
    leftovers: tuple[LeftoverReport, ...] = ()

    @property
    def evidence(self) -> str:
        """Name the logs that are left over, in few words; empty: this worker knows of none."""
        logs = [
            f"{one.topic} partition {one.partition} ({one.segments} segments, {one.bytes} bytes)"
            for one in self.leftovers
        ]
        more = f" and {len(logs) - NAMED_MAX} more" if len(logs) > NAMED_MAX else ""
        return (", ".join(logs[:NAMED_MAX]) + more)[:EVIDENCE_CHARS_MAX]


def read_report(body: bytes) -> WorkerReport | None:
    """Read a report; None if it makes no sense."""
    try:
        return msgspec.convert(_without_nulls(msgspec.json.decode(body)), WorkerReport)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError):
        return None


def _without_nulls(value: Any) -> Any:
    """Take a null for a thing left out."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


class TopicFacts(msgspec.Struct, frozen=True):
    """A topic over all workers that answered."""

    partitions: dict[int, PartitionReport] = {}
    owners: dict[int, str] = {}
    """Partition to the worker that reported it."""
    rate: float = 0.0
    bytes_per_s: float = 0.0
    sync: str = ""
    ack_ms: AckReport | None = None
    """The slowest worker's."""
    freshness_ms: float | None = None
    """The worst worker's."""
    freshness_known: bool = True
    """To every worker."""
    committed_at_ms: float = 0.0
    """When any worker last saw a commit."""
    table: TableReport | None = None
    """The newest that a worker knows."""


Told = dict[str, list[tuple[str, TopicReport]]]
"""Topic → who reported on it, and what."""


def by_topic(reports: Iterable[WorkerReport]) -> Told:
    """Sort what workers say by topic."""
    found: Told = {}
    for report in reports:
        for topic in report.topics:
            found.setdefault(topic.name.rpartition("/")[2], []).append((report.worker, topic))
    return found


def topic_facts(name: str, uuid: str, told: Told) -> TopicFacts:
    """Join what workers say of one topic; of two with one partition the higher epoch counts."""
    found: dict[int, tuple[PartitionReport, str]] = {}
    topics: list[TopicReport] = []
    for worker, topic in told.get(name, ()):
        if topic.uuid and topic.uuid != uuid:
            continue
        topics.append(topic)
        for part in topic.partitions:
            before = found.get(part.partition)
            if before is None or part.epoch > before[0].epoch:
                found[part.partition] = (part, worker)
    ages = [topic.freshness_ms for topic in topics if topic.freshness_ms is not None]
    acks = [topic.ack_ms for topic in topics if topic.ack_ms is not None]
    tables = [topic.table for topic in topics if topic.table is not None and topic.table.table]
    return TopicFacts(
        partitions={number: part for number, (part, _) in sorted(found.items())},
        owners={number: worker for number, (_, worker) in sorted(found.items())},
        rate=sum(topic.rate for topic in topics),
        bytes_per_s=sum(topic.bytes_per_s for topic in topics),
        sync=next((topic.sync for topic in topics if topic.sync), ""),
        ack_ms=max(acks, key=lambda ack: ack.p99 or 0.0) if acks else None,
        freshness_ms=max(ages) if ages else None,
        freshness_known=all(topic.freshness_known for topic in topics),
        committed_at_ms=max((topic.committed_at_ms for topic in topics), default=0.0),
        table=max(tables, key=lambda table: table.committed_at_us) if tables else None,
    )


def subscription_facts(name: str, reports: Iterable[WorkerReport]) -> SubscriptionReport | None:
    """Join what workers say of one subscription; None if none of them knows it."""
    parts = [
        part
        for report in reports
        for part in report.subscriptions
        if part.name.rpartition("/")[2] == name
    ]
    if not parts:
        return None
    ages = [part.oldest_unacked_ms for part in parts if part.oldest_unacked_ms is not None]
    return SubscriptionReport(
        name=name,
        # A consumer may be connected to several workers: the most that one sees.
        consumers=max(part.consumers for part in parts),
        backlog=sum(part.backlog for part in parts),
        oldest_unacked_ms=max(ages) if ages else None,
        redeliveries=sum(part.redeliveries for part in parts),
        dead_lettered=sum(part.dead_lettered for part in parts),
    )
