"""What the checker looks at: a topic's table, read through pyiceberg, and its log, read by `wal`.

Nothing here asks a worker anything: a worker that lies, or is dead, changes nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from tidewater_testing import wal

CATALOG_NAME = "tidewater"


@dataclass(frozen=True)
class Row:
    """A stored message."""

    offset: int
    payload: bytes
    time_us: int = 0


@dataclass(frozen=True)
class TableSide:
    """One partition as the table has it."""

    next: int = 0
    """The frontier: the first offset that is not in the table yet."""
    epoch: int = 0
    start: int = 0
    """The first offset that retention has kept."""
    rows: tuple[Row, ...] = ()
    """In the order of offsets; duplicates stay."""


@dataclass(frozen=True)
class LogSide:
    """One partition as the log has it."""

    rows: tuple[Row, ...] = ()

    @property
    def start(self) -> int | None:
        """The first offset of the log."""
        return self.rows[0].offset if self.rows else None


@dataclass(frozen=True)
class Evidence:
    """Table and log of a topic, by partition."""

    table: Mapping[int, TableSide] = field(default_factory=dict)
    log: Mapping[int, LogSide] = field(default_factory=dict)
    commit_ids: tuple[str, ...] = ()
    """Of the snapshots that are still in the table's metadata."""


def load_table(properties: Mapping[str, str], topic: str) -> Table:
    """Open a topic's table (`namespace/name`) by the catalog's properties."""
    namespace, _, name = topic.partition("/")
    return load_catalog(CATALOG_NAME, **properties).load_table((namespace, name))


def gather(
    properties: Mapping[str, str], log_root: Path, topic: str, payload: str = "value"
) -> Evidence:
    """Read a topic's table and log; `payload` is the column that holds the unique bytes."""
    table = load_table(properties, topic)
    log: dict[int, LogSide] = {}
    for directory in sorted((log_root / topic).glob("[0-9]*")):
        log[int(directory.name)] = read_log_side(directory, payload)
    snapshots = [snapshot.summary for snapshot in table.metadata.snapshots]
    ids = [
        summary.additional_properties.get("tidewater.commit-id") for summary in snapshots if summary
    ]
    return Evidence(read_table_sides(table, payload), log, tuple(i for i in ids if i))


def read_log_side(directory: Path, payload: str = "value") -> LogSide:
    """Read a partition's log directory."""
    rows: list[Row] = []
    for segment in wal.read_log(directory):
        for frame in segment.frames:
            times = frame.batch.column("tw_time").cast(pa.int64()).to_pylist()
            values = frame.batch.column(payload).cast(pa.binary()).to_pylist()
            rows.extend(
                Row(frame.base_offset + i, value or b"", time)
                for i, (value, time) in enumerate(zip(values, times, strict=True))
            )
    return LogSide(tuple(rows))


def read_table_sides(table: Table, payload: str = "value") -> dict[int, TableSide]:
    """Read a table's rows and frontiers by partition."""
    fields = ("tw_partition", "tw_offset", "tw_time", payload)
    rows = table.scan(selected_fields=fields).to_arrow()
    rows = rows.sort_by([("tw_partition", "ascending"), ("tw_offset", "ascending")])
    by_partition: dict[int, list[Row]] = {}
    for partition, offset, time, value in zip(
        rows["tw_partition"].to_pylist(),
        rows["tw_offset"].to_pylist(),
        rows["tw_time"].cast(pa.int64()).to_pylist(),
        rows[payload].cast(pa.binary()).to_pylist(),
        strict=True,
    ):
        by_partition.setdefault(partition, []).append(Row(offset, value or b"", time))
    sides: dict[int, TableSide] = {}
    frontiers = _frontiers(table)
    for partition in sorted(frontiers.keys() | by_partition.keys()):
        frontier = frontiers.get(partition, {})
        start = table.properties.get(f"tidewater.start.{partition}", "0")
        sides[partition] = TableSide(
            next=frontier.get("next", 0),
            epoch=frontier.get("epoch", 0),
            start=json.loads(start),
            rows=tuple(by_partition.get(partition, ())),
        )
    return sides


def _frontiers(table: Table) -> dict[int, dict[str, int]]:
    prefix = "tidewater.partition."
    return {
        int(key.removeprefix(prefix)): json.loads(value)
        for key, value in table.properties.items()
        if key.startswith(prefix)
    }
