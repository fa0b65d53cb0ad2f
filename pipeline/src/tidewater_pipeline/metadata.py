"""A table's metadata file, as Iceberg writes it, to what a job knows of the table. Pure.

One text instead of the objects behind it: asking a JVM for each snapshot, property and field costs
a round trip every time, and a table with hundreds of snapshots took longer to look at than to plan.
"""

from collections.abc import Mapping
from typing import Any, Final

from tidewater_core.names import TW_TIME
from tidewater_pipeline.state import Size, SnapshotInfo, TableState

NONE: Final = -1
"""The id of a snapshot that is not there, as older versions of the format write it."""
_UNITS: Final = frozenset({"hour", "day", "month", "year"})

Json = Mapping[str, Any]


def state_of(identifier: tuple[str, ...], metadata: Json, manifests: int = 0) -> TableState:
    """Read one version of the metadata; `manifests` are those of its current snapshot."""
    current = metadata.get("current-snapshot-id")
    snapshots = metadata.get("snapshots") or []
    columns = _columns(metadata)
    return TableState(
        identifier=identifier,
        location=metadata["location"],
        snapshot_id=None if current in (None, NONE) else current,
        properties=metadata.get("properties") or {},
        time_unit=_time_unit(metadata, columns),
        snapshots=tuple(
            SnapshotInfo(each["snapshot-id"], each["timestamp-ms"], each.get("sequence-number", 0))
            for each in snapshots
        ),
        refs={name: each["snapshot-id"] for name, each in (metadata.get("refs") or {}).items()},
        sort_order=_sort_order(metadata, columns),
        time_id=next((number for number, name in columns.items() if name == TW_TIME), 0),
        is_partitioned=any(spec["fields"] for spec in metadata["partition-specs"]),
        uuid=metadata.get("table-uuid", ""),
        metadata_files=frozenset(
            each["metadata-file"] for each in metadata.get("metadata-log") or []
        ),
        size=_size(snapshots, current, manifests),
    )


def _columns(metadata: Json) -> dict[int, str]:
    """Return the columns of the current schema by id; those within others are of no use here."""
    schemas = {each["schema-id"]: each for each in metadata["schemas"]}
    fields = schemas[metadata["current-schema-id"]]["fields"]
    return {field["id"]: field["name"] for field in fields}


def _size(snapshots: list[Json], current: int | None, manifests: int) -> Size:
    """Count what a report compares: from the snapshot's own summary, which is at hand."""
    found = [each for each in snapshots if each["snapshot-id"] == current]
    if not found:
        return Size(snapshots=len(snapshots))
    summary = found[0].get("summary") or {}
    return Size(
        files=int(summary.get("total-data-files", 0)),
        nbytes=int(summary.get("total-files-size", 0)),
        rows=int(summary.get("total-records", 0)),
        snapshots=len(snapshots),
        manifests=manifests,
        delete_files=int(summary.get("total-delete-files", 0)),
    )


def _sort_order(metadata: Json, columns: Mapping[int, str]) -> tuple[str, ...]:
    """Name the columns of the table's declared order; empty if it is not simply ascending."""
    orders = {each["order-id"]: each["fields"] for each in metadata["sort-orders"]}
    fields = orders[metadata["default-sort-order-id"]]
    if any(
        field["direction"] != "asc"
        or field["transform"] != "identity"
        or field["source-id"] not in columns
        for field in fields
    ):
        return ()
    return tuple(columns[field["source-id"]] for field in fields)


def _time_unit(metadata: Json, columns: Mapping[int, str]) -> str | None:
    """Name the transform of `tw_time` by which the table is partitioned."""
    specs = {each["spec-id"]: each["fields"] for each in metadata["partition-specs"]}
    for field in specs[metadata["default-spec-id"]]:
        if columns.get(field["source-id"]) == TW_TIME and field["transform"] in _UNITS:
            return str(field["transform"])
    return None
