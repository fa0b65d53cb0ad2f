"""What a table's metadata says of its health: whether it needs maintenance, and how much.

Everything is counted from the manifests of one snapshot. Manifests never change, so what each of
them adds up to is remembered: after a commit only the new ones are read, whatever the history is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema

from tidewater_core import names
from tidewater_core.compaction import TIME_MAX_US, UNITS, is_due, is_small, period_start
from tidewater_worker.table.ranges import FileRange, Lru, RangeIndex, column_ids
from tidewater_worker.table.view import TableView

TALLIES_MAX: Final = 50_000
"""Time spans of manifests that are remembered, over all tables."""
MANIFESTS_READ_MAX: Final = 50
"""Manifests that one look reads; the rest of a large table waits for the next looks."""
Span = tuple[int, int]
"""Files that compaction judges together: their table partition, and when their period began."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The small files of some manifests, by partition and the period of their newest row."""

    files: int = 0
    nbytes: int = 0
    by_span: Mapping[Span, tuple[int, int]] | None = None
    """Span → (files, bytes)."""


def tally(files: Iterable[FileRange], target_bytes: int, unit: str | None) -> Tally:
    """Count the small files of a manifest."""
    spans: dict[Span, tuple[int, int]] = {}
    total = nbytes = 0
    for file in files:
        if is_small(file.nbytes, target_bytes):
            newest = file.bounds.times[1]
            if newest <= TIME_MAX_US:  # of others nobody knows when they are closed
                span = (file.group, period_start(newest, unit))
                count, size = spans.get(span, (0, 0))
                spans[span] = (count + 1, size + file.nbytes)
            total += 1
            nbytes += file.nbytes
    return Tally(total, nbytes, spans)


def debt(
    tallies: Iterable[Tally], target_bytes: int, unit: str | None, now_us: int
) -> tuple[int, int]:
    """Return (files, bytes) that compaction would rewrite now, by the rule that it has itself."""
    spans: dict[Span, tuple[int, int]] = {}
    for one in tallies:
        for span, (count, size) in (one.by_span or {}).items():
            files, nbytes = spans.get(span, (0, 0))
            spans[span] = (files + count, nbytes + size)
    due = [
        found
        for (_, start_us), found in spans.items()
        if is_due(*found, start_us, target_bytes=target_bytes, now_us=now_us, unit=unit)
    ]
    return sum(files for files, _ in due), sum(nbytes for _, nbytes in due)


def unit_of(spec: PartitionSpec, schema: Schema) -> str | None:
    """Return the unit of time that a table is partitioned by; None if by none."""
    for field in spec.fields:
        if schema.find_column_name(field.source_id) == names.TW_TIME:
            unit = str(field.transform)
            return unit if unit in UNITS else None
    return None


class HealthIndex:
    """Counts what snapshots consist of. Thread-safe."""

    def __init__(self, index: RangeIndex) -> None:
        self._index = index
        self._tallies: Lru[Tally] = Lru(TALLIES_MAX)

    def look(self, view: TableView, target_bytes: int, now_us: int) -> dict[str, Any]:
        """Return counts that tell whether a table needs maintenance."""
        metadata = view.metadata
        snapshot = metadata.current_snapshot()
        io = view.table.io
        manifests = self._index.manifests_of(snapshot, io) if snapshot is not None else ()
        unit = unit_of(metadata.spec(), metadata.schema())
        found: list[Tally] = []
        unread = reads = 0
        for manifest in manifests:
            if manifest.content is not ManifestContent.DATA:
                continue
            key = f"{manifest.manifest_path}#{target_bytes}#{unit}"
            one = self._tallies.get(key)
            if one is None and reads >= MANIFESTS_READ_MAX:
                unread += 1
                continue
            if one is None:
                reads += 1
                files = self._index.files_of(manifest, column_ids(metadata.schema()), io)
                one = tally(files, target_bytes, unit)
                self._tallies.put(key, one, 1 + len(one.by_span or {}))
            found.append(one)
        debt_files, debt_bytes = debt(found, target_bytes, unit, now_us)
        return {
            **_summary(view),
            "manifests": len(manifests),
            "delete_files": _delete_files(manifests),
            "target_file_bytes": target_bytes,
            "small_files": sum(one.files for one in found),
            "small_bytes": sum(one.nbytes for one in found),
            "debt_files": debt_files,
            "debt_bytes": debt_bytes,
            "manifests_unread": unread,
        }


def _delete_files(manifests: Iterable[ManifestFile]) -> int:
    return sum(
        (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)
        for manifest in manifests
        if manifest.content is not ManifestContent.DATA
    )


def _summary(view: TableView) -> dict[str, Any]:
    """Return what the metadata says without any manifest."""
    metadata = view.metadata
    snapshot = metadata.current_snapshot()
    summary = snapshot.summary if snapshot is not None else None

    def total(name: str) -> int:
        return int(summary.get(name) or 0) if summary is not None else 0

    return {
        "table": ".".join(view.table.name()),
        "table_uuid": view.table_uuid,
        "location": metadata.location,
        "snapshot_id": view.snapshot_id,
        "snapshots": len(metadata.snapshots),
        "files": total("total-data-files"),
        "bytes": total("total-files-size"),
        "table_rows": total("total-records"),
        "metadata_versions": len(metadata.metadata_log) + 1,
        "committed_at_us": view.committed_at_us,
        "frontier": {str(p): frontier.next for p, frontier in view.frontiers.items()},
        "start": {str(p): start for p, start in view.starts.items()},
    }
