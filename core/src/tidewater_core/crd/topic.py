"""Topic: a stream of messages with a log in front and an Iceberg table behind.

Every field has a default: `spec: {}` is a good topic.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tidewater_core.crd.base import (
    DNS_LABEL_EXTRA,
    Count,
    Flag,
    Model,
    ObjectMeta,
    cel,
    cel_duration,
    dns_label,
    rules,
    size_between,
    time_between,
)
from tidewater_core.crd.columns import Transform
from tidewater_core.crd.status import TopicStatus
from tidewater_core.crd.table import (
    FieldSpec,
    MaintenanceSpec,
    SchemaSpec,
    SparkSpec,
    TableRetention,
    TableSpec,
)
from tidewater_core.names import (
    POOL_NAME_CHARS_MAX,
    POOL_WORKERS_ENDING,
    TW_KEY,
    TW_OFFSET,
    TW_PARTITION,
    TW_TIME,
    TopicName,
)
from tidewater_core.units import ByteSize, Duration

PARTITIONS_MAX = 1_000
"""Most partitions of one topic: what one worker can hold."""

__all__ = [
    "DeletionPolicy",
    "FieldSpec",
    "LogRetention",
    "LogSpec",
    "MaintenanceSpec",
    "ReaderSpec",
    "SchemaSpec",
    "SparkSpec",
    "SyncMode",
    "TableRetention",
    "TableSpec",
    "Topic",
    "TopicSpec",
    "WriterSpec",
    "table_identifier",
]


class SyncMode(StrEnum):
    """When a message is acknowledged."""

    ALWAYS = "Always"
    """After fdatasync, shared by all that wait (group commit): survives power loss."""
    PERIODIC = "Periodic"
    """After the write; fdatasync every `syncInterval`: power loss can take that much."""
    NONE = "None"
    """After the write; the kernel decides when it reaches the disk."""


class DeletionPolicy(StrEnum):
    """What becomes of the table when the Topic is deleted."""

    RETAIN = "Retain"
    """The table stays."""
    DELETE = "Delete"
    """The table is dropped with its data."""


class LogRetention(Model):
    """How long the log keeps messages that are already in the table; others are never deleted."""

    time: Annotated[Duration, time_between("0s", "3650d")] = Duration("48h")
    """Keep segments at least this long after their last message."""
    size: Annotated[ByteSize, size_between("0", "1024Ti")] = ByteSize("20Gi")
    """Keep at most this many bytes per partition of what is already in the table."""


class LogSpec(Model):
    """The write-ahead log."""

    sync: SyncMode = SyncMode.ALWAYS
    """When a message is acknowledged: Always (after fdatasync), Periodic or None."""
    sync_interval: Annotated[Duration, time_between("1ms", "5m")] = Duration("1s")
    """With sync Periodic: the time between two fdatasyncs, which is what power loss can take."""
    segment_size: Annotated[ByteSize, size_between("64Ki", "4Gi")] = ByteSize("64Mi")
    """Begin a new segment file when one has this size. A batch is never split over two."""
    segment_age: Annotated[Duration, time_between("1s", "30d")] = Duration("1h")
    """Begin a new segment file when one is this old, so that a quiet topic's log gets deleted."""
    tail_cache: Annotated[ByteSize, size_between("0", "64Gi")] = ByteSize("64Mi")
    """Memory per partition for the newest messages, from which live readers are served."""
    retention: LogRetention = LogRetention()
    """How long the log keeps what is already in the table."""


class WriterSpec(Model):
    """When waiting messages are written to the table: whichever limit is reached first."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "quantity(self.batchBytes).compareTo(quantity(self.maxMemory)) <= 0",
                "batchBytes must not be larger than maxMemory",
            )
        )
    )

    flush_interval: Annotated[Duration, time_between("50ms", "1h")] = Duration("1s")
    """Write when the oldest waiting message has this age."""
    batch_rows: Annotated[Count, Field(ge=1, le=100_000_000)] = 100_000
    """Write when this many messages wait."""
    batch_bytes: Annotated[ByteSize, size_between("64Ki", "16Gi")] = ByteSize("64Mi")
    """Write when this many bytes wait."""
    max_memory: Annotated[ByteSize, size_between("1Mi", "64Gi")] = ByteSize("256Mi")
    """Memory for one write; a backlog is drained in pieces of this size."""

    @model_validator(mode="after")
    def _batch_fits_memory(self) -> Self:
        if self.batch_bytes > self.max_memory:
            raise ValueError(
                f"batchBytes ({self.batch_bytes}) must not be larger than "
                f"maxMemory ({self.max_memory})"
            )
        return self


class ReaderSpec(Model):
    """How history is read from the table."""

    poll_interval: Annotated[Duration, time_between("10ms", "1h")] = Duration("500ms")
    """How often to look for new snapshots."""
    max_concurrent_reads: Annotated[Count, Field(ge=1, le=256)] = 5
    """Most files read at the same time."""
    prefetch: Annotated[Count, Field(ge=0, le=64)] = 3
    """Files read ahead of the reader."""


class TopicSpec(Model):
    """What a topic should be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.schema) == has(oldSelf.schema)",
                "a topic stays raw or typed: make a new topic instead",
            ),
            cel(
                "!self.dedicated || self.pool == 'default'",
                "a dedicated topic has workers of its own: leave pool out",
            ),
            cel(
                f"{cel_duration('self.freshness')} >= {cel_duration('self.writer.flushInterval')}",
                "freshness must not be shorter than writer.flushInterval",
            ),
        )
    )

    partitions: Annotated[
        Count,
        Field(
            ge=1,
            le=PARTITIONS_MAX,
            json_schema_extra=rules(
                cel("self >= oldSelf", "partitions may grow, never shrink: offsets would be lost")
            ),
        ),
    ] = 3
    """Number of partitions. Order is kept within each. May grow, never shrink."""
    pool: Annotated[
        str,
        dns_label("pool"),
        Field(
            max_length=POOL_NAME_CHARS_MAX,
            # A rule of the API server alone: what is registered can always be read.
            json_schema_extra={
                **DNS_LABEL_EXTRA,
                "maxLength": POOL_NAME_CHARS_MAX,
                **rules(
                    cel(
                        f"!self.endsWith('{POOL_WORKERS_ENDING}')",
                        f"a pool's name must not end in {POOL_WORKERS_ENDING}",
                    )
                ),
            },
        ),
    ] = "default"
    """The pool of workers of this namespace that serves the topic."""
    dedicated: Flag = False
    """Give the topic workers of its own."""
    log: LogSpec = LogSpec()
    """The write-ahead log: when a message is acknowledged, and how long the log keeps it."""
    writer: WriterSpec = WriterSpec()
    """When messages are written to the table."""
    freshness: Annotated[Duration, time_between("100ms", "7d")] = Duration("10s")
    """Target age at which a message is visible in the table; the condition FreshnessMet says if
    it holds."""
    reader: ReaderSpec = ReaderSpec()
    """How history is read."""
    schema_: SchemaSpec | None = Field(default=None, alias="schema")
    """Columns of a typed topic. Left out: a raw topic, whose messages are bytes in one column,
    `value`."""
    table: TableSpec = TableSpec()
    """The Iceberg table."""
    retention: TableRetention | None = None
    """When rows leave the table. Left out: never."""
    maintenance: MaintenanceSpec = MaintenanceSpec()
    """How the table is kept healthy."""
    deletion_policy: DeletionPolicy = DeletionPolicy.RETAIN
    """What becomes of the table when the Topic is deleted: Retain or Delete."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.freshness < self.writer.flush_interval:
            raise ValueError(
                f"freshness ({self.freshness}) must not be shorter than "
                f"writer.flushInterval ({self.writer.flush_interval})"
            )
        if self.dedicated and self.pool != "default":
            raise ValueError("a dedicated topic has workers of its own: leave pool out")
        for transform in self.table.transforms:
            self._check_transform(transform)
        return self

    def _check_transform(self, transform: Transform) -> None:
        columns = {TW_PARTITION: "int", TW_OFFSET: "long", TW_TIME: "timestamptz", TW_KEY: "binary"}
        if self.schema_ is not None:
            columns |= {field.name: field.column_type.name for field in self.schema_.fields}
        if transform.column not in columns:
            raise ValueError(
                f"table.partitionBy {transform}: no column {transform.column!r}; "
                f"there are {', '.join(columns)}"
            )
        if problem := transform.problem_on(columns[transform.column]):
            raise ValueError(f"table.partitionBy {problem}")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote, by any version; raises pydantic's ValidationError.

        A newer version's fields are passed over: it is people whose unknown fields are errors.
        """
        return cls.model_validate_json(text, extra="ignore")


class Topic(Model):
    """A stream of messages whose history is an Iceberg table."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')"
                " && self.metadata.name.size() <= 63",
                "a topic's name must be at most 63 characters of a-z, 0-9 and '-'",
            )
        )
    )

    api_version: Literal["tidewater.dev/v1alpha1"] = "tidewater.dev/v1alpha1"
    """Always tidewater.dev/v1alpha1."""
    kind: Literal["Topic"] = "Topic"
    """Always Topic."""
    metadata: ObjectMeta
    """Name, namespace, labels."""
    spec: TopicSpec = TopicSpec()
    """What the topic should be."""
    status: TopicStatus | None = None
    """What the topic is, written by the operator."""

    @property
    def name(self) -> TopicName:
        """The full name."""
        return TopicName(self.metadata.namespace, self.metadata.name)

    @property
    def table_identifier(self) -> tuple[str, ...]:
        """The table in the catalog: the one that the spec names, else NAMESPACE.TOPIC."""
        return table_identifier(self.name, self.spec)


def table_identifier(name: TopicName, spec: TopicSpec) -> tuple[str, ...]:
    """Return the table of a topic: the one that the spec names, else NAMESPACE.TOPIC."""
    return tuple(spec.table.name.split(".")) if spec.table.name else name.table_identifier
