"""Joining what concurrent requests sent into the frames of one group commit. Pure.

Small messages arrive as Python values and become one Arrow batch together; large requests arrive
as Arrow batches and are framed as they are. Nothing here looks at a single message of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import pyarrow as pa

from tidewater_core.errors import TidewaterError
from tidewater_worker.log import frame as fmt
from tidewater_worker.log.producers import Request, Stored
from tidewater_worker.schema import HEADERS_TYPE, PRODUCER_TYPE, TIME_TYPE

FRAME_ROWS_TARGET: Final = 1024
"""Small requests are joined up to this many rows; larger ones are framed alone."""

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Rows:
    """Messages of a raw topic, as columns of Python values."""

    keys: list[bytes | None]
    headers: list[Headers | None]
    values: list[bytes | None]

    @property
    def num_rows(self) -> int:
        """Count the messages."""
        return len(self.values)


@dataclass(slots=True)
class Submission:
    """One request's messages for one partition, on their way into the log."""

    payload: Rows | pa.RecordBatch
    """Columns `tw_key`, `tw_headers` and the payload's."""
    nbytes: int
    done: Callable[[Stored | TidewaterError], None]
    """Called once, in the event loop: the offsets, or what the caller must do."""
    request: Request | None = None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        """Count once: it is asked for often."""
        self.count = self.payload.num_rows


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A frame ready to be written."""

    base_offset: int
    rows: int
    head: bytes
    body: pa.Buffer
    schema: pa.Schema
    time_us: int

    @property
    def nbytes(self) -> int:
        """Count the bytes in the file."""
        return len(self.head) + int(self.body.size)


@lru_cache(maxsize=2048)
def _nulls(rows: int, type_: pa.DataType) -> pa.Array:
    return pa.nulls(rows, type_)


@lru_cache(maxsize=2048)
def _no_producer(rows: int) -> pa.Array:
    return _producer_runs([rows], [None])


def _producer_runs(ends: list[int], values: Sequence[str | None]) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(
        pa.array(ends, pa.int32()), pa.array(values, pa.string()), type=PRODUCER_TYPE
    )


def _row_columns(rows: Sequence[Rows]) -> tuple[list[pa.Array], int]:
    first = rows[0]
    if len(rows) == 1:
        keys, headers, values = first.keys, first.headers, first.values
    else:
        keys = [key for r in rows for key in r.keys]
        headers = [h for r in rows for h in r.headers]
        values = [value for r in rows for value in r.values]
    count = len(values)
    columns = [
        _nulls(count, pa.binary())
        if all(key is None for key in keys)
        else pa.array(keys, pa.binary()),
        pa.array(headers, HEADERS_TYPE) if any(headers) else _nulls(count, HEADERS_TYPE),
        pa.array(values, pa.binary()),
    ]
    return columns, count


def _producer_column(submissions: Sequence[Submission], rows: int) -> pa.Array:
    if all(s.request is None for s in submissions):
        return _no_producer(rows) if rows <= FRAME_ROWS_TARGET else _producer_runs([rows], [None])
    ends, values, end = [], [], 0
    for submission in submissions:
        end += submission.count
        ends.append(end)
        values.append(submission.request.encode() if submission.request else None)
    return _producer_runs(ends, values)


def _joined(submissions: Sequence[Submission]) -> Iterator[list[Submission]]:
    """Split a group into runs that become one frame each."""
    run: list[Submission] = []
    rows = 0
    for submission in submissions:
        if run and (
            rows + submission.count > FRAME_ROWS_TARGET
            or type(submission.payload) is not type(run[0].payload)
        ):
            yield run
            run, rows = [], 0
        run.append(submission)
        rows += submission.count
    if run:
        yield run


def encode_group(
    submissions: Sequence[Submission], base_offset: int, time_us: int, schema: pa.Schema
) -> list[EncodedFrame]:
    """Encode a group's frames; the first row gets `base_offset`."""
    frames = []
    offset = base_offset
    for run in _joined(submissions):
        if isinstance(run[0].payload, Rows):
            columns, rows = _row_columns([s.payload for s in run])
        else:
            batches = [s.payload for s in run]
            batch: pa.RecordBatch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
            columns, rows = list(batch.columns), batch.num_rows
        times = pa.repeat(pa.scalar(time_us, TIME_TYPE), rows)
        batch = pa.RecordBatch.from_arrays(
            [times, *columns, _producer_column(run, rows)], schema=schema
        )
        body = batch.serialize()
        frames.append(
            EncodedFrame(
                offset, rows, fmt.encode_frame_head(offset, memoryview(body)), body, schema, time_us
            )
        )
        offset += rows
    return frames
