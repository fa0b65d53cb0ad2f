"""Orphans of a table that has neighbours: of a similar name, or in the very same place."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.errors import Conflict, Retryable
from tidewater_pipeline.jobs.orphans import check_alone, list_store
from tidewater_pipeline.state import TableState

BUCKET = "s3://lake/shop"


class Store:
    """An object store as Iceberg's FileIO shows it: a listing is by how keys begin."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        self.unreadable: set[str] = set()

    def listPrefix(self, prefix: str) -> Any:
        left = sorted(key for key in self.objects if key.startswith(prefix))

        def following() -> Any:
            key = left.pop(0)
            return SimpleNamespace(location=lambda: key, createdAtMillis=lambda: 0)

        found = SimpleNamespace(hasNext=lambda: bool(left), next=following)
        return SimpleNamespace(iterator=lambda: found)

    def newInputFile(self, path: str) -> Any:
        def stream() -> Any:
            if path not in self.objects or path in self.unreadable:
                raise Retryable("SparkFailed", f"read {path}: NoSuchKey")
            return SimpleNamespace(data=self.objects[path], close=lambda: None)

        return SimpleNamespace(newStream=stream, exists=lambda: path in self.objects)


def table_in(store: Store) -> Any:
    return SimpleNamespace(java=lambda: SimpleNamespace(io=lambda: store), name="`shop`.`orders`")


def session() -> Any:
    """Return a session whose JVM reads streams, and does nothing else."""
    path = ("jvm", "org", "apache", "iceberg", "relocated", "com", "google", "common", "io")
    at: Any = SimpleNamespace(ByteStreams=SimpleNamespace(toByteArray=lambda stream: stream.data))
    for name in reversed(path):
        at = SimpleNamespace(**{name: at})
    return at


def state(location: str, named: frozenset[str] = frozenset()) -> TableState:
    return TableState(
        ("shop", "orders"), location, 1, {}, "hour", uuid="ours", metadata_files=named
    )


def of(uuid: str) -> bytes:
    return f'{{"table-uuid": "{uuid}"}}'.encode()


@pytest.mark.parametrize("location", [f"{BUCKET}/orders", f"{BUCKET}/orders/"])
def test_a_neighbour_whose_name_begins_alike_is_not_listed(location: str) -> None:
    """All files of `orders-dead` were orphans of `orders`, and were removed."""
    mine = f"{BUCKET}/orders/data/a.parquet"
    store = Store({mine: b"", f"{BUCKET}/orders-dead/data/b.parquet": b""})
    assert list_store(table_in(store), location, 2**62) == [mine]


def test_another_table_in_the_same_place_is_left_alone() -> None:
    """A table that was renamed lost its files to the one that was made anew in its place.

    Its metadata is young, so that no look names it among the old files.
    """
    own, other = (f"{BUCKET}/orders/metadata/{n}.metadata.json" for n in ("00001-a", "00002-b"))
    shared = table_in(Store({own: of("ours"), other: of("theirs")}))
    with pytest.raises(Conflict, match=r"SharedLocation.*00002-b.*theirs"):
        check_alone(session(), shared, state(f"{BUCKET}/orders"), [])
    torn = table_in(Store({own: of("ours"), other: of("theirs")[:-1]}))
    check_alone(session(), torn, state(f"{BUCKET}/orders"), [])


def test_a_version_that_goes_meanwhile_is_nobodys() -> None:
    """The writer keeps 20 of them; a look at a busy table always met one that had just gone."""
    gone = f"{BUCKET}/orders/metadata/00001-a.metadata.json"
    store = Store({})
    check_alone(session(), table_in(store), state(f"{BUCKET}/orders"), [gone])
    store.objects[gone] = of("theirs")
    store.unreadable.add(gone)
    with pytest.raises(Retryable, match="NoSuchKey"):
        check_alone(session(), table_in(store), state(f"{BUCKET}/orders"), [gone])


def test_what_was_found_elsewhere_in_the_location_counts() -> None:
    nested = f"{BUCKET}/orders/old/metadata/00001-a.metadata.json"
    table = table_in(Store({nested: of("theirs")}))
    with pytest.raises(Conflict, match="SharedLocation"):
        check_alone(session(), table, state(f"{BUCKET}/orders"), [nested])


def test_versions_that_the_table_names_are_not_read() -> None:
    own = f"{BUCKET}/orders/metadata/00001-a.metadata.json"
    table = table_in(Store({own: of("never read")}))
    check_alone(session(), table, state(f"{BUCKET}/orders", frozenset({own})), [])


def test_the_same_on_a_local_disk(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "00001-a.metadata.json").write_bytes(of("ours"))
    gone = f"file://{tmp_path}/metadata/gone.metadata.json"
    here = state(f"file://{tmp_path}")
    check_alone(session(), table_in(Store({})), here, [gone])
    (tmp_path / "metadata" / "00002-b.metadata.json").write_bytes(of("theirs"))
    with pytest.raises(Conflict, match="SharedLocation"):
        check_alone(session(), table_in(Store({})), here, [])
