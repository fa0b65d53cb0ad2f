"""DuckDB as a second engine: reads tables that it did not write, through code that is not ours."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
from pyiceberg.table import Table

EXTENSIONS = ("avro", "httpfs", "iceberg")


def connect(properties: Mapping[str, str] | None = None) -> Any:
    """Open DuckDB with its Iceberg extension; `properties` of the catalog give it S3 access."""
    connection = duckdb.connect()
    for name in EXTENSIONS:
        # The extensions come as packages: they cannot be downloaded at run time.
        connection.execute(f"LOAD '{_extension(name)}'")
    if properties and "s3.endpoint" in properties:
        endpoint = properties["s3.endpoint"].partition("://")[2]
        connection.execute(
            f"""CREATE SECRET (TYPE s3, KEY_ID '{properties["s3.access-key-id"]}',
            SECRET '{properties["s3.secret-access-key"]}', REGION '{properties["s3.region"]}',
            ENDPOINT '{endpoint}', URL_STYLE 'path', USE_SSL false)"""
        )
    return connection


def query(sql: str, table: Table, properties: Mapping[str, str] | None = None) -> list[Any]:
    """Run `sql`, in which `{table}` stands for a scan of the table's newest metadata."""
    location = table.metadata_location
    if location.startswith("file:/"):
        location = "/" + location.removeprefix("file:").lstrip("/")
    connection = connect(properties)
    try:
        found: list[Any] = connection.execute(
            sql.format(table=f"iceberg_scan('{location}')")
        ).fetchall()
        return found
    finally:
        connection.close()


def _extension(name: str) -> Path:
    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    assert package is not None, f"install duckdb-extension-{name}"
    assert package.origin is not None
    return next(Path(package.origin).parent.rglob(f"{name}.duckdb_extension"))
