"""What a worker is told when it starts: frozen values that travel as JSON.

The operator (or `tidewater dev`) writes them to a file; the worker's processes read that file and
nothing else: no environment, no globals. Unknown fields are refused, so that a typing error or
a version skew is seen at the start and not as a setting that has no effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tidewater_core.crd.explain import problems
from tidewater_core.errors import Invalid
from tidewater_core.security import AuthSettings, TlsSettings
from tidewater_core.units import ByteSize, Duration


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogSettings:
    """Which Iceberg catalog holds the tables, in pyiceberg's own terms."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str = "tidewater"
    """The catalog's name. A SQL catalog stores it with each table: all engines must use one."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """pyiceberg's catalog properties: `type` (rest, sql, glue, in-memory), `uri`, `warehouse`, …"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinationTls:
    """PEM files for etcd over `https://`; they are read again when they were replaced."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    ca: str = ""
    """Path of who signed the servers' certificates; empty: the system's roots."""
    cert: str = ""
    """Path of this client's certificate, for servers that ask for one."""
    key: str = ""
    """Path of its key."""

    def __post_init__(self) -> None:
        """Check that a certificate comes with its key."""
        if bool(self.cert) != bool(self.key):
            raise ValueError("coordination_tls needs cert and key together")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A bound on everything that a caller could make grow (G6)."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    request_bytes_max: ByteSize = ByteSize("32Mi")
    """Largest body of a request, after decompression. Past it: 413."""
    message_bytes_max: ByteSize = ByteSize("8Mi")
    """Largest single message: key, headers and value together. Past it: 413."""
    batch_rows_max: int = 100_000
    """Most messages in one request, and most rows in one frame of the log."""
    frame_bytes_max: ByteSize = ByteSize("64Mi")
    """Most bytes of one request in the log's form, and so of a frame. Past it: 413. Above
    `request_bytes_max`, since decoding adds offsets, validity and padding to what was sent."""
    key_bytes_max: ByteSize = ByteSize("64Ki")
    """Largest key of a message."""
    headers_max: int = 128
    """Most headers of one message."""
    inflight_bytes_max: ByteSize = ByteSize("256Mi")
    """Bytes of requests that wait for the log, over the whole worker. Past it: 429."""
    partition_inflight_bytes_max: ByteSize = ByteSize("64Mi")
    """The same for one partition, so that one slow topic does not starve the others."""
    group_bytes_max: ByteSize = ByteSize("16Mi")
    """Bytes that one group commit joins into one write and fdatasync; bounds its latency."""
    tails_bytes_max: ByteSize = ByteSize("512Mi")
    """Newest messages in memory for who follows live, of all partitions of a worker together
    (`log.tailCache` bounds those of one). Past it the oldest go; they are read from the log."""
    read_rows_max: int = 100_000
    """Most messages in one answer to a read."""
    read_bytes_max: ByteSize = ByteSize("32Mi")
    """Most bytes of messages in one answer; at least one message is always given."""
    wait_max: Duration = Duration("60s")
    """Longest long poll (`wait_ms`)."""
    flush_wait_max: Duration = Duration("60s")
    """Longest wait for rows to reach the table (`flush`, `ack=table`)."""
    producers_max: int = 10_000
    """Idempotent producers remembered per partition, up to 60 kB each; the ones idle longest are
    forgotten (G8). Past a few thousand, saving them makes itself felt when a segment begins."""
    disk_reserve_bytes: ByteSize = ByteSize("256Mi")
    """Free bytes of the log's disk below which appends are refused (503), so that the worker can
    always finish what it acknowledged and write its state."""
    log_bytes_max: ByteSize = ByteSize("100Gi")
    """Bytes of uncommitted log per partition past which producers are pushed back (429)."""
    partitions_max: int = 10_000
    """Most partitions whose logs are open on one worker; further ones stay closed and say why."""
    connections_max: int = 10_000
    """Most open connections. Past it: 503."""
    stall_max: Duration = Duration("30s")
    """Who has begun a request, or only a connection, and sends nothing for this long is cut off."""
    socket_ping: Duration = Duration("20s")
    """How often a WebSocket is pinged; a client that answers none of two is gone."""

    def __post_init__(self) -> None:
        """Check the relations between the limits."""
        _ordered(
            message_bytes_max=self.message_bytes_max,
            request_bytes_max=self.request_bytes_max,
            frame_bytes_max=self.frame_bytes_max,
        )
        _ordered(key_bytes_max=self.key_bytes_max, message_bytes_max=self.message_bytes_max)
        _ordered(
            request_bytes_max=self.request_bytes_max,
            partition_inflight_bytes_max=self.partition_inflight_bytes_max,
            inflight_bytes_max=self.inflight_bytes_max,
        )
        _ordered(message_bytes_max=self.message_bytes_max, group_bytes_max=self.group_bytes_max)
        _ordered(group_bytes_max=self.group_bytes_max, frame_bytes_max=self.frame_bytes_max)
        _ordered(message_bytes_max=self.message_bytes_max, read_bytes_max=self.read_bytes_max)
        _ordered(frame_bytes_max=self.frame_bytes_max, log_bytes_max=self.log_bytes_max)
        for name in (
            "batch_rows_max",
            "headers_max",
            "read_rows_max",
            "producers_max",
            "partitions_max",
            "connections_max",
            "key_bytes_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


def _ordered(**limits: int) -> None:
    """Check that limits, named in ascending order, are in that order."""
    names = list(limits)
    for low, high in pairwise(names):
        if limits[low] > limits[high]:
            raise ValueError(
                f"{low} ({limits[low]}) must not be larger than {high} ({limits[high]})"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Everything that a worker's processes need to know."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    worker_id: str
    """This worker's name: stable over restarts, unique among those that share a catalog."""
    log_root: Path
    """Directory of the logs. It must be on a disk that keeps what was fsynced."""
    run_dir: Path
    """Directory of pid files and of the socket between the worker's processes; may be a tmpfs."""
    coordination: str
    """A path of an SQLite file, or etcd endpoints (`http://…` or `https://…`) joined by commas."""
    catalog: CatalogSettings
    """The Iceberg catalog."""
    coordination_prefix: str = "tidewater"
    """Below which keys of etcd everything stands. Workers see topics, subscriptions and workers of
    their own prefix and no others: the operator gives each Kubernetes namespace one (G9)."""
    coordination_tls: CoordinationTls | None = None
    """Certificates for etcd; None: the system's roots, and none of our own."""
    coordination_user: str = ""
    """User for an etcd with authentication turned on."""
    coordination_password: str = field(default="", repr=False)
    """Of that user; in a file as `${NAME}`, the environment variable that has it."""
    assigned_only: bool = False
    """With true, a partition that is assigned to nobody is taken by nobody; with false, who comes
    first has it. (What is on a worker's own disk it always serves.)"""
    listen_host: str = "127.0.0.1"
    """Address to listen on. The default is loopback: without `auth`, who reaches it may all."""
    listen_port: int = 8080
    """TCP port; 0 takes a free one."""
    flight_port: int | None = None
    """TCP port of Arrow Flight; 0 takes a free one, None serves no Flight."""
    advertise_url: str = ""
    """How other workers reach this one (`http://host:port`); empty: where it listens, by the
    host's name if that is every address."""
    session_ttl: Duration = Duration("10s")
    """A worker that the coordination store has not heard of for this long is taken for dead, and
    takes no message from then on until it has the store's word again."""
    socket_origins: tuple[str, ...] = ()
    """Web origins (`https://shop.example`) whose pages may open a WebSocket, besides those that
    come from the worker's own host; `*` stands for all."""
    shutdown_deadline: Duration = Duration("30s")
    """How long a shutdown may drain and commit before it gives up (nothing is lost then: the log
    has it, and the next start goes on)."""
    auth: AuthSettings = field(default_factory=AuthSettings)
    """Who may use the worker."""
    tls: TlsSettings | None = None
    """Certificates of the worker; None: plain HTTP."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on what callers can make grow."""

    def __post_init__(self) -> None:
        """Check what no type can say."""
        if not self.worker_id:
            raise ValueError("worker_id must not be empty")
        if not 0 <= self.listen_port <= 65_535:
            raise ValueError(f"listen_port {self.listen_port} is not a TCP port (0 to 65535)")
        if self.flight_port is not None and not 0 <= self.flight_port <= 65_535:
            raise ValueError(f"flight_port {self.flight_port} is not a TCP port (0 to 65535)")
        if self.session_ttl.ms < 1_000:
            raise ValueError("session_ttl must be at least 1s")
        if not self.coordination_prefix.strip("/"):
            raise ValueError("coordination_prefix must not be empty")
        if not self.coordination:
            raise ValueError("coordination must be a path of an SQLite file or etcd endpoints")

    def to_json(self) -> str:
        """Write as JSON text."""
        return _adapter().dump_json(self, indent=2).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "WorkerSettings":
        """Read from JSON text; raise Invalid that names the field."""
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            raise Invalid("InvalidSettings", "; ".join(problems(error))) from error


@cache
def _adapter() -> TypeAdapter["WorkerSettings"]:
    """Build the reader and writer once, and only in a process that needs it."""
    return TypeAdapter(WorkerSettings)


def parse_listen(text: str) -> tuple[str, int]:
    """Read `host:port`, `[v6]:port` or `:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise Invalid("InvalidListenAddress", f"{text!r} must be host:port, such as 127.0.0.1:8080")
    return (host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port))


def embedded(data_dir: Path, listen: str = "127.0.0.1:8080") -> WorkerSettings:
    """Return the settings of a worker that needs nothing else: all state under one directory."""
    data = data_dir.absolute()
    host, port = parse_listen(listen)
    return WorkerSettings(
        worker_id="dev",
        log_root=data / "log",
        run_dir=data / "run",
        coordination=str(data / "coordination.db"),
        catalog=CatalogSettings(
            properties={
                "type": "sql",
                "uri": f"sqlite:///{data / 'catalog.db'}",
                "warehouse": (data / "warehouse").as_uri(),
            }
        ),
        listen_host=host,
        listen_port=port,
    )
