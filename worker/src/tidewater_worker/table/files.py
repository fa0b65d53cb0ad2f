"""Writing rows into Parquet data files, in bounded memory.

A `FileSet` is the files of one commit: one per partition value, rows in the order of
(tw_partition, tw_offset), a new row group where another topic partition begins (unless the last
one is still small) so that statistics point a reader to its rows.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import (
    DataFileStatistics,
    MetricModeTypes,
    MetricsMode,
    data_file_statistics_from_parquet_metadata,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.locations import LocationProvider
from pyiceberg.typedef import Record

from tidewater_core.errors import Retryable, TidewaterError
from tidewater_worker.table.layout import ROW_GROUP_BYTES_MAX
from tidewater_worker.table.local_io import DurableFile
from tidewater_worker.table.shape import Shape, shape_of
from tidewater_worker.table.split import Key, SplitField, split, split_fields

log = logging.getLogger(__name__)

ROW_GROUP_ROWS_MIN: Final = 10_000
"""A row group with fewer rows goes on into the next topic partition: a thousand quiet partitions
must not make a thousand row groups."""
OPEN_FILES_MAX: Final = 64
"""Files of an import that are written at the same time."""
MEMORY_SHARE: Final = 4
"""Row groups in the making may take this part of the writer's memory: encoding needs the rest."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """What the files of a table look like and where they go; good for one table schema and spec."""

    schema: Schema
    spec: PartitionSpec
    shape: Shape
    fields: tuple[SplitField, ...]
    sort_order_id: int | None
    locations: LocationProvider
    io: FileIO


def plan_files(table: Table) -> FilePlan:
    """Prepare to write files for a table as it is now."""
    metadata = table.metadata
    schema, spec = metadata.schema(), metadata.spec()
    order = metadata.sort_order()
    return FilePlan(
        schema=schema,
        spec=spec,
        shape=shape_of(schema, metadata.properties),
        fields=split_fields(spec, schema),
        sort_order_id=None if order.is_unsorted else order.order_id,
        locations=table.location_provider(),
        io=table.io,
    )


@dataclass(slots=True)
class _OpenFile:
    """A file in the making."""

    location: str
    key: Key
    output: Any
    pending: list[pa.Table] = field(default_factory=list)
    pending_rows: int = 0
    pending_bytes: int = 0
    partition: int = -1
    rows: int = 0
    total_bytes: int = 0
    sink: Any = None
    writer: pq.ParquetWriter | None = None


class FileSet:
    """The data files of one commit."""

    def __init__(
        self,
        plan: FilePlan,
        commit_id: UUID,
        memory_bytes_max: int,
        file_bytes_max: int | None = None,
    ) -> None:
        self._plan = plan
        self._commit_id = commit_id
        self._file_bytes_max = file_bytes_max
        self._memory_bytes_max = memory_bytes_max // MEMORY_SHARE
        self._row_group_bytes = min(ROW_GROUP_BYTES_MAX, max(1, self._memory_bytes_max))
        self._files: dict[Key, _OpenFile] = {}
        self._done: list[DataFile] = []
        self._pending_bytes = 0

    def __len__(self) -> int:
        """Return the number of files so far."""
        return len(self._done) + len(self._files)

    def add(self, partition: int, rows: pa.Table, nbytes: int) -> None:
        """Take rows of one topic partition, in offset order; partitions come in order too."""
        try:
            for key, part in split(self._plan.fields, rows):
                share = nbytes if part is rows else nbytes * part.num_rows // rows.num_rows
                self._add(key, partition, part, share)
            while self._pending_bytes > self._memory_bytes_max:
                fullest = max(self._files.values(), key=lambda file: file.pending_bytes)
                self._write_group(fullest)
            self._close_some()
        except (OSError, pa.ArrowException) as error:
            raise _warehouse_error(error) from error

    def _close_some(self) -> None:
        """Complete files that are large enough, and the oldest if too many are open.

        For imports only, which may be of any size: a commit from the log is bounded.
        """
        if self._file_bytes_max is None:
            return
        for key, file in list(self._files.items()):
            if file.total_bytes >= self._file_bytes_max or len(self._files) > OPEN_FILES_MAX:
                self._done.append(self._finish(file))
                del self._files[key]

    def _add(self, key: Key, partition: int, rows: pa.Table, nbytes: int) -> None:
        file = self._files.get(key)
        if file is None:
            file = self._open(key)
        if partition != file.partition and file.pending_rows >= ROW_GROUP_ROWS_MIN:
            self._write_group(file)
        file.partition = partition
        file.pending.append(rows)
        file.pending_rows += rows.num_rows
        file.pending_bytes += nbytes
        file.total_bytes += nbytes
        file.rows += rows.num_rows
        self._pending_bytes += nbytes
        if file.pending_bytes >= self._row_group_bytes:
            self._write_group(file)

    def _open(self, key: Key) -> _OpenFile:
        name = f"{len(self):05d}-{self._commit_id}.parquet"
        if key:
            # A day outside Python's years has no name, and needs none: entries tell the partition.
            with suppress(OverflowError, ValueError):
                path = self._plan.spec.partition_to_path(Record(*key), self._plan.schema)
                name = f"{path}/{name}"
        location = self._plan.locations.new_data_location(name)
        file = _OpenFile(location, key, self._plan.io.new_output(location))
        self._files[key] = file
        return file

    def _write_group(self, file: _OpenFile) -> None:
        if not file.pending:
            return
        rows = pa.concat_tables(file.pending)
        if file.writer is None:
            durable = isinstance(file.output, DurableFile)
            file.sink = file.output.create_native() if durable else file.output.create()
            file.writer = pq.ParquetWriter(
                file.sink, self._plan.shape.arrow, **self._plan.shape.writer_options(rows)
            )
        file.writer.write_table(rows, row_group_size=rows.num_rows)
        self._pending_bytes -= file.pending_bytes
        file.pending, file.pending_rows, file.pending_bytes = [], 0, 0

    def finish(self) -> list[DataFile]:
        """Complete the files; they are durable when this returns."""
        try:
            while self._files:
                key, file = next(iter(self._files.items()))
                self._done.append(self._finish(file))
                del self._files[key]
            return self._done
        except (OSError, pa.ArrowException) as error:
            raise _warehouse_error(error) from error

    def _finish(self, file: _OpenFile) -> DataFile:
        self._write_group(file)
        assert file.writer is not None
        file.writer.close()
        size = file.sink.tell()
        file.sink.close()
        if isinstance(file.output, DurableFile):
            file.output.sync()
        statistics = _statistics(file.writer.writer.metadata, self._plan.shape)
        assert statistics.record_count == file.rows
        data_file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=file.location,
            file_format=FileFormat.PARQUET,
            partition=Record(*file.key),
            file_size_in_bytes=size,
            sort_order_id=self._plan.sort_order_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )
        data_file.spec_id = self._plan.spec.spec_id
        return data_file

    def abandon(self) -> None:
        """Close and remove what was written: no commit has named these files."""
        for file in self._files.values():
            for closable in (file.writer, file.sink):
                try:
                    if closable is not None:
                        closable.close()
                except (OSError, pa.ArrowException):
                    log.debug("closing %s failed", file.location, exc_info=True)
        begun = [file.location for file in self._files.values() if file.sink is not None]
        remove_files(self._plan.io, [*begun, *(file.file_path for file in self._done)])
        self._files.clear()
        self._done.clear()


def _statistics(metadata: pq.FileMetaData, shape: Shape) -> DataFileStatistics:
    """Return what a file's entry says of its columns.

    Bounds go through Python's values: a column with times outside its years gets none, so that
    every reader looks into the file. The rows are acknowledged; they must not stop here.
    """
    columns = dict(shape.statistics)
    for path in _without_bounds(metadata):
        plan = columns[shape.paths[path]]
        columns[plan.field_id] = replace(plan, mode=MetricsMode(MetricModeTypes.COUNTS))
    return data_file_statistics_from_parquet_metadata(
        parquet_metadata=metadata,
        stats_columns=columns,
        parquet_column_mapping=dict(shape.paths),
    )


def _without_bounds(metadata: pq.FileMetaData) -> Iterator[str]:
    for position in range(metadata.num_columns):
        kind = metadata.schema.column(position).logical_type.type
        if kind not in ("DATE", "TIMESTAMP"):
            continue
        try:
            for number in range(metadata.num_row_groups):
                statistics = metadata.row_group(number).column(position).statistics
                if statistics is not None:
                    _ = statistics.min, statistics.max
        except (OverflowError, ValueError):
            yield metadata.schema.column(position).path


def remove_files(io: FileIO, locations: Iterable[str]) -> None:
    """Remove files that no commit can name; what fails is left to the maintenance job."""
    for location in locations:
        try:
            io.delete(location)
        except OSError as error:
            log.debug("removing %s failed: %s", location, error)


def _warehouse_error(error: Exception) -> TidewaterError:
    return Retryable("WarehouseUnavailable", f"writing data files: {error}"[:500])
