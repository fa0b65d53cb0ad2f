"""The SQL catalog, made fit for many commits and several processes.

Imported only where an SQL catalog is configured: it costs memory.
"""

from typing import Any, Final

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StagedTable, Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.update import (
    TableRequirement,
    TableUpdate,
    _apply_table_update,
    _TableMetadataUpdateContext,
    _update_table_metadata_log,
)
from sqlalchemy import create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import StaticPool

SQLITE_BUSY_TIMEOUT_MS: Final = 30_000
"""How long one process waits for another that is writing to the catalog's file."""
POSTGRES_CONNECT_TIMEOUT_S: Final = 5
MEMORY_WAREHOUSE: Final = "file:///tmp/tidewater/warehouse"


class LeanSqlCatalog(SqlCatalog):
    """SqlCatalog without the deep copy of all metadata that each commit makes.

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


def open_sql(name: str, properties: dict[str, str]) -> SqlCatalog:
    """Open a catalog in SQLite or PostgreSQL."""
    try:
        return _open_sql(name, properties)
    except ArgumentError as error:
        raise ValueError(f"uri {properties['uri'][:20]!r}…: {error}") from error


def _open_sql(name: str, properties: dict[str, str]) -> SqlCatalog:
    url = make_url(properties["uri"])
    sqlite = url.get_backend_name() == "sqlite"
    if sqlite:
        # The driver's own wait applies from the first statement, before any pragma can be set.
        url = url.update_query_dict({"timeout": str(SQLITE_BUSY_TIMEOUT_MS / 1000)})
    else:
        url = url.update_query_dict({"connect_timeout": str(POSTGRES_CONNECT_TIMEOUT_S)})
        # A connection that the server dropped while we were idle must not fail a commit.
        properties.setdefault("pool_pre_ping", "true")
    properties["uri"] = url.render_as_string(hide_password=False)
    catalog = LeanSqlCatalog(name, **properties)
    if sqlite:
        event.listen(catalog.engine, "connect", _prepare_sqlite)
        catalog.engine.dispose()
    return catalog


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """Let readers and one writer of several processes work side by side, and lose nothing."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    # An acknowledged commit must survive power loss: NORMAL would not sync the WAL at commit.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def open_in_memory(name: str, properties: dict[str, str]) -> SqlCatalog:
    """Make a catalog that lives as long as this process; one connection serves all threads."""
    properties.setdefault("warehouse", MEMORY_WAREHOUSE)
    catalog = LeanSqlCatalog(name, **{**properties, "uri": "sqlite://"})
    catalog.engine.dispose()
    catalog.engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    catalog.create_tables()
    return catalog
