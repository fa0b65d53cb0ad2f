"""Cutting a batch from the log: which rows go into the next commit, and their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tidewater_core.clock import IdSource
from tidewater_core.errors import Corrupt, TidewaterError
from tidewater_worker.log.reader import LogBatch
from tidewater_worker.table.files import FilePlan, FileSet
from tidewater_worker.table.frontier import Span
from tidewater_worker.table.shape import table_rows
from tidewater_worker.table.snapshot import Prepared

READ_BYTES: Final = 8 * 1024 * 1024
"""How much of the log is read at once."""
FILES_MAX: Final = 256
"""A commit adds about this many files at most; the rest of a backlog waits for the next."""


class Readable(Protocol):
    """The log of a partition, as far as a cut needs it."""

    def read(self, offset: int, end: int, max_bytes: int) -> list[LogBatch]:
        """Read whole frames from the one that holds `offset`."""


@dataclass(frozen=True, slots=True)
class Source:
    """The waiting rows [first, end) of a partition."""

    partition: int
    log: Readable
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch in files, and how much of the log it took."""

    prepared: Prepared
    nbytes: int
    complete: bool
    """Everything that waited is in it."""


class SourceFailed(Exception):
    """The log of one partition cannot be read; the others can go on."""

    def __init__(self, partition: int, error: TidewaterError) -> None:
        super().__init__(partition, error)
        self.partition = partition
        self.error = error


def cut_batch(
    plan: FilePlan,
    sources: Sequence[Source],
    ids: IdSource,
    *,
    bytes_max: int,
    memory_bytes_max: int,
) -> Cut:
    """Write the rows that wait into files, to about `bytes_max` of log, fair to all partitions."""
    commit_id = ids.uuid()
    files = FileSet(plan, commit_id, memory_bytes_max)
    spans: dict[int, Span] = {}
    nbytes = 0
    try:
        ordered = sorted(sources, key=lambda source: source.partition)
        for position, source in enumerate(ordered):
            share = max(1, (bytes_max - nbytes) // (len(ordered) - position))
            end, took = _take(plan, files, source, share)
            nbytes += took
            if end > source.first:
                spans[source.partition] = Span(source.first, end)
        data_files = files.finish()
    except BaseException:
        files.abandon()
        raise
    prepared = Prepared(
        snapshot_id=ids.snapshot_id(),
        commit_id=commit_id,
        spans=spans,
        files=data_files,
        spec=plan.spec,
    )
    complete = all(s.partition in spans and spans[s.partition].end == s.end for s in sources)
    return Cut(prepared, nbytes, complete)


def _take(plan: FilePlan, files: FileSet, source: Source, share: int) -> tuple[int, int]:
    """Add a partition's rows; return the offset after the last and the bytes they took."""
    offset, took = source.first, 0
    while offset < source.end and took < share and len(files) < FILES_MAX:
        try:
            batches = source.log.read(offset, source.end, min(READ_BYTES, share - took))
            rows = table_rows(plan.shape, source.partition, offset, source.end, batches)
        except TidewaterError as error:
            raise SourceFailed(source.partition, error) from error
        except OSError as error:
            unreadable = Corrupt("LogUnreadable", f"the log cannot be read: {error}")
            raise SourceFailed(source.partition, unreadable) from error
        nbytes = sum(batch.nbytes for batch in batches)
        files.add(source.partition, rows, nbytes)
        offset += rows.num_rows
        took += nbytes
    return offset, took
