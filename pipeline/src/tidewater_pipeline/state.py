"""What a job knows of a table: plain values, read once from one version of its metadata. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidewater_core.compaction import TIME_MAX_US, TIME_MIN_US
from tidewater_core.progress import parse_frontiers, parse_gaps, parse_starts


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A data file, as its manifest entry describes it."""

    path: str
    group: str
    """The table partition that it belongs to, as text; files of one group may be joined."""
    nbytes: int
    rows: int
    time_low_us: int
    time_high_us: int
    """Bounds of `tw_time` in microseconds, both inclusive; the widest where the table has none."""

    @property
    def is_dated(self) -> bool:
        """Say if the table knows the times of its rows."""
        return self.time_low_us > TIME_MIN_US and self.time_high_us < TIME_MAX_US


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot that the metadata still has."""

    snapshot_id: int
    timestamp_ms: int
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """How large a table is: what a report compares."""

    files: int = 0
    nbytes: int = 0
    rows: int = 0
    snapshots: int = 0
    manifests: int = 0
    delete_files: int = 0
    """Files of deleted rows (merge-on-read): history cannot be read past them."""

    def to_json(self) -> dict[str, int]:
        """Return the numbers for a report."""
        return {
            "files": self.files,
            "bytes": self.nbytes,
            "rows": self.rows,
            "snapshots": self.snapshots,
            "manifests": self.manifests,
            "delete_files": self.delete_files,
        }


@dataclass(frozen=True, slots=True)
class TableState:
    """One version of a table's metadata."""

    identifier: tuple[str, ...]
    location: str
    snapshot_id: int | None
    properties: Mapping[str, str]
    time_unit: str | None
    """`hour`, `day`, `month` or `year` if the table is partitioned by the time of `tw_time`."""
    snapshots: tuple[SnapshotInfo, ...] = ()
    refs: Mapping[str, int] = field(default_factory=dict)
    """Branches and tags: name to snapshot."""
    sort_order: tuple[str, ...] = ()
    """The columns by which the table says that its files are sorted, all ascending."""
    time_id: int = 0
    """The field id of `tw_time`, by which manifests store its bounds."""
    is_partitioned: bool = True
    """Whether its files belong to partitions, or once did."""
    uuid: str = ""
    """Identity of the table: names and places can come to be another's."""
    metadata_files: frozenset[str] = frozenset()
    """Earlier versions of the metadata that this one names."""
    size: Size = Size()
    """Of the snapshot: what a report compares."""

    @property
    def sequence(self) -> int:
        """The sequence number of the snapshot; 0 if there is none."""
        found = [each.sequence for each in self.snapshots if each.snapshot_id == self.snapshot_id]
        return found[0] if found else 0

    @property
    def delete_files(self) -> int:
        """Files of deleted rows in the snapshot."""
        return self.size.delete_files

    @property
    def is_local(self) -> bool:
        """Say if the table's files are on a disk of this machine."""
        return self.location.startswith(("file:", "/"))

    @property
    def frontiers(self) -> dict[int, int]:
        """Partition to the first offset that is not in the table."""
        found = parse_frontiers(self.properties)
        return {partition: each.next for partition, each in found.items()}

    @property
    def starts(self) -> dict[int, int]:
        """Partition to the first kept offset; 0 where retention has cut nothing."""
        starts = dict.fromkeys(self.frontiers, 0)
        return starts | parse_starts(self.properties)

    @property
    def gaps(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Partition to the offsets [start, end) that a person gave up with a volume."""
        return parse_gaps(self.properties)


def quoted(identifier: Iterable[str]) -> str:
    """Write an identifier for SQL: names of topics may have dashes."""
    escaped = (part.replace("`", "``") for part in identifier)
    return ".".join(f"`{part}`" for part in escaped)


def sql_text(text: str) -> str:
    """Write a string literal for SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
