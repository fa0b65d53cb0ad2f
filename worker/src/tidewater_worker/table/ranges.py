"""Which files and row groups hold which offsets, from manifests and Parquet footers."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent, ManifestFile
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from tidewater_core import names
from tidewater_core.errors import Corrupt, Invalid
from tidewater_worker.table.facts import ColumnBounds, bounds_by_id

FILES_CACHED_MAX: Final = 100_000
"""Data files whose bounds are kept in memory, over all tables; those of many columns count more."""
COLUMNS_PER_FILE: Final = 8
"""Columns whose bounds count as one file more in memory."""
MANIFESTS_CACHED_MAX: Final = 5_000
EXTENTS_CACHED_MAX: Final = 50_000
"""Extents of manifests that are kept in memory: about one for each partition of each manifest."""
EXTENTS_MAX: Final = 64
"""Extents of one manifest; one that needs more has a single one, around all of its files."""
FOOTERS_CACHED_MAX: Final = 512
LEFTOVER_BYTES_MAX: Final = 32 * 1024 * 1024
"""Decoded row groups that wait for the next page, over all readers."""
OFFSET_MAX: Final = (1 << 63) - 1


def _hull(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return min(one[0], other[0]), max(one[1], other[1])


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest partition, offset and time (µs) of some rows; as wide as may be."""

    partitions: tuple[int, int]
    offsets: tuple[int, int]
    times: tuple[int, int]

    def meets(self, partition: int, start: int, end: int) -> bool:
        """Say if rows of the partition in [start, end) may be here."""
        low, high = self.partitions
        first, last = self.offsets
        return low <= partition <= high and first < end and last >= start

    def around(self, other: "Bounds") -> "Bounds":
        """Return bounds around both."""
        return Bounds(
            _hull(self.partitions, other.partitions),
            _hull(self.offsets, other.offsets),
            _hull(self.times, other.times),
        )

    def span(self, partition: int, rows: int) -> tuple[int, int] | None:
        """Return the offsets [start, end) that so many rows must be; None if they may be others.

        Rows of this partition alone, as many as there are offsets between the bounds: every one
        of them is there, none is missing. All else has to be read before anybody can say that.
        """
        first, last = self.offsets
        if self.partitions != (partition, partition) or last - first + 1 != rows:
            return None
        return first, last + 1


@dataclass(frozen=True, slots=True)
class FileRange:
    """A data file and what it may hold."""

    path: str
    bounds: Bounds
    nbytes: int = 0
    rows: int = -1
    columns: Mapping[int, ColumnBounds] = field(default_factory=dict, hash=False)
    """What its manifest tells about the other columns, by field id."""
    group: int = 0
    """The same number for files of one table partition, which may be joined."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group and what it may hold."""

    path: str
    index: int
    rows: int
    nbytes: int
    bounds: Bounds


_V = TypeVar("_V")


class Lru(Generic[_V]):
    """A cache bounded by the sum of its entries' weights. Thread-safe."""

    def __init__(self, weight_max: int) -> None:
        self._weight_max = weight_max
        self._weight = 0
        self._items: OrderedDict[str, tuple[_V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> _V | None:
        """Return what is kept under a key, and keep it longer."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def take(self, key: str) -> _V | None:
        """Return what is kept under a key, and forget it."""
        with self._lock:
            found = self._items.pop(key, None)
            if found is None:
                return None
            self._weight -= found[1]
            return found[0]

    def put(self, key: str, value: _V, weight: int) -> None:
        """Keep a value; the least used ones make room."""
        with self._lock:
            if key in self._items or weight > self._weight_max:
                return
            self._items[key] = (value, weight)
            self._weight += weight
            while self._weight > self._weight_max:
                _, (_, freed) = self._items.popitem(last=False)
                self._weight -= freed


class RangeIndex:
    """Bounds of files and row groups, remembered: manifests and data files never change."""

    def __init__(self) -> None:
        self._manifests: Lru[tuple[FileRange, ...]] = Lru(FILES_CACHED_MAX)
        self._extents: Lru[tuple[Bounds, ...]] = Lru(EXTENTS_CACHED_MAX)
        """What the files of a manifest may hold, together: remembered longer than the files."""
        self._lists: Lru[tuple[ManifestFile, ...]] = Lru(MANIFESTS_CACHED_MAX)
        self._footers: Lru[pq.FileMetaData] = Lru(FOOTERS_CACHED_MAX)
        self._leftovers: Lru[pa.Table] = Lru(LEFTOVER_BYTES_MAX)

    def keep_leftover(self, key: str, rows: pa.Table, nbytes: int) -> None:
        """Keep a decoded row group of which the reader has given only the beginning."""
        self._leftovers.put(key, rows, nbytes)

    def take_leftover(self, key: str) -> pa.Table | None:
        """Return a decoded row group that an earlier reader left, and forget it."""
        return self._leftovers.take(key)

    def manifests_of(self, snapshot: Snapshot, io: FileIO) -> tuple[ManifestFile, ...]:
        """Return the manifests of a snapshot."""
        found = self._lists.get(snapshot.manifest_list)
        if found is None:
            found = tuple(snapshot.manifests(io))
            self._lists.put(snapshot.manifest_list, found, max(1, len(found)))
        return found

    def files(
        self,
        metadata: TableMetadata,
        snapshot_id: int,
        io: FileIO,
        within: tuple[int, int, int] | None = None,
    ) -> Iterator[FileRange]:
        """Yield the data files of a snapshot.

        `within` (partition, start, end): of manifests that are known to have no file there, none.
        """
        snapshot = metadata.snapshot_by_id(snapshot_id)
        assert snapshot is not None
        columns = column_ids(metadata.schema())
        for manifest in self.manifests_of(snapshot, io):
            if manifest.content != ManifestContent.DATA:
                if manifest.has_added_files() or manifest.has_existing_files():
                    raise Invalid(
                        "DeleteFilesUnsupported",
                        "the table has merge-on-read deletes; compact it before reading history",
                    )
                continue
            if within is None or self._may_meet(manifest, within):
                yield from self.files_of(manifest, columns, io)

    def _may_meet(self, manifest: ManifestFile, within: tuple[int, int, int]) -> bool:
        extents = self._extents.get(manifest.manifest_path)
        return extents is None or any(each.meets(*within) for each in extents)

    def files_of(
        self, manifest: ManifestFile, columns: tuple[int, int, int], io: FileIO
    ) -> tuple[FileRange, ...]:
        """Return the data files of a manifest."""
        ranges = self._manifests.get(manifest.manifest_path)
        if ranges is None:
            entries = manifest.fetch_manifest_entry(io)
            ranges = tuple(_file_range(entry.data_file, columns) for entry in entries)
            weight = sum(1 + len(each.columns) // COLUMNS_PER_FILE for each in ranges)
            self._manifests.put(manifest.manifest_path, ranges, max(1, weight))
            extents = extents_of(ranges)
            self._extents.put(manifest.manifest_path, extents, max(1, len(extents)))
        return ranges

    def footer(self, path: str, io: FileIO) -> pq.FileMetaData:
        """Return the footer of a data file."""
        footer = self._footers.get(path)
        if footer is None:
            with io.new_input(path).open() as source:
                footer = pq.read_metadata(source)
            self._footers.put(path, footer, 1)
        return footer

    def row_groups(
        self, files: Iterable[FileRange], io: FileIO, partition: int, start: int, end: int
    ) -> list[RowGroup]:
        """Return the row groups that may hold the partition's rows in [start, end), by offset."""
        found: list[RowGroup] = []
        for file in files:
            if file.bounds.meets(partition, start, end):
                groups = row_groups_of(file, self.footer(file.path, io))
                found += [g for g in groups if g.bounds.meets(partition, start, end)]
        return sorted(found, key=lambda group: group.bounds.offsets)


def extents_of(files: Iterable[FileRange]) -> tuple[Bounds, ...]:
    """Return bounds around all of some files: one for each span of partitions, if there are few."""
    found: dict[tuple[int, int], Bounds] = {}
    for file in files:
        key = file.bounds.partitions
        found[key] = file.bounds.around(found.get(key, file.bounds))
    if len(found) <= EXTENTS_MAX:
        return tuple(found.values())
    first, *rest = found.values()
    for each in rest:
        first = first.around(each)
    return (first,)


def column_ids(schema: Schema) -> tuple[int, int, int]:
    """Return the field ids of partition, offset and time."""
    partition, offset, time = (
        schema.find_field(name).field_id
        for name in (names.TW_PARTITION, names.TW_OFFSET, names.TW_TIME)
    )
    return partition, offset, time


def _file_range(file: DataFile, columns: tuple[int, int, int]) -> FileRange:
    widest = ((-1, (1 << 31) - 1), (0, OFFSET_MAX), (0, OFFSET_MAX))
    found: list[tuple[int, int]] = []
    lows, highs = file.lower_bounds or {}, file.upper_bounds or {}
    for column, wide in zip(columns, widest, strict=True):
        low, high = lows.get(column), highs.get(column)
        found.append(
            wide
            if low is None or high is None
            else (
                int.from_bytes(low, "little", signed=True),
                int.from_bytes(high, "little", signed=True),
            )
        )
    bounds = Bounds(found[0], found[1], found[2])
    return FileRange(
        file.file_path,
        bounds,
        file.file_size_in_bytes,
        file.record_count,
        bounds_by_id(file, without=columns),
        hash((file.spec_id, str(file.partition))),
    )


def row_groups_of(file: FileRange, footer: pq.FileMetaData) -> Iterator[RowGroup]:
    """Yield the row groups of a file, in its order."""
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    try:
        columns = [
            paths.index(name) for name in (names.TW_PARTITION, names.TW_OFFSET, names.TW_TIME)
        ]
    except ValueError as error:
        raise Corrupt("ForeignFile", f"{file.path} lacks a tw_ column: {error}") from error
    whole = (file.bounds.partitions, file.bounds.offsets, file.bounds.times)
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        ranges = [
            _statistics(group.column(column), wide)
            for column, wide in zip(columns, whole, strict=True)
        ]
        yield RowGroup(
            path=file.path,
            index=index,
            rows=group.num_rows,
            nbytes=group.total_byte_size,
            bounds=Bounds(ranges[0], ranges[1], ranges[2]),
        )


def _statistics(column: Any, wide: tuple[int, int]) -> tuple[int, int]:
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max:
        return wide
    return int(statistics.min_raw), int(statistics.max_raw)
