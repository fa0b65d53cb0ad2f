"""Named instants of a table: how far each partition was in a snapshot."""

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from tidewater_core.errors import Conflict, NotFound
from tidewater_worker.table.frontier import parse_frontiers
from tidewater_worker.table.view import TableView


def frontier_at(view: TableView, snapshot_id: int | None, tag: str | None) -> dict[int, int]:
    """Return each partition's frontier in a snapshot, named by its id or tag.

    Our snapshots carry it in their summary. One that another engine made (compaction) has the same
    rows as its parent, so the newest ancestor that carries a partition's frontier tells it.
    """
    snapshot = _find(view.metadata, snapshot_id, tag)
    ends: dict[int, int] = {}
    at: Snapshot | None = snapshot
    while at is not None:
        summary = at.summary.additional_properties if at.summary else {}
        for partition, frontier in parse_frontiers(summary).items():
            ends.setdefault(partition, frontier.next)
        parent = at.parent_snapshot_id
        at = view.metadata.snapshot_by_id(parent) if parent is not None else None
    if not ends:
        raise Conflict(
            "NoFrontier",
            f"snapshot {snapshot.snapshot_id} and those before it that are still there do not say "
            "how far the partitions were; start from a timestamp or an offset",
        )
    return ends


def _find(metadata: TableMetadata, snapshot_id: int | None, tag: str | None) -> Snapshot:
    if tag is not None:
        ref = metadata.refs.get(tag)
        if ref is None:
            raise NotFound("UnknownTag", f"the table has no tag {tag!r}")
        snapshot_id = ref.snapshot_id
    found = metadata.snapshot_by_id(snapshot_id) if snapshot_id is not None else None
    if found is None:
        raise NotFound(
            "UnknownSnapshot", f"the table has no snapshot {snapshot_id}; it may have expired"
        )
    return found
