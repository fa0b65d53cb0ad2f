"""Fixtures that every test can have: real parts, one per session or module, started when asked."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tidewater_testing.parts.aws import Aws
from tidewater_testing.parts.postgres import Postgres
from tidewater_testing.parts.rest_catalog import RestCatalog
from tidewater_testing.parts.seaweed import SeaweedFS

# Tests start processes while gRPC's threads run. Its handlers of a fork would work in the child,
# which is about to become another program, and now and then end it instead.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# An example that takes long is no failed one: the machine may be busy.
settings.register_profile("tidewater", deadline=None)
settings.load_profile("tidewater")


@pytest.fixture(scope="module", autouse=True)
def leaks_show_where_they_are_made() -> Iterator[None]:
    """Collect what nobody closed: the warning is an error here, not in somebody else's test."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def rest_catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalog]:
    """Iceberg's REST catalog server; tests share it and use namespaces of their own."""
    with RestCatalog(tmp_path_factory.mktemp("rest-catalog")) as part:
        yield part


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """SeaweedFS with S3 and a REST catalog; tests share it and use namespaces of their own."""
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as part:
        yield part


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """Start a PostgreSQL server; tests share it and use namespaces of their own."""
    with Postgres(tmp_path_factory.mktemp("postgres")) as part:
        yield part


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    """Start the stand-in of AWS; tests share it and use namespaces of their own."""
    with Aws(tmp_path_factory.mktemp("aws")) as part:
        yield part


@pytest.fixture
def sqlite_catalog(tmp_path: Path) -> dict[str, str]:
    """Properties of a SQLite catalog with a file warehouse, of one test's own."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
