"""Topic: a stream of messages with a log in front and an Iceberg table behind.

Every field has a default: `spec: {}` is a good topic.
"""

import re
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from tidewater_core.crd.base import (
    DNS_LABEL_EXTRA,
    Count,
    Flag,
    Model,
    ObjectMeta,
    cel,
    dns_label,
    time_between,
    rules,
    size_between,
)
from tidewater_core.crd.columns import (
    ColumnType,
    Transform,
    parse_transform,
    parse_type,
)
from tidewater_core.crd.cron import check_schedule
from tidewater_core.crd.status import TopicStatus
from tidewater_core.names import (
    API_VERSION,
    RESERVED_PREFIX,
    RESERVED_PROPERTY_PREFIX,
    TW_KEY,
    TW_OFFSET,
    TW_PARTITION,
    TW_TIME,
    TopicName,
)
from tidewater_core.units import ByteSize, Duration

PARTITIONS_MAX = 1_000
"""Most partitions of one topic: what one worker can hold."""
COLUMNS_MAX = 200
"""Most columns of a typed topic; keeps the API server's rules affordable."""
TABLE_PART_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_-]*"


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


class FieldSpec(Model):
    """One column of a typed topic."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.type == oldSelf.type"
                " || (oldSelf.type == 'int' && self.type == 'long')"
                " || (oldSelf.type == 'float' && self.type == 'double')",
                "a column's type may only be widened: int to long, float to double",
            ),
            cel(
                "!self.required || oldSelf.required",
                "an optional column cannot become required: older rows may lack it",
            ),
        )
    )

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            json_schema_extra={
                "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
                **rules(
                    cel(
                        "!self.lowerAscii().startsWith('tw_')",
                        "column names that begin with tw_ are reserved",
                    )
                ),
            },
        ),
    ]
    """Name of the column. Names that begin with tw_ are reserved."""
    type: Annotated[str, Field(min_length=1, max_length=128)]
    """Iceberg type: boolean, int, long, float, double, decimal(P,S), date, time, timestamp,
    timestamptz, string, uuid, binary, list<TYPE> or map<string,TYPE>."""
    required: Flag = False
    """Refuse messages without this column. A column added to an existing topic cannot be."""
    doc: Annotated[str, Field(max_length=1024)] = ""
    """What the column means; becomes its comment in the table."""

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(
                f"column {name!r} must be letters, digits and '_', and not begin with a digit"
            )
        if name.lower().startswith(RESERVED_PREFIX):
            raise ValueError(
                f"column {name!r}: names that begin with {RESERVED_PREFIX} are reserved"
            )
        return name

    @field_validator("type")
    @classmethod
    def _type_is_known(cls, text: str) -> str:
        return str(parse_type(text))

    @property
    def column_type(self) -> ColumnType:
        """The type, parsed."""
        return parse_type(self.type)


class SchemaSpec(Model):
    """The columns of a typed topic."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "oldSelf.fields.all(o, self.fields.exists(n, n.name == o.name))",
                "columns cannot be removed: readers of older rows need them",
            ),
            cel(
                "self.fields.all(n, !n.required || oldSelf.fields.exists(o, o.name == n.name))",
                "a new column cannot be required: older rows lack it",
            ),
        )
    )

    fields: Annotated[
        list[FieldSpec],
        Field(
            min_length=1,
            max_length=COLUMNS_MAX,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        ),
    ]
    """The columns, in order. They may be added and widened, never removed."""

    @field_validator("fields")
    @classmethod
    def _names_differ(cls, fields: list[FieldSpec]) -> list[FieldSpec]:
        seen: dict[str, str] = {}
        for field in fields:
            other = seen.setdefault(field.name.lower(), field.name)
            if other is not field.name:
                raise ValueError(
                    f"columns {other!r} and {field.name!r} differ only in case or not at all; "
                    "SQL engines could not tell them apart"
                )
        return fields


class TableSpec(Model):
    """The Iceberg table."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.name) == has(oldSelf.name)"
                " && (!has(self.name) || self.name == oldSelf.name)",
                "the table's name cannot change: its rows are this topic's only history",
            ),
            cel(
                "self.partitionBy == oldSelf.partitionBy",
                "partitionBy is fixed when the table is made; evolve it with SQL",
            ),
        )
    )

    name: Annotated[
        str | None,
        Field(
            max_length=255,
            json_schema_extra={"pattern": rf"^{TABLE_PART_PATTERN}(\.{TABLE_PART_PATTERN})+$"},
        ),
    ] = None
    """Identifier in the catalog, NAMESPACE.TABLE; NAMESPACE.TOPIC of the Topic when left out.
    Some catalogs only take a-z, 0-9, '_' and '-'."""
    partition_by: Annotated[
        list[Annotated[str, Field(max_length=160)]], Field(max_length=8)
    ] = Field(default=["hour(tw_time)"])
    """Partition fields: a column, hour(c), day(c), month(c), year(c), bucket(N, c) or
    truncate(W, c). An empty list makes a table without partitions."""
    properties: Annotated[dict[str, str], Field(max_length=100)] = Field(default={})
    """Table properties to set when the table is made, such as write.parquet.compression-level."""

    @field_validator("name")
    @classmethod
    def _name_has_namespace(cls, name: str | None) -> str | None:
        part = TABLE_PART_PATTERN
        if name is not None and re.fullmatch(rf"{part}(\.{part})+", name) is None:
            raise ValueError(
                f"{name!r} must be NAMESPACE.TABLE, each of letters, digits, '_' and '-'"
            )
        return name

    @field_validator("partition_by")
    @classmethod
    def _transforms_parse(cls, items: list[str]) -> list[str]:
        transforms = [parse_transform(item) for item in items]
        if len({(t.column, t.name) for t in transforms}) != len(transforms):
            raise ValueError("the same partition field is listed twice")
        return [str(t) for t in transforms]

    @field_validator("properties")
    @classmethod
    def _properties_are_free(cls, properties: dict[str, str]) -> dict[str, str]:
        for key in properties:
            if key.startswith(RESERVED_PROPERTY_PREFIX):
                raise ValueError(
                    f"property {key!r}: names that begin with {RESERVED_PROPERTY_PREFIX} "
                    "are reserved"
                )
        return properties

    @property
    def transforms(self) -> list[Transform]:
        """The partition fields, parsed."""
        return [parse_transform(item) for item in self.partition_by]


class TableRetention(Model):
    """When rows leave the table."""

    time: Annotated[Duration, time_between("1h", "36500d")]
    """Delete rows older than this."""
    force: Flag = False
    """Delete them even where a live subscription has not read them yet."""


class SparkSpec(Model):
    """Size of the maintenance jobs."""

    executors: Annotated[Count, Field(ge=0, le=1_000)] = 2
    """Executor pods for large tables; 0 keeps all work in the driver."""
    executor_cores: Annotated[Count, Field(ge=1, le=64)] = 1
    """Cores of each executor."""
    executor_memory: Annotated[ByteSize, size_between("512Mi", "1Ti")] = ByteSize("1Gi")
    """Memory of each executor."""
    driver_memory: Annotated[ByteSize, size_between("512Mi", "1Ti")] = ByteSize("1Gi")
    """Memory of the driver."""
    local_below: Annotated[ByteSize, size_between("0", "1024Ti")] = ByteSize("1Gi")
    """Work on less data than this runs in the driver alone, without executors."""


class MaintenanceSpec(Model):
    """How the table is kept healthy."""

    schedule: Annotated[str, Field(max_length=128), AfterValidator(check_schedule)] = "*/30 * * * *"
    """Cron schedule (UTC) of the Spark jobs."""
    target_file_size: Annotated[ByteSize, size_between("1Mi", "4Gi")] = ByteSize("128Mi")
    """Size of data files that compaction aims at."""
    keep_snapshots: Annotated[Count, Field(ge=1, le=10_000)] = 50
    """Most snapshots kept; tagged ones and those that readers use are kept besides."""
    snapshot_age: Annotated[Duration, time_between("1m", "3650d")] = Duration("1d")
    """Snapshots older than this expire; the current one never does."""
    spark: SparkSpec = SparkSpec()
    """Size of the jobs."""


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
    pool: Annotated[str, dns_label("pool"), Field(json_schema_extra=DNS_LABEL_EXTRA)] = "default"
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
        """Read what `to_json` wrote; raises pydantic's ValidationError."""
        return cls.model_validate_json(text)


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

    api_version: Literal["tidewater.dev/v1alpha1"] = API_VERSION
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
