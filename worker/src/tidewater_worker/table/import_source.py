"""Parquet files that somebody brings: what is in them, and whether it fits the topic."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO

from tidewater_core import names
from tidewater_core.errors import Invalid
from tidewater_worker.table.shape import Shape

BATCH_ROWS: Final = 65_536
HASH_BYTES: Final = 8 * 1024 * 1024
OPTIONAL: Final = (names.TW_KEY, names.TW_HEADERS, names.TW_TIME)
GIVEN: Final = (names.TW_PARTITION, names.TW_OFFSET)
"""Columns that the import itself fills in."""


@dataclass(frozen=True, slots=True)
class ImportSource:
    """One file to import."""

    path: str
    rows: int
    nbytes: int
    has_time: bool


def check_source(io: FileIO, path: str, shape: Shape) -> ImportSource:
    """Look into a file and check that its columns fit; raise Invalid that names file and column."""
    try:
        source = io.new_input(path)
        with source.open() as stream:
            file = pq.ParquetFile(stream)
            schema, rows = file.schema_arrow, file.metadata.num_rows
        nbytes = len(source)
    except FileNotFoundError as error:
        raise Invalid("NoSuchFile", f"there is no file {path}") from error
    except (OSError, pa.ArrowException) as error:
        raise Invalid("NotParquet", f"{path} cannot be read as Parquet: {error}") from error
    _check_columns(path, schema, shape)
    return ImportSource(path, rows, nbytes, schema.get_field_index(names.TW_TIME) >= 0)


def _check_columns(path: str, schema: pa.Schema, shape: Shape) -> None:
    wanted = {field.name: field for field in shape.arrow}
    for given in GIVEN:
        if schema.get_field_index(given) >= 0:
            raise Invalid("ColumnNotAllowed", f"{path}: {given} is given by the import; drop it")
    unknown = [name for name in schema.names if name not in wanted]
    if unknown:
        raise Invalid("UnknownColumn", f"{path}: the topic has no column {unknown[0]!r}")
    for field in shape.arrow:
        if field.name in (*GIVEN, *OPTIONAL):
            continue
        if schema.get_field_index(field.name) < 0 and (
            not field.nullable or field.name in shape.opaque
        ):
            raise Invalid("MissingColumn", f"{path}: column {field.name!r} is missing")
    for found in schema:
        try:
            pa.nulls(0, found.type).cast(wanted[found.name].type)
        except pa.ArrowException as error:
            raise Invalid(
                "WrongType",
                f"{path}: column {found.name!r} is {found.type}, not {wanted[found.name].type}",
            ) from error


def read_source(io: FileIO, source: ImportSource, shape: Shape) -> Iterator[pa.Table]:
    """Yield a file's rows in pieces, with the topic's types; partition and offset still lack."""
    with io.new_input(source.path).open() as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
            yield _typed(source.path, pa.Table.from_batches([batch]), shape)


def _typed(path: str, rows: pa.Table, shape: Shape) -> pa.Table:
    for position, name in enumerate(rows.column_names):
        field = shape.arrow.field(name)
        column = rows.column(position)
        try:
            cast = column if column.type == field.type else column.cast(field.type)
        except pa.ArrowException as error:
            raise Invalid("WrongType", f"{path}: column {name!r}: {error}") from error
        if column.null_count and not field.nullable:
            raise Invalid("MissingValue", f"{path}: column {name!r} is required and has nulls")
        rows = rows.set_column(position, pa.field(name, field.type), cast)
    return rows


def check_times(path: str, times: pa.ChunkedArray, after_us: int) -> int:
    """Check that times never go back; return the last. A reader finds messages by time."""
    moments = times.cast(pa.int64()).combine_chunks()
    steps = pc.min(pc.pairwise_diff(moments)).as_py() if len(moments) > 1 else 0
    if moments[0].as_py() < after_us or (steps is not None and steps < 0):
        raise Invalid(
            "TimeGoesBack",
            f"{path}: {names.TW_TIME} is earlier than that of the row before (in the files or in "
            "the table); sort the rows by time, or leave the column out",
        )
    return int(moments[-1].as_py())


def digest_of(io: FileIO, paths: Sequence[str]) -> str:
    """Return a digest of the files' bytes that does not depend on their names or order."""
    digests = []
    for path in paths:
        digest = hashlib.blake2b(digest_size=20)
        with io.new_input(path).open(seekable=False) as stream:
            while chunk := stream.read(HASH_BYTES):
                digest.update(chunk)
        digests.append(digest.digest())
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=20).hexdigest()
