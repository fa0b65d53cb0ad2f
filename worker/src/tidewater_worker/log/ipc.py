"""A quick encoder for the commonest frames: raw messages without headers, a few or a batch.

pyarrow takes about 20 µs to build and serialize a batch of one row, and 40 µs for 64: much of the
time that this process spends on a small message, and as much again as the bytes of a large batch
take. For rows of one *shape* the Arrow IPC message is the same but for some buffers and their
places. So pyarrow makes a sample of each shape, and others are written from the sample with those
replaced. The result is what pyarrow would have written, byte for byte; a property test compares
the two.

    message := continuation:u32  metadata-length:i32  metadata (flatbuffer)  body
    body    := the columns' buffers in schema order, each padded to 8 bytes

In the metadata only `bodyLength` and the vector of buffer places depend on lengths.
"""

import logging
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import ClassVar, Final

import pyarrow as pa

from tidewater_core import names
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker import flatbuffer as fb
from tidewater_worker.schema import (
    HEADERS_TYPE,
    PRODUCER_TYPE,
    TIME_TYPE,
    UNSYNCED_TYPE,
    log_schema,
)

ROWS_MAX: Final = 64
BATCH_ROWS_MAX: Final = 16 * 1024
"""A sample of this many rows takes 300 kB, and a larger batch gains nothing by it."""
APART_BYTES_MIN: Final = 16 * 1024
"""Values of so many bytes are written from where they are; copying fewer takes no time."""
BATCH_SHAPES_MAX: Final = 16
"""Sizes of batches whose samples are kept."""
MISSED_MAX: Final = 256
HEADS_MAX: Final = 1024
"""Heads that are remembered, a kilobyte each: messages of one size share theirs."""
RAW_SCHEMA: Final = log_schema(TopicSpec())
log = logging.getLogger(__name__)
_PAD: Final = [b"\0" * n for n in range(8)]
# Places in the list of buffers: two for the time, three a binary or string column, two and six for
# the map of headers, two and three for the runs of producers, two and two for what is unsynced.
_TIMES, _KEY_OFFSETS, _KEYS, _VALUE_OFFSETS, _VALUES = 1, 3, 4, 15, 16
_RUN_ENDS, _RUN_OFFSETS, _RUNS, _UNSYNCED = 18, 20, 21, 25
_BUFFERS: Final = 26
_Key = tuple[int, bool, int]
"""A shape: rows, whether they have keys, how many requests of producers."""


Heads = dict[tuple[int, ...], bytes]
"""By the lengths of what differs, which tell the shape, too."""


class _Shape:
    """Frames of so many rows, with keys or not, from so many producers' requests; no headers."""

    def __init__(
        self, schema: pa.Schema, heads: Heads, rows: int, *, has_keys: bool, runs: int
    ) -> None:
        self._offsets = struct.Struct(f"<{rows + 1}i").pack
        self._run_ends = struct.Struct(f"<{max(runs, 1)}i").pack
        self._run_offsets = struct.Struct(f"<{max(runs, 1) + 1}i").pack
        self._rows, self._has_keys, self._has_runs = rows, has_keys, runs > 0
        message = _sample(schema, rows, has_keys, runs).serialize().to_pybytes()
        body_at = 8 + struct.unpack_from("<i", message, 4)[0]
        root = fb.target(message, 8)
        batch = fb.target(message, fb.field(message, root, fb.MESSAGE_HEADER))
        vector = fb.target(message, fb.field(message, batch, fb.BATCH_BUFFERS))
        self._length_at = fb.field(message, root, fb.MESSAGE_BODY_LENGTH)
        self._vector_at = vector + 4
        self._metadata = message[:body_at]
        places = struct.unpack_from(f"<{2 * _BUFFERS}q", message, self._vector_at)
        self._pack_vector = struct.Struct(f"<{2 * _BUFFERS}q").pack
        self._vector_end = self._vector_at + 16 * _BUFFERS
        buffers = [
            message[body_at + at : body_at + at + length]
            for at, length in zip(places[::2], places[1::2], strict=True)
        ]
        self._slots = [
            _TIMES,
            *((_KEY_OFFSETS, _KEYS) if has_keys else ()),
            _VALUE_OFFSETS,
            _VALUES,
            *((_RUN_ENDS, _RUN_OFFSETS, _RUNS) if runs else ()),
            _UNSYNCED,
        ]
        self._lengths = [len(buffer) for buffer in buffers]
        self._between = [
            b"".join(_padded(buffer) for buffer in buffers[first + 1 : last])
            for first, last in pairwise([-1, *self._slots, _BUFFERS])
        ]
        self._heads = heads
        if struct.unpack_from("<I", message, vector)[0] != _BUFFERS or (
            b"".join(self._assemble([buffers[slot] for slot in self._slots])) != message
        ):
            raise ValueError("this version of pyarrow lays out its messages in another way")

    def encode(
        self,
        time_us: int,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        ends: Sequence[int],
        requests: Sequence[str],
        unsynced: int,
    ) -> bytes:
        """Encode rows of this shape."""
        columns: list[fb.Bytes] = []
        if self._has_keys:
            columns.append(self._offsets(*accumulate(map(len, keys), initial=0)))
            columns.append(b"".join(keys))
        columns.append(self._offsets(*accumulate(map(len, values), initial=0)))
        columns.append(b"".join(values))
        return b"".join(self.fill(time_us, columns, ends, requests, unsynced))

    def fill(
        self,
        time_us: int,
        columns: Sequence[fb.Bytes],
        ends: Sequence[int],
        requests: Sequence[str],
        unsynced: int,
    ) -> list[fb.Bytes]:
        """Encode rows whose keys (if the shape has any) and values are offsets and bytes."""
        buffers = [time_us.to_bytes(8, "little", signed=True) * self._rows, *columns]
        if self._has_runs:
            texts = [request.encode() for request in requests]
            buffers.append(self._run_ends(*ends))
            buffers.append(self._run_offsets(*accumulate(map(len, texts), initial=0)))
            buffers.append(b"".join(texts))
        buffers.append(unsynced.to_bytes(8, "little"))
        return self._assemble(buffers)

    def _assemble(self, buffers: Sequence[fb.Bytes]) -> list[fb.Bytes]:
        """Put what differs into its slots, among what is the same for all of this shape."""
        lengths = tuple(map(len, buffers))
        head = self._heads.get(lengths)
        if head is None:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            head = self._heads[lengths] = self._head(lengths)
        pieces: list[fb.Bytes] = [head]
        for between, buffer in zip(self._between, buffers, strict=False):
            pieces += (between, buffer, _PAD[-len(buffer) % 8])
        pieces.append(self._between[-1])
        return pieces

    def _head(self, lengths: tuple[int, ...]) -> bytes:
        """Write the metadata: the lengths and places of all buffers."""
        all_lengths = self._lengths.copy()
        for slot, length in zip(self._slots, lengths, strict=True):
            all_lengths[slot] = length
        places: list[int] = []
        at = 0
        for length in all_lengths:
            places += (at, length)
            at += length + -length % 8
        metadata = self._metadata
        return b"".join(
            (
                metadata[: self._length_at],
                at.to_bytes(8, "little"),
                metadata[self._length_at + 8 : self._vector_at],
                self._pack_vector(*places),
                metadata[self._vector_end :],
            )
        )


def _padded(buffer: bytes) -> bytes:
    return buffer + _PAD[-len(buffer) % 8]


def _sample(schema: pa.Schema, rows: int, has_keys: bool, runs: int) -> pa.RecordBatch:
    ends = [rows] if not runs else list(range(rows - runs + 1, rows + 1))
    requests = pa.array(["p/1"] * runs if runs else [None], pa.string())
    columns = {
        names.TW_TIME: pa.array([1] * rows, TIME_TYPE),
        names.TW_KEY: pa.repeat(pa.scalar(b"k" if has_keys else None, pa.binary()), rows),
        names.TW_HEADERS: pa.nulls(rows, HEADERS_TYPE),
        names.VALUE: pa.array([b"v"] * rows, pa.binary()),
        names.TW_PRODUCER: pa.RunEndEncodedArray.from_arrays(
            pa.array(ends, pa.int32()), requests, type=PRODUCER_TYPE
        ),
        names.TW_UNSYNCED: pa.RunEndEncodedArray.from_arrays(
            pa.array([rows], pa.int32()), pa.array([0], pa.int64()), type=UNSYNCED_TYPE
        ),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _cells(column: pa.Array) -> tuple[memoryview, memoryview] | None:
    """Return offsets and bytes of a binary column as pyarrow would write them; None: not as is."""
    if column.null_count or column.offset:
        return None
    _, offsets, cells = column.buffers()
    count = len(column)
    if offsets is None or cells is None or offsets.size < 4 * (count + 1):
        return None
    places = memoryview(offsets)[: 4 * (count + 1)]
    # A slice begins or ends elsewhere than its bytes do.
    is_whole = not any(places[:4]) and int.from_bytes(places[4 * count :], "little") == cells.size
    return (places, memoryview(cells)) if is_whole else None


def _is_most_of_its_memory(buffer: pa.Buffer) -> bool:
    """Tell whether keeping this buffer keeps little else: a message may be mostly padding."""
    whole = buffer
    while (parent := whole.parent) is not None:
        whole = parent
    return bool(whole.size <= 2 * buffer.size)


def _gathered(pieces: list[fb.Bytes], apart: fb.Bytes) -> list[fb.Bytes]:
    """Join all pieces but one, which stays where it is."""
    at = next(i for i, piece in enumerate(pieces) if piece is apart)
    return [b"".join(pieces[:at]), apart, b"".join(pieces[at + 1 :])]


class QuickFrames:
    """Encodes what it can of a log's frames: raw messages without headers.

    All raw topics have one schema, so samples are shared by all logs of a process; they are used
    in its event loop alone.
    """

    _heads: ClassVar[Heads] = {}
    _shapes: ClassVar[dict[_Key, _Shape | None]] = {}
    _batch_shapes: ClassVar[dict[_Key, _Shape | None]] = {}
    _missed: ClassVar[set[_Key]] = set()

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._is_raw = schema.equals(RAW_SCHEMA)

    def rows(
        self,
        time_us: int,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        ends: Sequence[int],
        requests: Sequence[str | None],
        unsynced: int,
    ) -> bytes | None:
        """Encode a few rows; None if they have no shape that is known here.

        `ends` and `requests` are the runs of the producer column. Keys and requests must be given
        for all rows or for none, values for all.
        """
        rows = len(values)
        if rows > ROWS_MAX or None in values or not self._is_raw:
            return None
        without_key = keys.count(None)
        without_request = requests.count(None)
        if without_key not in (0, rows) or without_request not in (0, len(requests)):
            return None
        key = (rows, not without_key, 0 if without_request else len(requests))
        if key not in self._shapes:
            self._shapes[key] = self._shape(key)
        shape = self._shapes[key]
        if shape is None:
            return None
        return shape.encode(time_us, keys, values, ends, requests, unsynced)  # type: ignore[arg-type]

    def batch(
        self,
        time_us: int,
        batch: pa.RecordBatch,
        ends: Sequence[int],
        requests: Sequence[str | None],
        unsynced: int,
    ) -> list[fb.Bytes] | None:
        """Encode a batch of keys, headers and values; None if it has no shape that is known.

        The first batch of a size is left to pyarrow: only a size that comes again pays for its
        sample. Large values are not copied: what is returned refers to the batch's memory, unless
        that would keep much else alive.
        """
        rows = batch.num_rows
        if not self._is_raw or rows > BATCH_ROWS_MAX:
            return None
        keys, headers, values = batch.columns
        without_key = keys.null_count
        without_request = requests.count(None)
        if (
            headers.null_count != rows
            or without_key not in (0, rows)
            or without_request not in (0, len(requests))
            or (cells := _cells(values)) is None
        ):
            return None
        columns: list[fb.Bytes] = [*cells]
        if not without_key:
            if (cells := _cells(keys)) is None:
                return None
            columns[:0] = cells
        key = (rows, not without_key, 0 if without_request else len(requests))
        shape = self._batch_shape(key)
        if shape is None:
            return None
        pieces = shape.fill(time_us, columns, ends, requests, unsynced)  # type: ignore[arg-type]
        text = values.buffers()[2]
        if text.size >= APART_BYTES_MIN and _is_most_of_its_memory(text):
            return _gathered(pieces, columns[-1])
        return [b"".join(pieces)]

    def _batch_shape(self, key: _Key) -> _Shape | None:
        if key not in self._batch_shapes:
            if key not in self._missed:
                if len(self._missed) >= MISSED_MAX:
                    self._missed.clear()
                self._missed.add(key)
                return None
            if len(self._batch_shapes) >= BATCH_SHAPES_MAX:
                self._batch_shapes.clear()
            self._batch_shapes[key] = self._shape(key)
        return self._batch_shapes[key]

    def _shape(self, key: _Key) -> _Shape | None:
        rows, has_keys, runs = key
        try:
            return _Shape(self._schema, self._heads, rows, has_keys=has_keys, runs=runs)
        except ValueError as error:
            log.warning("frames are left to pyarrow: %s", error)
            return None
