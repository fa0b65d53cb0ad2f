"""Building a commit: manifest, manifest list, snapshot, updates and requirements, once.

pyiceberg's own transaction copies the metadata at every access and rebases an append that was
refused, which would re-apply a zombie's rows. Here everything is built once against the metadata
that was just looked at, and requires exactly that state.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from uuid import UUID

from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, Summary, update_snapshot_summaries
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)

from tidewater_core import names
from tidewater_core.hold import held_from
from tidewater_worker.table.expiry import SnapshotAge, plan_expiry
from tidewater_worker.table.frontier import Frontier, Span
from tidewater_worker.table.snapshots import repeated_frontiers
from tidewater_worker.table.tiers import MERGED_FILES_MAX, ManifestSize, plan_merge
from tidewater_worker.table.view import TableView

AVRO_CODEC: Final[Literal["deflate"]] = "deflate"
ENTRIES_CACHED_MAX: Final = 4 * MERGED_FILES_MAX
"""Entries of small manifests kept in memory, so that merging them reads nothing back."""


@dataclass(slots=True)
class Prepared:
    """Rows that are in files and wait for a commit; the same over all attempts.

    The snapshot id is kept, too: should an attempt of unknown outcome land late, the catalog
    has that snapshot already.
    """

    snapshot_id: int
    commit_id: UUID
    spans: Mapping[int, Span]
    files: Sequence[DataFile]
    spec: PartitionSpec | None
    """Partitioning that the files were written with; None when there are none."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Further properties to set in the same commit."""
    manifest: ManifestFile | None = None
    """Written at the first attempt and used by all."""
    manifest_schema_id: int = -1
    attempts: int = 0

    @property
    def rows(self) -> int:
        """How many rows."""
        return sum(span.end - span.first for span in self.spans.values())


@dataclass(frozen=True, slots=True)
class Proposal:
    """A commit, ready to be sent."""

    requirements: tuple[TableRequirement, ...]
    updates: tuple[TableUpdate, ...]
    snapshot_id: int
    manifests: tuple[ManifestFile, ...]
    removed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which snapshots the table keeps."""

    count_max: int
    age_ms_max: int
    pinned: frozenset[int] = frozenset()


class ManifestCache:
    """The manifests of the last snapshot we committed, and entries of the small ones.

    Only what this process wrote itself, so it can never be stale: manifests are immutable and the
    list is used only while that snapshot is the head.
    """

    def __init__(self) -> None:
        self._snapshot_id: int | None = None
        self._manifests: tuple[ManifestFile, ...] = ()
        self._entries: OrderedDict[str, list[ManifestEntry]] = OrderedDict()
        self._count = 0

    def manifests(self, view: TableView) -> tuple[ManifestFile, ...]:
        """Return the manifests of the head."""
        head = view.snapshot_id
        if head is None:
            return ()
        if head == self._snapshot_id:
            return self._manifests
        snapshot = view.metadata.snapshot_by_id(head)
        assert snapshot is not None
        return tuple(snapshot.manifests(view.table.io))

    def remember(self, snapshot_id: int, manifests: tuple[ManifestFile, ...]) -> None:
        """Note what our commit left as the head."""
        self._snapshot_id, self._manifests = snapshot_id, manifests

    def entries(self, io: FileIO, manifest: ManifestFile) -> list[ManifestEntry]:
        """Return the live entries of a manifest."""
        cached = self._entries.get(manifest.manifest_path)
        return manifest.fetch_manifest_entry(io) if cached is None else cached

    def keep(self, path: str, entries: list[ManifestEntry]) -> None:
        """Keep the entries of a manifest that will be merged soon."""
        if path not in self._entries:
            self._count += len(entries)
        self._entries[path] = entries
        while self._count > ENTRIES_CACHED_MAX:
            self.drop(next(iter(self._entries)))

    def drop(self, path: str) -> None:
        """Forget a manifest's entries."""
        self._count -= len(self._entries.pop(path, []))


def propose(
    view: TableView,
    prepared: Prepared,
    frontiers: Mapping[int, Frontier],
    cache: ManifestCache,
    keeping: Keeping,
    now_ms: int,
) -> Proposal:
    """Build the commit that adds prepared files and sets frontiers on the state of `view`."""
    metadata = view.metadata
    parent = metadata.snapshot_by_id(view.snapshot_id) if view.snapshot_id is not None else None
    sequence = metadata.next_sequence_number()
    prepared.attempts += 1
    manifests = [*_new_manifest(view, prepared, sequence, cache), *_kept(cache.manifests(view))]
    manifests = _merge(view, prepared, manifests, sequence, cache)
    location = view.table.location_provider().new_metadata_location(
        f"snap-{prepared.snapshot_id}-{prepared.attempts}-{prepared.commit_id}.avro"
    )
    with write_manifest_list(
        format_version=2,
        output_file=view.table.io.new_output(location),
        snapshot_id=prepared.snapshot_id,
        parent_snapshot_id=view.snapshot_id,
        sequence_number=sequence,
        avro_compression=AVRO_CODEC,
    ) as writer:
        if manifests:
            writer.add_manifests(manifests)
    written = {names.frontier_property(p): f.to_property() for p, f in frontiers.items()}
    summary = Summary(
        Operation.APPEND,
        **_added(prepared.files),
        **{**repeated_frontiers(view), **written},
        **{names.COMMIT_ID: str(prepared.commit_id)},
    )
    snapshot = Snapshot(
        snapshot_id=prepared.snapshot_id,
        parent_snapshot_id=view.snapshot_id,
        sequence_number=sequence,
        timestamp_ms=max(now_ms, metadata.last_updated_ms),
        manifest_list=location,
        summary=update_snapshot_summaries(
            summary, parent.summary.additional_properties if parent and parent.summary else None
        ),
        schema_id=metadata.current_schema_id,
    )
    removed = _expired(view, keeping, now_ms)
    return Proposal(
        requirements=(
            AssertTableUUID(uuid=metadata.table_uuid),
            AssertRefSnapshotId(ref=MAIN_BRANCH, snapshot_id=view.snapshot_id),
            AssertCurrentSchemaId(current_schema_id=metadata.current_schema_id),
        ),
        updates=(
            AddSnapshotUpdate(snapshot=snapshot),
            SetSnapshotRefUpdate(
                ref_name=MAIN_BRANCH,
                type=SnapshotRefType.BRANCH,
                snapshot_id=prepared.snapshot_id,
                **_branch_settings(view),
            ),
            SetPropertiesUpdate(updates={**prepared.properties, **written}),
            # One each: older catalog servers take a single id per update.
            *(RemoveSnapshotsUpdate(snapshot_ids=[removed_id]) for removed_id in removed),
        ),
        snapshot_id=prepared.snapshot_id,
        manifests=tuple(manifests),
        removed=tuple(removed),
    )


def _branch_settings(view: TableView) -> dict[str, int | None]:
    """Keep what somebody has set on the branch: setting the ref replaces all of it."""
    ref = view.metadata.refs.get(MAIN_BRANCH)
    return {
        "max_ref_age_ms": ref.max_ref_age_ms if ref else None,
        "max_snapshot_age_ms": ref.max_snapshot_age_ms if ref else None,
        "min_snapshots_to_keep": ref.min_snapshots_to_keep if ref else None,
    }


def _added(files: Sequence[DataFile]) -> dict[str, str]:
    """Return the counts of a snapshot summary."""
    if not files:
        return {}
    return {
        "added-data-files": str(len(files)),
        "added-records": str(sum(file.record_count for file in files)),
        "added-files-size": str(sum(file.file_size_in_bytes for file in files)),
        "changed-partition-count": str(len({tuple(file.partition._data) for file in files})),
    }


def _kept(manifests: Sequence[ManifestFile]) -> list[ManifestFile]:
    """Drop manifests that name no live file: only the snapshot that made them needed them."""
    return [m for m in manifests if m.has_added_files() or m.has_existing_files()]


def _new_manifest(
    view: TableView, prepared: Prepared, sequence: int, cache: ManifestCache
) -> list[ManifestFile]:
    """Write the manifest of the new files, or take the one of an earlier attempt."""
    if not prepared.files:
        return []
    schema = view.metadata.schema()
    if prepared.manifest is None or prepared.manifest_schema_id != schema.schema_id:
        assert prepared.spec is not None
        name = f"{prepared.commit_id}-m{prepared.attempts}.avro"
        path = view.table.location_provider().new_metadata_location(name)
        with write_manifest(
            format_version=2,
            spec=prepared.spec,
            schema=schema,
            output_file=view.table.io.new_output(path),
            snapshot_id=prepared.snapshot_id,
            avro_compression=AVRO_CODEC,
        ) as writer:
            for file in prepared.files:
                writer.add(_entry(ManifestEntryStatus.ADDED, prepared.snapshot_id, None, file))
        prepared.manifest = writer.to_manifest_file()
        prepared.manifest_schema_id = schema.schema_id
    cache.keep(
        prepared.manifest.manifest_path,
        [
            _entry(ManifestEntryStatus.ADDED, prepared.snapshot_id, sequence, file)
            for file in prepared.files
        ],
    )
    return [prepared.manifest]


def _entry(
    status: ManifestEntryStatus, snapshot_id: int, sequence: int | None, file: DataFile
) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=status,
        snapshot_id=snapshot_id,
        sequence_number=sequence,
        file_sequence_number=sequence,
        data_file=file,
    )


def _merge(
    view: TableView,
    prepared: Prepared,
    manifests: list[ManifestFile],
    sequence: int,
    cache: ManifestCache,
) -> list[ManifestFile]:
    """Merge one full tier of manifests, the new one left alone."""
    specs = view.metadata.specs()
    sizes = [
        ManifestSize(
            files=(m.added_files_count or 0) + (m.existing_files_count or 0),
            spec_id=m.partition_spec_id,
            mergeable=m.content == ManifestContent.DATA
            and m is not prepared.manifest
            and m.partition_spec_id in specs,
        )
        for m in manifests
    ]
    chosen = plan_merge(sizes)
    if not chosen:
        return manifests
    entries: list[ManifestEntry] = []
    for position in reversed(chosen):
        entries += cache.entries(view.table.io, manifests[position])
    name = f"{prepared.commit_id}-r{prepared.attempts}.avro"
    path = view.table.location_provider().new_metadata_location(name)
    with write_manifest(
        format_version=2,
        spec=specs[manifests[chosen[0]].partition_spec_id],
        schema=view.metadata.schema(),
        output_file=view.table.io.new_output(path),
        snapshot_id=prepared.snapshot_id,
        avro_compression=AVRO_CODEC,
    ) as writer:
        for entry in entries:
            writer.existing(entry)
    merged = writer.to_manifest_file()
    if len(entries) < MERGED_FILES_MAX:
        cache.keep(path, entries)
    for position in chosen:
        cache.drop(manifests[position].manifest_path)
    rest = [m for position, m in enumerate(manifests) if position not in chosen]
    at = chosen[0] - sum(1 for position in chosen if position < chosen[0])
    return [*rest[:at], merged, *rest[at:]]


def _expired(view: TableView, keeping: Keeping, now_ms: int) -> list[int]:
    """Choose the snapshots that this commit removes from the metadata."""
    named = {ref.snapshot_id for ref in view.metadata.refs.values()}
    return plan_expiry(
        (
            SnapshotAge(s.snapshot_id, s.timestamp_ms, s.sequence_number or 0)
            for s in view.metadata.snapshots
        ),
        keep=frozenset(named | keeping.pinned),
        count_max=keeping.count_max,
        age_ms_max=keeping.age_ms_max,
        now_ms=now_ms,
        held_from=held_from(view.metadata.properties, now_ms),
    )
