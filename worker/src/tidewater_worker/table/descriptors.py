"""Data files as bytes, for another worker that commits them.

An Iceberg manifest says all there is to say of data files (path, format, counts, sizes, bounds,
partition values, sort order), typed by the table's own schema; so that is what travels. It is
made and read in memory: no catalog ever hears of it.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final

from pyiceberg.avro.file import AvroFile
from pyiceberg.io import InputFile, OutputFile
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    MANIFEST_ENTRY_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    write_manifest,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema

from tidewater_core.errors import Invalid
from tidewater_worker.table.frontier import Span

_PLACE: Final = "memory:offer"
_SNAPSHOT: Final = 0
"""Of the manifest that travels; the commit writes another one."""
DESCRIPTORS_BYTES_MAX: Final = 64 * 1024 * 1024


class _Stream(BytesIO):
    """Keeps what was written when it is closed."""

    def __init__(self, file: "_MemoryOutput") -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        """Hand the bytes to the file."""
        if not self.closed:
            self._file.data = self.getvalue()
        super().close()


class _MemoryInput(InputFile):
    """Bytes that are read as a file."""

    def __init__(self, data: bytes) -> None:
        super().__init__(_PLACE)
        self._data = data

    def __len__(self) -> int:
        """Return the length."""
        return len(self._data)

    def exists(self) -> bool:
        """Say that it is there."""
        return True

    def open(self, seekable: bool = True) -> Any:
        """Read from the beginning."""
        return BytesIO(self._data)


class _MemoryOutput(OutputFile):
    """A file that stays in memory."""

    def __init__(self) -> None:
        super().__init__(_PLACE)
        self.data = b""

    def __len__(self) -> int:
        """Return the length."""
        return len(self.data)

    def exists(self) -> bool:
        """Say that it is not there yet."""
        return False

    def to_input_file(self) -> InputFile:
        """Return it for reading."""
        return _MemoryInput(self.data)

    def create(self, overwrite: bool = False) -> Any:
        """Write from the beginning."""
        return _Stream(self)


def pack_files(files: Sequence[DataFile], spec: PartitionSpec, schema: Schema) -> bytes:
    """Write files as bytes."""
    if not files:
        return b""
    output = _MemoryOutput()
    with write_manifest(
        format_version=2,
        spec=spec,
        schema=schema,
        output_file=output,
        snapshot_id=_SNAPSHOT,
        avro_compression="deflate",
    ) as writer:
        for file in files:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED, snapshot_id=_SNAPSHOT, data_file=file
                )
            )
    return output.data


def unpack_files(data: bytes, spec_id: int, spans: Mapping[int, Span]) -> list[DataFile]:
    """Read files back; they must be Parquet and have exactly the rows of the spans."""
    if len(data) > DESCRIPTORS_BYTES_MAX:
        raise Invalid("OfferTooLarge", f"{len(data)} bytes of file descriptors")
    try:
        files = _read(data, spec_id) if data else []
    except Exception as error:
        raise Invalid("OfferUnreadable", f"file descriptors cannot be read: {error}") from error
    rows = sum(span.end - span.first for span in spans.values())
    told = sum(file.record_count for file in files)
    if told != rows or any(file.file_format is not FileFormat.PARQUET for file in files):
        raise Invalid("OfferOdd", f"{len(files)} files have {told} rows; the offer has {rows}")
    return files


def _read(data: bytes, spec_id: int) -> list[DataFile]:
    with AvroFile[ManifestEntry](
        _MemoryInput(data),
        MANIFEST_ENTRY_SCHEMAS[DEFAULT_READ_VERSION],
        read_types={-1: ManifestEntry, 2: DataFile},
        read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    ) as reader:
        files = [entry.data_file for entry in reader]
    for file in files:
        file.spec_id = spec_id
    return files
