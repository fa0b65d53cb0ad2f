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
    gap: Text = ""
    """Offsets lost with a volume that a person gave up, such as 120-10000000000."""


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
    manifests: Count = 0
    """Manifests of the current snapshot."""
    small_files: Count = 0
    """Data files well below the target size."""
    debt_files: Count = 0
    """Of those, the ones that compaction would join: they are in closed time partitions."""
    delete_files: Count = 0
    """Files of deleted rows that readers must apply."""


class MaintenanceRun(StatusModel):
    """One Spark job over the table."""

    trigger: Text = ""
    """Why it was started: Schedule, Health or Manual."""
    steps: Text = ""
    """What it did, such as compact: done, expire: nothing-to-do."""
    outcome: Text = ""
    """Succeeded, Failed, or Refused: the API server did not take the Job."""
    job: Text = ""
    """Identity of its Job."""
    started: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None
    """When it was started."""
    seconds: Count = 0
    """How long it took."""
    files_before: Count = 0
    """Data files before."""
    files_after: Count = 0
    """Data files after."""
    files_removed: Count = 0
    """Files that it took out of the table or the bucket: joined, past retention, or orphans."""
    snapshots_expired: Count = 0
    """Snapshots that it expired."""
    delete_files_after: Count = 0
    """Files of deleted rows that it left."""
    core_seconds: Count = 0
    """What it cost."""
    message: Text = ""
    """What went wrong, if anything did."""


class MaintenanceStatus(StatusModel):
    """Spark jobs that keep the table healthy."""

    running: Text = ""
    """The Job that works on the table now; empty if none does."""
    waiting: Text = ""
    """Why that Job's driver does not run yet, after a minute."""
    next: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None
    """When the schedule asks for the next one."""
    manual: Text = ""
    """The last value of the annotation tidewater.dev/maintain that was acted on."""
    failures: Count = 0
    """Failures since the last success; each one makes the wait longer."""
    not_before: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None
    """After a failure: nothing is started before this time, unless by hand."""
    last: MaintenanceRun | None = None
    """The last one that ended."""
    last_success: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None
    """When one last ended well."""


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
    rate: Text = ""
    """Messages per second, such as 12.5/s."""
    bytes_rate: Text = ""
    """Bytes per second, such as 3Mi/s."""
    committed: Count = 0
    """Messages of all partitions that are in the table."""
    lag: Count = 0
    """Acknowledged messages of all partitions that are not in the table yet."""
    pool: Text = ""
    """The pool that serves it."""
    workers: Count = 0
    """Workers that own its partitions."""
    table: TableStatus | None = None
    """The table."""
    maintenance: MaintenanceStatus | None = None
    """Spark jobs over the table."""
    accepted_loss: Text = ""
    """The last value of the annotation tidewater.dev/accept-loss that was acted on."""
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
    """Ready, Assigned, Committing, FreshnessMet, Maintained, Degraded and Paused, each with a
    reason."""


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
    redeliveries: Count = 0
    """Messages delivered again, since its worker started."""
    dead_lettered: Count = 0
    """Messages given to the dead letter topic, since its worker started."""
    conditions: Conditions = Field(default=[])
    """Ready, Active, LagBounded and Paused, each with a reason."""


class VolumeStatus(StatusModel):
    """The disk of one worker."""

    worker: Text
    """The worker."""
    size: Text = ""
    """Asked for."""
    capacity: Text = ""
    """There."""


class PoolStatus(StatusModel):
    """What the pool is."""

    observed_generation: Count = 0
    """The generation of the spec that this status is about."""
    replicas: Count = 0
    """Workers that there are, those that are being drained included."""
    ready_replicas: Count = 0
    """Workers that are ready."""
    updated_replicas: Count = 0
    """Workers with the newest image and settings."""
    selector: Text = ""
    """Label selector of the worker pods, for autoscalers."""
    topics: Count = 0
    """Topics served."""
    partitions: Count = 0
    """Partitions served."""
    rate: Text = ""
    """Messages per second of all its topics."""
    image: Text = ""
    """The worker image."""
    volumes: Annotated[
        list[VolumeStatus],
        Field(
            max_length=1_000,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["worker"],
            },
        ),
    ] = Field(default=[])
    """The disks."""
    conditions: Conditions = Field(default=[])
    """Ready, Scaling, Degraded, VolumeGrown and Paused, each with a reason."""
