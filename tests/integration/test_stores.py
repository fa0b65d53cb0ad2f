"""A worker on the other catalogs and warehouses that it promises.

PostgreSQL is a real server. Glue, S3 beside it and GCS are stand-ins of the clouds' APIs (`moto`
with Glue's version check added, `gcp-storage-emulator`): they show that the settings reach the
right place and that our calls are right, not how AWS or Google behave.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidewater_core.settings import CatalogSettings
from tidewater_testing import duck
from tidewater_testing.checker import verify
from tidewater_testing.evidence import load_table
from tidewater_testing.parts.aws import Aws
from tidewater_testing.parts.gcs import Gcs
from tidewater_testing.parts.postgres import Postgres
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.stores import live_and_go
from tidewater_testing.traffic import Load, Traffic
from tidewater_worker.table.catalog import open_catalog

SPEC = {"partitions": 2, "writer": {"flushInterval": "200ms"}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_postgresql_with_local_files(tmp_path: Path, postgres: Postgres) -> None:
    """The tables' files are on a local disk."""
    warehouse = tmp_path / "warehouse"

    def files() -> list[str]:
        return [str(path) for path in warehouse.rglob("*") if path.is_file()]

    catalog = postgres.properties(warehouse.as_uri())
    await live_and_go(tmp_path / "w", catalog, "local-files/orders", files)


def test_workers_that_meet_a_new_database_at_once(tmp_path: Path, postgres: Postgres) -> None:
    """Each makes the catalog's own tables if they are not there: none may fail for it."""
    session = postgres.connect()
    session.autocommit = True
    session.cursor().execute("CREATE DATABASE fresh")
    session.close()
    settings = CatalogSettings(properties=postgres.properties(tmp_path.as_uri(), "fresh"))
    together = threading.Barrier(6)

    def open_it() -> None:
        together.wait()
        open_catalog(settings).close()

    with ThreadPoolExecutor(together.parties) as pool:
        for done in [pool.submit(open_it) for _ in range(together.parties)]:
            done.result()


async def test_glue_and_s3(tmp_path: Path, aws: Aws) -> None:
    """Glue puts a namespace into a folder `<namespace>.db`."""
    await live_and_go(
        tmp_path / "w", aws.properties, "glue/orders", lambda: aws.files("glue.db/orders/")
    )


async def test_google_cloud_storage(tmp_path: Path) -> None:
    """The catalog is SQLite: the warehouse is what counts."""
    with Gcs(tmp_path / "gcs") as gcs:
        catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", **gcs.properties}
        await live_and_go(
            tmp_path / "w", catalog, "shop/orders", lambda: gcs.files("warehouse/shop/orders/")
        )


async def test_a_second_engine_reads_what_stands_in_postgresql(
    tmp_path: Path, postgres: Postgres
) -> None:
    """PostgreSQL dies twice under load: acks go on, and DuckDB then sees all, once."""
    topic = "killed/orders"
    catalog = postgres.properties((tmp_path / "warehouse").as_uri())
    with Worker(tmp_path / "w", [topic_manifest(topic, SPEC)], catalog=catalog) as worker:
        async with Traffic(Load(worker.address, topic, partitions=2, pause_s=0.01)) as traffic:
            for _ in range(2):
                await asyncio.sleep(0.8)
                postgres.crash()
                before = traffic.record.messages
                await asyncio.sleep(0.8)
                assert traffic.record.messages > before, "acks wait for the catalog"
                postgres.start()  # by this thread: a process dies with the one that started it
        flushed = await asyncio.to_thread(worker.flush, topic)
        verify(catalog, worker.settings.log_root, topic, traffic.record.acked, flushed=True)
        rows = duck.query(
            """SELECT tw_partition, count(*), count(DISTINCT tw_offset), max(tw_offset)
            FROM {table} GROUP BY 1 ORDER BY 1""",
            load_table(catalog, topic),
        )
        ends = [flushed["frontier"][str(partition)] for partition in range(2)]
        assert rows == [(p, n, n, n - 1) for p, n in enumerate(ends)], "G2 Once in the table"
