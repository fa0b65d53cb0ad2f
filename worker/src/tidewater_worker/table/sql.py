"""The SQL catalog, made fit for many commits and several processes.

Imported only where an SQL catalog is configured: it costs memory.
"""

from typing import Any, Final

from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, ProgrammingError
from sqlalchemy.pool import StaticPool

from tidewater_worker.table.lean import LeanCatalog
from tidewater_worker.table.patience import connect_timeout_s, read_timeout_s

SQLITE_BUSY_TIMEOUT_MS: Final = 30_000
"""How long one process waits for another that is writing to the catalog's file."""
KEEPALIVE_PROBES: Final = 3
MEMORY_WAREHOUSE: Final = "file:///tmp/tidewater/warehouse"


class LeanSqlCatalog(LeanCatalog, SqlCatalog):
    """SqlCatalog with cheap commits."""


def open_sql(name: str, properties: dict[str, str]) -> SqlCatalog:
    """Open a catalog in SQLite or PostgreSQL."""
    try:
        try:
            return _open_sql(name, dict(properties))
        except (IntegrityError, ProgrammingError):
            # Another worker made the catalog's own tables at the same moment: now they are there.
            return _open_sql(name, dict(properties))
    except ArgumentError as error:
        raise ValueError(f"uri {properties['uri'][:20]!r}…: {error}") from error


def _open_sql(name: str, properties: dict[str, str]) -> SqlCatalog:
    url = make_url(properties["uri"])
    sqlite = url.get_backend_name() == "sqlite"
    if sqlite:
        # The driver's own wait applies from the first statement, before any pragma can be set.
        url = url.update_query_dict({"timeout": str(SQLITE_BUSY_TIMEOUT_MS / 1000)})
    else:
        # What the address says itself comes first.
        url = url.set(query={**_postgres_patience(properties), **url.query})
        # A connection that the server dropped while we were idle must not fail a commit.
        properties.setdefault("pool_pre_ping", "true")
    properties["uri"] = url.render_as_string(hide_password=False)
    catalog = LeanSqlCatalog(name, **properties)
    if sqlite:
        event.listen(catalog.engine, "connect", _prepare_sqlite)
        catalog.engine.dispose()
    return catalog


def _postgres_patience(properties: dict[str, str]) -> dict[str, str]:
    """Give up on a server whose machine or network is gone: libpq would wait for hours."""
    read_s = read_timeout_s(properties)
    pause_s = max(1, round(read_s / (KEEPALIVE_PROBES + 1)))
    return {
        "connect_timeout": str(max(1, round(connect_timeout_s(properties)))),
        "tcp_user_timeout": str(round(read_s * 1000)),
        "keepalives_idle": str(pause_s),
        "keepalives_interval": str(pause_s),
        "keepalives_count": str(KEEPALIVE_PROBES),
    }


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
