"""Joining what concurrent requests sent into the frames of one group commit. Pure.

Small messages arrive as Python values and become one Arrow batch together; large requests arrive
as Arrow batches and are framed as they are. Nothing here looks at a single message of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Final

import pyarrow as pa

from tidewater_core.errors import TidewaterError
from tidewater_worker.log import frame as fmt
from tidewater_worker.log.ipc import QuickFrames
from tidewater_worker.log.producers import Request, Stored
from tidewater_worker.schema import HEADERS_TYPE, PRODUCER_TYPE, TIME_TYPE, UNSYNCED_TYPE

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


@dataclass(slots=True)
class EncodedFrame:
    """A frame ready to be written."""

    base_offset: int
    rows: int
    head: bytes
    pieces: list[fmt.Bytes]
    """The body, in the memory that the messages came in: a copy would cost as much as the rest."""
    schema: pa.Schema
    time_us: int
    nbytes: int
    """In the file."""

    def body(self) -> pa.Buffer:
        """Return the body as one; after it is written, and in one thread."""
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return pa.py_buffer(self.pieces[0])


def nulls(rows: int, type_: pa.DataType) -> pa.Array:
    """Return a column without values; small ones are shared."""
    return _few_nulls(rows, type_) if rows <= FRAME_ROWS_TARGET else pa.nulls(rows, type_)


@lru_cache(maxsize=2048)
def _few_nulls(rows: int, type_: pa.DataType) -> pa.Array:
    return pa.nulls(rows, type_)


@lru_cache(maxsize=2048)
def _no_producer(rows: int) -> pa.Array:
    return _producer_runs([rows], [None])


def _producer_runs(ends: list[int], values: Sequence[str | None]) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(
        pa.array(ends, pa.int32()), pa.array(values, pa.string()), type=PRODUCER_TYPE
    )


@lru_cache(maxsize=2048)
def _unsynced(rows: int, count: int) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(
        pa.array([rows], pa.int32()), pa.array([count], pa.int64()), type=UNSYNCED_TYPE
    )


def _gather(rows: Sequence[Rows]) -> Rows:
    if len(rows) == 1:
        return rows[0]
    return Rows(
        [key for r in rows for key in r.keys],
        [headers for r in rows for headers in r.headers],
        [value for r in rows for value in r.values],
    )


def _columns(rows: Rows) -> list[pa.Array]:
    count = rows.num_rows
    return [
        nulls(count, pa.binary())
        if all(key is None for key in rows.keys)
        else pa.array(rows.keys, pa.binary()),
        pa.array(rows.headers, HEADERS_TYPE) if any(rows.headers) else nulls(count, HEADERS_TYPE),
        pa.array(rows.values, pa.binary()),
    ]


def _runs(submissions: Sequence[Submission]) -> tuple[list[int], list[str | None]]:
    """Return where each request's rows end, and who sent them."""
    return (
        list(accumulate(s.count for s in submissions)),
        [s.request.encode() if s.request is not None else None for s in submissions],
    )


def _producer_column(ends: list[int], requests: list[str | None]) -> pa.Array:
    if any(request is not None for request in requests):
        return _producer_runs(ends, requests)
    rows = ends[-1]
    return _no_producer(rows) if rows <= FRAME_ROWS_TARGET else _producer_runs([rows], [None])


def _alike(one: Rows | pa.RecordBatch, other: Rows | pa.RecordBatch) -> bool:
    """Tell whether two payloads can be one batch: of one kind, and required or not alike."""
    if isinstance(one, Rows) or isinstance(other, Rows):
        return type(one) is type(other)
    return one.schema is other.schema or bool(one.schema.equals(other.schema))


def _joined(submissions: Sequence[Submission]) -> Iterator[list[Submission]]:
    """Split a group into runs that become one frame each."""
    run: list[Submission] = []
    rows = 0
    for submission in submissions:
        if run and (
            rows + submission.count > FRAME_ROWS_TARGET
            or not _alike(submission.payload, run[0].payload)
        ):
            yield run
            run, rows = [], 0
        run.append(submission)
        rows += submission.count
    if run:
        yield run


def _encode_rows(
    run: Sequence[Submission], time_us: int, unsynced: int, schema: pa.Schema, quick: QuickFrames
) -> list[fmt.Bytes]:
    rows = _gather([s.payload for s in run])
    ends, requests = _runs(run)
    if not any(rows.headers):
        encoded = quick.rows(time_us, rows.keys, rows.values, ends, requests, unsynced)
        if encoded is not None:
            return [encoded]
    return _encode(_columns(rows), rows.num_rows, ends, requests, time_us, unsynced, schema)


def _encode_batches(
    run: Sequence[Submission], time_us: int, unsynced: int, schema: pa.Schema, quick: QuickFrames
) -> list[fmt.Bytes]:
    batches = [s.payload for s in run]
    batch: pa.RecordBatch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    ends, requests = _runs(run)
    encoded = quick.batch(time_us, batch, ends, requests, unsynced)
    if encoded is not None:
        return encoded
    return _encode(list(batch.columns), batch.num_rows, ends, requests, time_us, unsynced, schema)


def _encode(
    columns: list[pa.Array],
    rows: int,
    ends: list[int],
    requests: list[str | None],
    time_us: int,
    unsynced: int,
    schema: pa.Schema,
) -> list[fmt.Bytes]:
    # A third of what pa.repeat takes.
    buffer = pa.py_buffer(time_us.to_bytes(8, "little", signed=True) * rows)
    times = pa.Array.from_buffers(TIME_TYPE, rows, [None, buffer])
    producers = _producer_column(ends, requests)
    batch = pa.RecordBatch.from_arrays(
        [times, *columns, producers, _unsynced(rows, unsynced)], schema=schema
    )
    return [memoryview(batch.serialize())]


def encode_group(
    submissions: Sequence[Submission],
    base_offset: int,
    time_us: int,
    schema: pa.Schema,
    quick: QuickFrames,
    synced: int,
) -> list[EncodedFrame]:
    """Encode a group's frames; the first row gets `base_offset`, all below `synced` is fsynced."""
    frames = []
    offset = base_offset
    for run in _joined(submissions):
        if isinstance(run[0].payload, Rows):
            body = _encode_rows(run, time_us, offset - synced, schema, quick)
        else:
            body = _encode_batches(run, time_us, offset - synced, schema, quick)
        body_bytes = sum(map(len, body))
        if body_bytes > fmt.FRAME_BODY_BYTES_MAX:
            raise ValueError(f"a frame of {body_bytes} bytes could not be read again")
        head = fmt.encode_frame_head(offset, *body)
        rows = sum(submission.count for submission in run)
        nbytes = len(head) + body_bytes
        frames.append(EncodedFrame(offset, rows, head, body, schema, time_us, nbytes))
        offset += rows
    return frames
