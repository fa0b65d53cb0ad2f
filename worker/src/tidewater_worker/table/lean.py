"""Commits of catalogs that write the table's metadata themselves (SQL, Glue), made cheap."""

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.table import StagedTable, Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.update import (
    TableRequirement,
    TableUpdate,
    _apply_table_update,
    _TableMetadataUpdateContext,
    _update_table_metadata_log,
)


class LeanCatalog(MetastoreCatalog):
    """A catalog without the deep copy of all metadata that each commit makes.

    The copy took a third of a commit's CPU and grew with the number of snapshots. Nothing here
    changes metadata in place, so there is nothing to protect by copying.
    """

    def _update_and_stage_table(
        self,
        current_table: Table | None,
        table_identifier: tuple[str, ...],
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> StagedTable:
        if current_table is None:
            return super()._update_and_stage_table(
                current_table, table_identifier, requirements, updates
            )
        for requirement in requirements:
            requirement.validate(current_table.metadata)
        context = _TableMetadataUpdateContext()
        metadata = current_table.metadata
        for update in updates:
            metadata = _apply_table_update(update, metadata, context)
        if context.has_changes():
            metadata = _update_table_metadata_log(
                metadata, current_table.metadata_location, current_table.metadata.last_updated_ms
            )
        metadata.spec().check_compatible(metadata.schema())
        metadata.sort_order().check_compatible(metadata.schema())
        version = self._parse_metadata_version(current_table.metadata_location) + 1
        provider = load_location_provider(metadata.location, metadata.properties)
        location = provider.new_table_metadata_file_location(version)
        return StagedTable(
            identifier=table_identifier,
            metadata=metadata,
            metadata_location=location,
            io=self._load_file_io(properties=metadata.properties, location=location),
            catalog=self,
        )
