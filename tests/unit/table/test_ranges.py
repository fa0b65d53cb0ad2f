"""Which files are looked at for a window of offsets, and which are not."""

from types import SimpleNamespace
from typing import Any

import pytest
from pyiceberg.manifest import ManifestContent

from tidewater_worker.table import ranges
from tidewater_worker.table.ranges import EXTENTS_MAX, Bounds, FileRange, RangeIndex, extents_of

ROWS = 10


def bound(*values: int) -> dict[int, bytes]:
    return {
        number: value.to_bytes(8, "little", signed=True) for number, value in enumerate(values, 1)
    }


class Manifest:
    """Files of one partition each, as many of every partition, one behind the other."""

    content = ManifestContent.DATA

    def __init__(self, number: int, files: int, partitions: int) -> None:
        self.manifest_path = f"m{number}"
        self._first, self._files, self._partitions = number * files * ROWS, files, partitions
        self.fetched = 0

    def fetch_manifest_entry(self, _io: Any) -> list[Any]:
        self.fetched += 1
        return [
            SimpleNamespace(
                data_file=SimpleNamespace(
                    file_path=f"{self.manifest_path}/{partition}/{first}",
                    lower_bounds=bound(partition, first, 0),
                    upper_bounds=bound(partition, first + ROWS - 1, 0),
                    file_size_in_bytes=1,
                    record_count=ROWS,
                    spec_id=0,
                    partition=None,
                    value_counts={},
                    null_value_counts={},
                    nan_value_counts={},
                )
            )
            for partition in range(self._partitions)
            for first in range(self._first, self._first + self._files * ROWS, ROWS)
        ]


class Table:
    """A table of many manifests, as an index sees it."""

    def __init__(self, manifests: int, files: int, partitions: int) -> None:
        self.manifests = [Manifest(n, files, partitions) for n in range(manifests)]
        snapshot = SimpleNamespace(
            manifest_list="list", manifests=lambda _io: self.manifests, snapshot_id=1
        )
        column = SimpleNamespace
        names = {"tw_partition": 1, "tw_offset": 2, "tw_time": 3}
        schema = SimpleNamespace(find_field=lambda name: column(field_id=names[name]))
        self.metadata: Any = SimpleNamespace(
            snapshot_by_id=lambda _id: snapshot, schema=lambda: schema
        )
        self.index = RangeIndex()

    def page(self, partition: int, start: int, end: int) -> list[str]:
        """Return the files of a window."""
        window = (partition, start, end)
        found = self.index.files(self.metadata, 1, None, window)  # type: ignore[arg-type]
        return [file.path for file in found if file.bounds.meets(*window)]

    @property
    def fetched(self) -> int:
        return sum(manifest.fetched for manifest in self.manifests)


def test_pages_of_a_table_that_does_not_fit_the_cache_fetch_no_manifest_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each page went through all of them in a circle, and found none that was still there."""
    monkeypatch.setattr(ranges, "FILES_CACHED_MAX", 40)
    table = Table(manifests=20, files=4, partitions=2)
    end = 20 * 4 * ROWS
    table.page(0, 0, 1)
    before = table.fetched
    for partition in range(2):
        found: list[str] = []
        for start in range(0, end, ROWS):
            found += table.page(partition, start, start + ROWS)
        assert found == [
            f"m{first // ROWS // 4}/{partition}/{first}" for first in range(0, end, ROWS)
        ]
    assert table.fetched - before <= 2 * len(table.manifests)


def test_extents_are_around_all_files_and_few() -> None:
    files = [
        FileRange(f"{p}/{n}", Bounds((p, p), (n * 10, n * 10 + 9), (n, n + 1)))
        for p in range(3)
        for n in range(5)
    ]
    assert extents_of(files) == tuple(Bounds((p, p), (0, 49), (0, 5)) for p in range(3))
    many = [FileRange(str(p), Bounds((p, p), (p, p), (p, p))) for p in range(EXTENTS_MAX + 1)]
    assert extents_of(many) == (Bounds(*((0, EXTENTS_MAX),) * 3),)
    assert extents_of([]) == ()
