"""Named instants of a table: how far each partition was in a snapshot."""

from collections.abc import Callable, Iterable

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from tidewater_core import names
from tidewater_core.errors import Conflict, NotFound
from tidewater_worker.table.frontier import parse_frontiers
from tidewater_worker.table.view import TableView

RowsEnd = Callable[[int, int], int | None]
"""(snapshot, partition) → the end of the partition's rows in the snapshot; None: it has none."""


def repeated_frontiers(view: TableView) -> dict[str, str]:
    """Return the frontiers that the next snapshot's summary repeats, as properties.

    They are those that the head and its ancestors carry: a property alone would hide that the
    table was rolled back below it. Only where no snapshot is left that knows, the property counts.
    """
    wanted = {names.frontier_property(p): f.to_property() for p, f in view.frontiers.items()}
    return {**wanted, **_carried(view.metadata, view.metadata.current_snapshot(), wanted)}


def frontier_at(
    view: TableView, snapshot_id: int | None, tag: str | None, rows_end: RowsEnd
) -> dict[int, int]:
    """Return each partition's frontier in a snapshot, named by its id or tag.

    Our snapshots carry it in their summary. One that another engine made (compaction) has the same
    rows as its parent, so the newest ancestor that carries a partition's frontier tells it. Where
    the ancestors are expired, the rows of the snapshot do.
    """
    snapshot = _find(view.metadata, snapshot_id, tag)
    wanted = [names.frontier_property(partition) for partition in view.frontiers]
    carried = parse_frontiers(_carried(view.metadata, snapshot, wanted))
    ends = {partition: frontier.next for partition, frontier in carried.items()}
    if not wanted:
        raise Conflict(
            "NoFrontier",
            f"snapshot {snapshot.snapshot_id} does not say how far the partitions were; start "
            "from a timestamp or an offset",
        )
    for partition in view.frontiers.keys() - ends.keys():
        end = rows_end(snapshot.snapshot_id, partition)
        # Without a row there: it had none yet, or retention has removed all that it had.
        ends[partition] = view.starts.get(partition, 0) if end is None else end
    return ends


def _carried(
    metadata: TableMetadata, snapshot: Snapshot | None, wanted: Iterable[str]
) -> dict[str, str]:
    """Return the frontiers that the newest of a snapshot and its ancestors carries, as they are."""
    missing = set(wanted)
    found: dict[str, str] = {}
    by_id: dict[int, Snapshot] | None = None
    while snapshot is not None and missing:
        summary = snapshot.summary.additional_properties if snapshot.summary else {}
        found |= {key: summary[key] for key in missing & summary.keys()}
        missing -= found.keys()
        if missing and by_id is None:
            by_id = {each.snapshot_id: each for each in metadata.snapshots}
        parent = snapshot.parent_snapshot_id
        snapshot = by_id.get(parent) if by_id and parent is not None else None
    return found


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
