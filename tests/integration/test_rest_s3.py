"""A worker on real catalogs: produce, flush, and read the table from other programs.

The catalogs: Iceberg's own REST server with a file warehouse, SeaweedFS's REST catalog with S3
(OAuth2 client credentials), and the embedded SQLite with files. The readers: pyiceberg and DuckDB.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater_testing import duck
from tidewater_testing.checker import verify
from tidewater_testing.evidence import load_table
from tidewater_testing.parts.rest_catalog import RestCatalog
from tidewater_testing.parts.seaweed import SeaweedFS
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.traffic import Load, Traffic

SPEC = {"partitions": 2, "writer": {"flushInterval": "200ms"}}
AGGREGATE = """SELECT tw_partition, count(*), count(DISTINCT tw_offset), min(tw_offset),
    max(tw_offset) FROM {table} GROUP BY 1 ORDER BY 1"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(params=["rest", "seaweedfs", "sqlite"])
def catalog(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Give the properties of one catalog after the other."""
    match request.param:
        case "rest":
            rest: RestCatalog = request.getfixturevalue("rest_catalog")
            yield rest.properties
        case "seaweedfs":
            seaweed: SeaweedFS = request.getfixturevalue("seaweedfs")
            yield seaweed.properties
        case _:
            yield request.getfixturevalue("sqlite_catalog")


async def test_produce_flush_and_query(tmp_path: Path, catalog: dict[str, str]) -> None:
    """Both engines see each message once; the worker's history read sees the same."""
    topic = f"{_namespace(catalog, 'query')}/orders"
    with Worker(tmp_path / "w", [topic_manifest(topic, SPEC)], catalog=catalog) as worker:
        async with Traffic(Load(worker.address, topic, partitions=2)) as traffic:
            await asyncio.sleep(2.0)
        flushed = await asyncio.to_thread(worker.flush, topic)
        verify(catalog, worker.settings.log_root, topic, traffic.record.acked, flushed=True)
        table = load_table(catalog, topic)
        snapshot = table.current_snapshot()
        assert snapshot is not None
        assert snapshot.snapshot_id == flushed["snapshot_id"]
        rows = duck.query(AGGREGATE, table, catalog)
        ends = [flushed["frontier"][str(partition)] for partition in range(2)]
        assert rows == [(p, n, n, 0, n - 1) for p, n in enumerate(ends)], "G2 Once in the table"
        one = duck.query(
            f"SELECT value FROM {{table}} WHERE tw_partition = 0 AND tw_offset = {ends[0] - 1}",
            table,
            catalog,
        )
        last = table.scan(row_filter=f"tw_partition = 0 and tw_offset = {ends[0] - 1}").to_arrow()
        assert [row[0] for row in one] == last["value"].to_pylist(), "filters prune no row away"


async def test_a_catalog_that_is_killed_costs_freshness_only(
    tmp_path: Path,
) -> None:
    """The REST server dies twice under load: acks go on, and afterwards the table has it all."""
    with RestCatalog(tmp_path / "rest") as rest:
        topic = "shop/orders"
        worker = Worker(tmp_path / "w", [topic_manifest(topic, SPEC)], catalog=rest.properties)
        with worker:
            async with Traffic(Load(worker.address, topic, partitions=2, pause_s=0.01)) as traffic:
                for _ in range(2):
                    await asyncio.sleep(0.8)
                    rest.process.kill()
                    before = traffic.record.messages
                    await asyncio.sleep(1.0)
                    assert traffic.record.messages > before, "acks wait for the catalog"
                    rest.start()
            await asyncio.to_thread(worker.flush, topic)
            verify(
                rest.properties, worker.settings.log_root, topic, traffic.record.acked, flushed=True
            )


async def test_object_storage_that_is_killed_costs_freshness_only(tmp_path: Path) -> None:
    """SeaweedFS, catalog and warehouse in one, is killed under load and comes back."""
    with SeaweedFS(tmp_path / "seaweed") as seaweed:
        topic = "shop/orders"
        worker = Worker(tmp_path / "w", [topic_manifest(topic, SPEC)], catalog=seaweed.properties)
        with worker:
            async with Traffic(Load(worker.address, topic, partitions=2, pause_s=0.01)) as traffic:
                for _ in range(2):
                    await asyncio.sleep(1.0)
                    seaweed.process.kill()
                    await asyncio.sleep(0.5)
                    seaweed.start()
                await asyncio.to_thread(worker.kill, Victim.TABLE)
                await asyncio.sleep(0.5)
            await asyncio.to_thread(worker.flush, topic)
            verify(
                seaweed.properties,
                worker.settings.log_root,
                topic,
                traffic.record.acked,
                flushed=True,
            )


def test_a_second_engine_sees_typed_columns(tmp_path: Path, sqlite_catalog: dict[str, str]) -> None:
    """DuckDB filters and adds up the columns of a typed topic."""
    fields = [
        {"name": "id", "type": "long", "required": True},
        {"name": "amount", "type": "decimal(10,2)"},
        {"name": "tags", "type": "list<string>"},
    ]
    spec = {**SPEC, "schema": {"fields": fields}}
    topic = "shop/typed"
    with Worker(tmp_path / "w", [topic_manifest(topic, spec)], catalog=sqlite_catalog) as worker:
        lines = [
            f'{{"value": {{"id": {i}, "amount": "{i}.25", "tags": ["t{i % 3}"]}}}}'
            for i in range(100)
        ]
        answer = worker.post(f"/v1/{topic}/messages", "\n".join(lines), "application/x-ndjson")
        assert answer.status == 200, answer.body
        worker.flush(topic)
    table = load_table(sqlite_catalog, topic)
    sql = "SELECT count(*), sum(amount), max(id) FROM {table} WHERE list_contains(tags, 't1')"
    ((count, total, highest),) = duck.query(sql, table)
    wanted = [i for i in range(100) if i % 3 == 1]
    assert (count, str(total), highest) == (
        len(wanted),
        f"{sum(wanted) + len(wanted) * 0.25:.2f}",
        max(wanted),
    )


def _namespace(catalog: dict[str, str], name: str) -> str:
    """Name a namespace of one test in a catalog that others use, too."""
    return f"{name}-{catalog['type']}"
