"""Catalogs by configuration, and their errors by what to do next."""

import errno
import os
import sqlite3
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from botocore import exceptions as aws
from pyarrow.fs import AzureFileSystem, FileSystem, GcsFileSystem
from pyiceberg import exceptions as ice
from pyiceberg.schema import Schema
from requests import exceptions as http
from sqlalchemy import text
from urllib3.exceptions import MaxRetryError, NewConnectionError

from table_bench import Bench
from table_fakes import CountingIds, HandLog, SteppedClock, assignment, message_batch
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import (
    Invalid,
    NotFound,
    OutcomeUnknown,
    Retryable,
    TidewaterError,
)
from tidewater_core.settings import CatalogSettings
from tidewater_worker.table import local_io
from tidewater_worker.table.catalog import CommitRefused, commit_error, open_catalog, read_error
from tidewater_worker.table.lake_io import LakeFileIO
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.topic import TopicRun

RAW = TopicSpec()
YEAR_2100_MS = "4102444800000"
NEVER_SENT = http.ConnectionError(
    MaxRetryError(None, "/", NewConnectionError(None, "refused"))  # type: ignore[arg-type]
)


def of_aws(code: str, status: int) -> Exception:
    """Return what AWS's client makes of an answer."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    made: Exception = aws.ClientError(answer, "UpdateTable")
    return made


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ice.CommitFailedException("x"), CommitRefused),
        (ice.NoSuchTableError("x"), CommitRefused),
        (ice.UnauthorizedError("x"), Retryable),
        (ice.ForbiddenError("x"), Retryable),
        (ice.TooManyRequestsError("x"), Retryable),
        (NEVER_SENT, Retryable),
        (http.ConnectTimeout("x"), Retryable),
        (ice.CommitStateUnknownException("x"), OutcomeUnknown),
        (ice.ServiceUnavailableError("x"), OutcomeUnknown),
        (ice.ServerError("x"), OutcomeUnknown),
        (ice.RESTError("x"), OutcomeUnknown),
        (http.ReadTimeout("x"), OutcomeUnknown),
        (http.ConnectionError("reset by peer"), OutcomeUnknown),
        (sqlite3.OperationalError("database is locked"), OutcomeUnknown),
        (ValueError("who knows when"), OutcomeUnknown),
        (of_aws("AccessDeniedException", 400), Retryable),
        (of_aws("InternalServiceException", 500), OutcomeUnknown),
        (aws.EndpointConnectionError(endpoint_url="x"), Retryable),
        (aws.ReadTimeoutError(endpoint_url="x"), OutcomeUnknown),
        (aws.ConnectionClosedError(endpoint_url="x"), OutcomeUnknown),
    ],
)
def test_only_what_is_surely_refused_counts_as_refused(
    error: Exception, kind: type[TidewaterError]
) -> None:
    assert type(commit_error("shop.orders", error)) is kind


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (ice.NoSuchTableError("x"), NotFound, "TableMissing"),
        (ice.NoSuchNamespaceError("x"), NotFound, "TableMissing"),
        (ice.TableAlreadyExistsError("x"), Retryable, "TableExists"),
        (ice.OAuthError("x"), Retryable, "CatalogRejected"),
        (of_aws("AccessDeniedException", 400), Retryable, "CatalogRejected"),
        (http.ConnectionError("x"), Retryable, "CatalogUnreachable"),
        (FileNotFoundError("metadata.json"), Retryable, "CatalogUnreachable"),
    ],
)
def test_errors_of_reading(error: Exception, kind: type[TidewaterError], reason: str) -> None:
    named = read_error("load shop.orders", error)
    assert type(named) is kind
    assert named.reason == reason


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"type": "nonsense"},
        {"type": "sql"},
        {"type": "sql", "uri": "sqlite-is-not-here"},
        {"type": "rest"},
        {"uri": "ftp://x"},
    ],
)
def test_settings_that_make_no_sense_are_refused(properties: dict[str, str]) -> None:
    with pytest.raises(Invalid):
        open_catalog(CatalogSettings(properties=properties))


def test_sqlite_is_shared_and_durable(bench: Bench) -> None:
    engine = bench.catalog._catalog.engine  # type: ignore[attr-defined]
    with engine.connect() as connection:
        asked = [connection.execute(text(f"PRAGMA {p}")).scalar() for p in
                 ("journal_mode", "synchronous", "busy_timeout")]  # fmt: skip
    assert asked == ["wal", 2, 30_000]


def test_a_catalog_in_memory_serves_all_threads(tmp_path: Path) -> None:
    catalog = open_catalog(
        CatalogSettings(
            properties={"type": "in-memory", "warehouse": (tmp_path / "warehouse").as_uri()}
        )
    )
    log = HandLog(tmp_path / "log" / "shop" / "orders" / "0", 0)
    log.append(message_batch(RAW, [b"x"]))
    clock = SteppedClock()
    run = TopicRun(
        assignment(RAW, [log]), lambda: catalog, clock, CountingIds(), lambda _: None, RangeIndex()
    )

    def work() -> None:
        for _ in range(5):
            run.step()
            clock.advance(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert catalog.load(("shop", "orders")).scan().to_arrow().num_rows == 1
    catalog.close()


def test_on_a_local_disk_everything_is_on_the_disk_before_the_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = bench.log()
    run = bench.topic(RAW, log)
    synced: set[str] = set()
    real = local_io._fsync

    def note(path: str) -> None:
        synced.add(path)
        real(path)

    monkeypatch.setattr(local_io, "_fsync", note)
    local_io._synced_directories.clear()
    log.append(message_batch(RAW, [b"x"]))
    bench.flush(run, log)
    table = bench.table()
    snapshot = table.metadata.current_snapshot()
    assert snapshot is not None
    needed = [
        table.metadata_location,
        snapshot.manifest_list,
        *(manifest.manifest_path for manifest in snapshot.manifests(table.io)),
        *(task.file.file_path for task in table.scan().plan_files()),
    ]
    for location in needed:
        path = location.removeprefix("file://")
        assert path in synced, f"G1 Durable: {path} may be lost with the power"
        while (path := os.path.dirname(path)) != str(bench.data):
            assert path in synced, f"G1 Durable: {path} may not name its files after a power cut"


def test_a_directory_whose_sync_fails_once_is_synced_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "warehouse" / "shop" / "file"
    path.parent.mkdir(parents=True)
    path.touch()
    synced: list[str] = []
    failing = {str(tmp_path / "warehouse"), str(tmp_path)}

    def fsync(name: str) -> None:
        if name in failing:
            failing.discard(name)
            raise OSError(errno.EIO, name)
        synced.append(name)

    monkeypatch.setattr(local_io, "_fsync", fsync)
    local_io._synced_directories.clear()
    for _ in range(2):
        with pytest.raises(OSError, match="Errno 5"):
            local_io.sync_file(str(path))
    local_io.sync_file(str(path))
    wanted = [path.parent, tmp_path / "warehouse", tmp_path]
    assert {str(each) for each in wanted} <= set(synced), "G1 Durable: a name may be lost"


def test_a_table_can_be_made_where_the_namespace_is_not_ours_to_make(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = bench.catalog._catalog
    catalog.create_namespace("shop")

    def forbidden(*_: object, **__: object) -> None:
        raise ice.ForbiddenError("no")

    monkeypatch.setattr(catalog, "create_namespace_if_not_exists", forbidden)
    bench.topic(RAW, bench.log())
    assert isinstance(bench.table().schema(), Schema)


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("s3://lake/a/b", "lake/a/b"),
        ("gs://lake/a/b", "lake/a/b"),
        ("abfss://lake/a/b", "lake/a/b"),
        ("abfss://lake@account.dfs.core.windows.net/a/b", "lake/a/b"),
        ("abfs://lake@account.dfs.core.windows.net/a/b@c", "lake/a/b@c"),
    ],
)
def test_where_a_location_is_in_its_store(location: str, path: str) -> None:
    assert LakeFileIO.parse_location(location)[2] == path


def test_an_azure_location_names_its_account() -> None:
    files = LakeFileIO({"adls.account-key": "a2V5"})
    scheme, authority, _ = files.parse_location("abfss://lake@there.dfs.core.windows.net/a")
    store = files.fs_by_scheme(scheme, authority)
    assert store == AzureFileSystem(account_name="there", account_key="a2V5")
    named = LakeFileIO({"adls.account-name": "other", "adls.account-key": "a2V5"})
    assert named.fs_by_scheme(scheme, authority) != store, "the settings come first"


def test_googles_store_gives_up_when_other_requests_do() -> None:
    def store(**limit: str) -> FileSystem:
        given = {"gcs.service.host": "http://127.0.0.1:9", "gcs.oauth2.token": "any"}
        return LakeFileIO(
            {**given, "gcs.oauth2.token-expires-at": YEAR_2100_MS, **limit}
        ).fs_by_scheme("gs", "lake")

    options: dict[str, object] = store().__reduce__()[1][0]
    assert options["retry_time_limit"] == timedelta(seconds=30)
    assert (options["scheme"], options["endpoint_override"]) == ("http", "127.0.0.1:9")
    assert options["access_token"] == "any"
    impatient = store(**{"tidewater.read-timeout-s": "0.1"})
    with pytest.raises(OSError, match="Retry policy exhausted"):
        impatient.open_input_file("lake/x").read()
    assert LakeFileIO().fs_by_scheme("gs", "lake") == GcsFileSystem(
        retry_time_limit=timedelta(seconds=30)
    ), "without a token: the credentials that the environment has"


def test_the_image_has_what_catalogs_and_warehouses_import() -> None:
    """In development they come along with other tools; the image has the worker's own alone."""
    pins = Path(__file__).parents[3] / "requirements" / "worker.txt"
    pinned = {line.partition("==")[0] for line in pins.read_text().splitlines() if "==" in line}
    assert pinned >= {"boto3", "packaging", "psycopg2-binary", "sqlalchemy"}
