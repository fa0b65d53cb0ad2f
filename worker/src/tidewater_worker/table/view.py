"""A table as loaded, with what Tidewater keeps in it read out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH

from tidewater_core import names
from tidewater_worker.table.frontier import Frontier, parse_frontiers, parse_gaps, parse_starts


@dataclass(frozen=True, slots=True)
class TableView:
    """One state of a table."""

    table: Table
    metadata: TableMetadata
    frontiers: Mapping[int, Frontier]
    starts: Mapping[int, int]
    gaps: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @property
    def table_uuid(self) -> str:
        """Identity of the table: another one under the same name is a replaced table."""
        return str(self.metadata.table_uuid)

    @property
    def topic_uuid(self) -> str:
        """Identity of the topic that the table belongs to."""
        return self.metadata.properties.get(names.TOPIC_UUID, "")

    @property
    def topic(self) -> str:
        """Name of the topic that the table was made for."""
        return self.metadata.properties.get(names.TOPIC, "")

    @property
    def snapshot_id(self) -> int | None:
        """The head of `main`, which is what a commit requires."""
        ref = self.metadata.refs.get(MAIN_BRANCH)
        return ref.snapshot_id if ref is not None else None

    @property
    def committed_at_us(self) -> int:
        """When the newest snapshot was made; 0 if there is none."""
        snapshot = self.metadata.current_snapshot()
        return snapshot.timestamp_ms * 1_000 if snapshot is not None else 0


def view_of(table: Table) -> TableView:
    """Read a loaded table."""
    properties = table.metadata.properties
    return TableView(
        table,
        table.metadata,
        parse_frontiers(properties),
        parse_starts(properties),
        parse_gaps(properties),
    )


def view_after(before: TableView, response: CommitTableResponse) -> TableView:
    """Read the state that a commit has answered with."""
    table = Table(
        identifier=before.table.name(),
        metadata=response.metadata,
        metadata_location=response.metadata_location,
        io=before.table.io,
        catalog=before.table.catalog,
        config=before.table.config,
    )
    return view_of(table)
