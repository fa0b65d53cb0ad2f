"""The status of each kind: what the operator reports, and what `kubectl get` shows."""

from typing import Annotated

from pydantic import Field

from tidewater_core.crd.base import Condition, Count, StatusModel

Conditions = Annotated[
    list[Condition],
    Field(
        max_length=32,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    ),
]
Text = Annotated[str, Field(max_length=1024)]


class PartitionStatus(StatusModel):
    """Where one partition is, and how far."""

    partition: Count
    """Number of the partition."""
    worker: Text = ""
    """The worker that owns it; empty while nobody does."""
    epoch: Count = 0
    """Counts owners: each new one has a higher epoch."""
    start_offset: Count = 0
    """The first offset still kept."""
    end_offset: Count = 0
    """One past the last acknowledged message."""
    committed_offset: Count = 0
    """One past the last message in the table."""
    state: Text = ""
    """opening, running, retrying or stopped."""
    reason: Text = ""
    """Why it is not running."""
    message: Text = ""
    """The same for people: what to do about it."""


class AckLatency(StatusModel):
    """Measured time from a message's arrival to its acknowledgement."""

    p50: Text = ""
    """Half of the messages took at most this long."""
    p99: Text = ""
    """99 of 100 messages took at most this long."""


class TableStatus(StatusModel):
    """The Iceberg table, from its metadata."""

    identifier: Text = ""
    """NAMESPACE.TABLE in the catalog."""
    uuid: Text = ""
    """Identity of the table; another one under the same name stops the topic."""
    snapshot_id: Text = ""
    """The current snapshot."""
    last_commit_time: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None
    """When it was made."""
    rows: Count = 0
    """Rows in the table."""
    bytes: Count = 0
    """Bytes of data files."""
    files: Count = 0
    """Data files."""
    snapshots: Count = 0
    """Snapshots in the metadata."""


class TopicStatus(StatusModel):
    """What the topic is."""

    observed_generation: Count = 0
    """The generation of the spec that this status is about."""
    sync: Text = ""
    """The sync mode in force."""
    ack_latency: AckLatency | None = None
    """Measured latency of acknowledgements."""
    freshness: Text = ""
    """Age of the oldest acknowledged message that is not in the table yet."""
    table: TableStatus | None = None
    """The table."""
    partitions: Annotated[
        list[PartitionStatus],
        Field(
            max_length=1_000,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["partition"],
            },
        ),
    ] = Field(default=[])
    """Each partition."""
    conditions: Conditions = Field(default=[])
    """Ready, FreshnessMet and others, each with a reason."""


class SubscriptionStatus(StatusModel):
    """How far the subscription is."""

    observed_generation: Count = 0
    """The generation of the spec that this status is about."""
    reset_token: Text = ""
    """The last resetToken that was acted on."""
    consumers: Count = 0
    """Consumers connected now."""
    backlog: Count = 0
    """Messages not acknowledged yet."""
    oldest_unacked: Text = ""
    """Age of the oldest of them."""
    conditions: Conditions = Field(default=[])
    """Ready and others, each with a reason."""
