"""What the operator is told when it starts: one YAML file of frozen values.

Unknown fields are refused, so that a typing error is seen at the start and not as a setting that
has no effect. `docs/operator.md` shows the whole file.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from tidewater_core.crd.base import Count, Flag, Model
from tidewater_core.crd.explain import problems
from tidewater_core.crd.pool import PoolSpec
from tidewater_core.errors import Invalid
from tidewater_core.units import ByteSize, Duration

SETTINGS_CHARS_MAX = 1_000_000
"""Longest file that is read."""
CREDENTIAL = re.compile(
    "(?i)(secret|password|credential|token|access-key|account-key|connection-string|authorization)$"
)
"""Names of properties that are credentials. The chart knows them, too, and says so earlier."""
PASSWORD_IN_URI = re.compile("://[^/@]*:[^/@:]+@")
VARIABLE = re.compile(r"\$\{[^}]*\}")


class AuthMode(StrEnum):
    """How workers learn who asks."""

    NONE = "none"
    """They do not ask."""
    KUBERNETES = "kubernetes"
    """By TokenReview and SubjectAccessReview."""


class EtcdSettings(Model):
    """Where the registry is."""

    endpoints: Annotated[list[str], Field(min_length=1)]
    """Addresses, `http://…` or `https://…`."""
    prefix: str = "tidewater"
    """Everything stands below it, each namespace at `<prefix>/<namespace>`."""
    secret: str = ""
    """A Secret of the operator's namespace with any of `username`, `password`, `ca.crt`, `tls.crt`
    and `tls.key`. It is copied to namespaces with pools as `tidewater-etcd`."""
    take_over_from: str = ""
    """A person's word that the cluster of this id, whose registry this was, is gone for good."""

    @field_validator("endpoints")
    @classmethod
    def _endpoints_are_addresses(cls, endpoints: list[str]) -> list[str]:
        for endpoint in endpoints:
            if not endpoint.startswith(("http://", "https://")):
                raise ValueError(f"{endpoint!r} must begin with http:// or https://")
        return endpoints


class CatalogSettings(Model):
    """The Iceberg catalog."""

    name: str = "tidewater"
    """The catalog's name, the same for every engine."""
    properties: dict[str, str] = Field(default={})
    """pyiceberg's properties; `${NAME}` stands for a key of the Secret `catalogSecret`. They are
    written to a ConfigMap of every namespace with a pool, so no credential may stand in them."""

    @field_validator("properties")
    @classmethod
    def _no_credential_is_written_out(cls, properties: dict[str, str]) -> dict[str, str]:
        for name, value in properties.items():
            plain = VARIABLE.sub("", value)
            if (CREDENTIAL.search(name) and plain == value) or PASSWORD_IN_URI.search(plain):
                raise ValueError(
                    f"{name} would stand in ConfigMaps: put it in the Secret that catalogSecret "
                    "names, and write ${NAME} for its key NAME here"
                )
        return properties


class PoolSettings(Model):
    """What Pools may ask for."""

    allowed_images: list[str] = Field(default=[])
    """Images that a Pool may name: a repository stands for all its tags, what ends with `/` for all
    repositories below it, `*` for every image. Empty: the repositories of `workerImage` and of
    `poolDefaults.image`. A worker runs with the catalog's credentials, and is sent the tokens of
    those who use it."""


class AuthSettings(Model):
    """Who may use a topic."""

    mode: AuthMode = AuthMode.NONE
    """none, or kubernetes."""
    worker_role: str = "tidewater-worker"
    """ClusterRole that the workers' service account gets in its namespace."""
    reviewers_binding: str = "tidewater-workers"
    """ClusterRoleBinding that lets workers ask who somebody is; its subjects are ours."""
    worker_token_path: str = "/var/run/secrets/tidewater/token"  # noqa: S105
    """File with the operator's token for workers: for the audience `tidewater`, never one that the
    API server takes, since whoever controls a worker's pod sees it."""


class TlsSettings(Model):
    """Encryption of the workers' doors."""

    secret_name: str = ""
    """A Secret in the pool's namespace with tls.crt, tls.key and ca.crt; empty: no TLS."""


class TableSettings(Model):
    """Which tables topics may name."""

    allow_foreign: Flag = False
    """Let a Topic name a table outside the catalog namespace of its own name."""


class TenantSettings(Model):
    """Which namespaces have credentials of their own."""

    separate_catalog: list[str] = Field(default=[])
    """Namespaces whose `tidewater-catalog` is a copy of `<catalogSecret>.<namespace>`, and never of
    the shared Secret."""
    separate_etcd: list[str] = Field(default=[])
    """Namespaces whose `tidewater-etcd` is a copy of `<etcd.secret>.<namespace>`, and never of the
    shared Secret."""


class NetworkPolicySettings(Model):
    """Who reaches the workers."""

    enabled: Flag = True
    """Make a NetworkPolicy for each pool: its ports and nothing else."""


class MaintenanceSettings(Model):
    """The Spark jobs."""

    enabled: Flag = True
    """Start them."""
    role: str = "tidewater-pipeline"
    """ClusterRole that the driver's service account gets in its namespace: it makes executors."""
    max_jobs: Annotated[Count, Field(ge=1, le=1_000)] = 4
    """Most jobs at the same time, over the whole cluster; one namespace has half at most."""
    deadline: Duration = Duration("1h")
    """A job that takes longer is stopped."""
    keep: Duration = Duration("10m")
    """How long a finished job's pod stays for its logs."""
    small_files: Annotated[Count, Field(ge=1)] = 100
    """Start a job for a table with this many small files in closed time partitions."""
    snapshots_factor: Annotated[Count, Field(ge=1)] = 4
    """Start a job for a table with this many times `keepSnapshots`."""
    manifests: Annotated[Count, Field(ge=1)] = 200
    """Start a job for a table with this many manifests."""
    orphans_every: Duration = Duration("1d")
    """How often a scheduled job also looks for files that nothing names."""
    driver_cpu: str = "250m"
    """CPU request of the driver."""

    @field_validator("deadline")
    @classmethod
    def _some_time(cls, deadline: Duration) -> Duration:
        if deadline.ms < 10_000:
            raise ValueError(f"{deadline} is too short for any job: at least 10s")
        return deadline


class Intervals(Model):
    """How often the operator looks."""

    status: Duration = Duration("10s")
    """Figures in status are refreshed this often."""
    resync: Duration = Duration("60s")
    """Everything is compared with the cluster this often, whatever the watches say."""
    lease: Duration = Duration("15s")
    """A leader that was not heard of for this long is replaced."""
    deletion_timeout: Duration = Duration("10m")
    """A deleted topic that cannot be drained for this long is told of by an event."""
    unused_pool: Duration = Duration("10m")
    """A pool that the operator made and that no topic needs goes after this time."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.status.ms < 1_000:
            raise ValueError("status must be at least 1s: there is no pause between looks without")
        if not self.status <= self.resync:
            raise ValueError(f"status ({self.status}) must not be longer than resync")
        if self.lease.ms < 5_000:
            raise ValueError("lease must be at least 5s")
        return self


class OperatorSettings(Model):
    """Everything that the operator needs to know."""

    etcd: EtcdSettings
    """Where the registry is."""
    catalog: CatalogSettings
    """The Iceberg catalog."""
    catalog_secret: str = ""
    """A Secret of the operator's namespace with the catalog's keys; copied to namespaces with pools
    as `tidewater-catalog`. Empty: the properties need none."""
    worker_image: str
    """The worker image."""
    pipeline_image: str = ""
    """The pipeline image; empty: no Spark jobs."""
    image_pull_policy: str = "IfNotPresent"
    """Of both."""
    image_pull_secrets: list[str] = Field(default=[])
    """Names of Secrets in the pools' namespaces."""
    pool_defaults: PoolSpec = PoolSpec(
        resources={
            "requests": {"cpu": "100m", "memory": "512Mi"},
            "limits": {"memory": "2Gi"},
        }
    )
    """The spec of pools that topics name and nobody made; its image, resources and placement also
    fill in what a Pool leaves out."""
    pools: PoolSettings = PoolSettings()
    """What Pools may ask for."""
    auth: AuthSettings = AuthSettings()
    """Who may use a topic."""
    tls: TlsSettings = TlsSettings()
    """Encryption."""
    tables: TableSettings = TableSettings()
    """Which tables topics may name."""
    tenants: TenantSettings = TenantSettings()
    """Which namespaces have credentials of their own."""
    network_policy: NetworkPolicySettings = NetworkPolicySettings()
    """Who reaches the workers."""
    maintenance: MaintenanceSettings = MaintenanceSettings()
    """The Spark jobs."""
    intervals: Intervals = Intervals()
    """How often the operator looks."""
    watch_namespaces: list[str] = Field(default=[])
    """Namespaces to look after; empty: all."""
    log_level: str = "info"
    """debug, info, warning or error."""
    tmp_bytes: ByteSize = ByteSize("1Gi")
    """Size of a worker's /tmp."""

    @model_validator(mode="after")
    def _separate_from_something(self) -> Self:
        for field, names, secret in (
            ("separateCatalog", self.tenants.separate_catalog, self.catalog_secret),
            ("separateEtcd", self.tenants.separate_etcd, self.etcd.secret),
        ):
            if names and not secret:
                raise ValueError(f"tenants.{field} needs the name of the shared Secret, too")
        return self

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read the file's text; raise Invalid that names the field."""
        if len(text) > SETTINGS_CHARS_MAX:
            raise Invalid("InvalidSettings", f"the file is longer than {SETTINGS_CHARS_MAX}")
        try:
            content: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise Invalid("InvalidSettings", f"this is not YAML: {error}") from error
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise Invalid("InvalidSettings", "; ".join(problems(error, cls))) from error
