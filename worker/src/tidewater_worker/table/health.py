"""What a table's metadata says of its health. Pure."""

from typing import Any

from tidewater_worker.table.view import TableView


def table_health(view: TableView) -> dict[str, Any]:
    """Return counts that tell whether a table needs maintenance."""
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
        "manifests": len(snapshot.manifests(view.table.io)) if snapshot is not None else 0,
        "metadata_versions": len(metadata.metadata_log) + 1,
        "committed_at_us": view.committed_at_us,
        "frontier": {str(p): frontier.next for p, frontier in view.frontiers.items()},
        "start": {str(p): start for p, start in view.starts.items()},
    }
