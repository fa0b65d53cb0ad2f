"""What a job knows of a table: plain values, read once from one version of its metadata. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tidewater_core import names
from tidewater_core.errors import Corrupt

MICROS: Final = 1_000_000


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
    """Bounds of `tw_time` in microseconds, both inclusive."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot that the metadata still has."""

    snapshot_id: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Size:
    """How large a table is: what a report compares."""

    files: int = 0
    nbytes: int = 0
    rows: int = 0
    snapshots: int = 0
    manifests: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the numbers for a report."""
        return {
            "files": self.files,
            "bytes": self.nbytes,
            "rows": self.rows,
            "snapshots": self.snapshots,
            "manifests": self.manifests,
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
    size: Size = Size()
    """Of the snapshot: what a report compares."""

    @property
    def is_local(self) -> bool:
        """Say if the table's files are on a disk of this machine."""
        return self.location.startswith(("file:", "/"))

    @property
    def frontiers(self) -> dict[int, int]:
        """Partition to the first offset that is not in the table."""
        return parse_frontiers(self.properties)

    @property
    def starts(self) -> dict[int, int]:
        """Partition to the first kept offset; 0 where retention has cut nothing."""
        starts = dict.fromkeys(self.frontiers, 0)
        return starts | parse_starts(self.properties)

    @property
    def gaps(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Partition to the offsets [start, end) that a person gave up with a volume."""
        return parse_gaps(self.properties)


def parse_frontiers(properties: Mapping[str, str]) -> dict[int, int]:
    """Read each partition's `next`; a value nobody can read stops the job (G7)."""
    found: dict[int, int] = {}
    for key, text in properties.items():
        partition = names.partition_of_frontier(key)
        if partition is None:
            continue
        try:
            number: Any = json.loads(text)["next"]
        except (ValueError, KeyError, TypeError):
            number = None
        if type(number) is not int or number < 0:
            raise Corrupt("FrontierDamaged", f"table property {key} is {text[:80]!r}")
        found[partition] = number
    return found


def parse_starts(properties: Mapping[str, str]) -> dict[int, int]:
    """Read the first kept offset of the partitions that retention has cut."""
    found: dict[int, int] = {}
    for key, text in properties.items():
        partition = names.partition_of_start(key)
        if partition is None:
            continue
        if not (text.isascii() and text.isdigit()):
            raise Corrupt("StartDamaged", f"table property {key} is {text[:80]!r}, not an offset")
        found[partition] = int(text)
    return found


def parse_gaps(properties: Mapping[str, str]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Read the recorded gaps of each partition, in order."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for key, text in properties.items():
        partition = names.partition_of_gap(key)
        if partition is None:
            continue
        try:
            pairs = [(gap["start"], gap["end"]) for gap in json.loads(text)]
        except (ValueError, KeyError, TypeError):
            pairs = [(-1, -1)]
        if any(type(n) is not int or n < 0 for pair in pairs for n in pair):
            raise Corrupt(
                "GapDamaged", f"table property {key} is {text[:80]!r}, not a list of gaps"
            )
        found[partition] = tuple(sorted(pairs))
    return found


def quoted(identifier: Iterable[str]) -> str:
    """Write an identifier for SQL: names of topics may have dashes."""
    escaped = (part.replace("`", "``") for part in identifier)
    return ".".join(f"`{part}`" for part in escaped)


def sql_text(text: str) -> str:
    """Write a string literal for SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
