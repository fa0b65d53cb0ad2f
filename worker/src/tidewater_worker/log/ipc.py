"""A quick encoder for the commonest frames: a few small raw messages.

pyarrow takes about 20 µs to build and serialize a batch of one row, and 40 µs for 64: much of the
time that this process spends on a small message. For rows of one *shape* the Arrow IPC message is
the same but for some buffers and their places. So pyarrow makes a sample of each shape, and others
are written from the sample with those replaced. The result is what pyarrow would have written, byte
for byte; a property test compares the two.

    message := continuation:u32  metadata-length:i32  metadata (flatbuffer)  body
    body    := the columns' buffers in schema order, each padded to 8 bytes

In the metadata only `bodyLength` and the vector of buffer places depend on lengths.
"""

import logging
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import pyarrow as pa

from tidewater_core import names
from tidewater_worker.schema import HEADERS_TYPE, PRODUCER_TYPE, TIME_TYPE, UNSYNCED_TYPE

ROWS_MAX: Final = 64
HEADS_MAX: Final = 64
"""Heads that a partition remembers, a kilobyte each: messages of one size share theirs."""
log = logging.getLogger(__name__)
_PAD: Final = [b"\0" * n for n in range(8)]
# Places in the list of buffers: two for the time, three a binary or string column, two and six for
# the map of headers, two and three for the runs of producers, two and two for what is unsynced.
_TIMES, _KEY_OFFSETS, _KEYS, _VALUE_OFFSETS, _VALUES = 1, 3, 4, 15, 16
_RUN_ENDS, _RUN_OFFSETS, _RUNS, _UNSYNCED = 18, 20, 21, 25
_BUFFERS: Final = 26


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a flatbuffer table's field is."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    found = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    if not found:
        raise ValueError(f"no field {number} in the metadata of an Arrow message")
    return table + found


def _target(data: bytes, at: int) -> int:
    """Follow a flatbuffer's offset."""
    return at + int(struct.unpack_from("<I", data, at)[0])


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
        root = _target(message, 8)
        batch = _target(message, _field(message, root, 2))
        vector = _target(message, _field(message, batch, 2))
        self._length_at = _field(message, root, 3)
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
            self._assemble([buffers[slot] for slot in self._slots]) != message
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
        buffers = [time_us.to_bytes(8, "little", signed=True) * self._rows]
        if self._has_keys:
            buffers.append(self._offsets(*accumulate(map(len, keys), initial=0)))
            buffers.append(b"".join(keys))
        buffers.append(self._offsets(*accumulate(map(len, values), initial=0)))
        buffers.append(b"".join(values))
        if self._has_runs:
            texts = [request.encode() for request in requests]
            buffers.append(self._run_ends(*ends))
            buffers.append(self._run_offsets(*accumulate(map(len, texts), initial=0)))
            buffers.append(b"".join(texts))
        buffers.append(unsynced.to_bytes(8, "little"))
        return self._assemble(buffers)

    def _assemble(self, buffers: list[bytes]) -> bytes:
        """Put what differs into its slots, among what is the same for all of this shape."""
        lengths = tuple(map(len, buffers))
        head = self._heads.get(lengths)
        if head is None:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            head = self._heads[lengths] = self._head(lengths)
        pieces = [head]
        for between, buffer in zip(self._between, buffers, strict=False):
            pieces += (between, buffer, _PAD[-len(buffer) % 8])
        pieces.append(self._between[-1])
        return b"".join(pieces)

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


class SmallFrames:
    """Encodes small frames of a raw topic's schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._heads: Heads = {}
        self._shapes: dict[tuple[int, bool, int], _Shape | None] = {}

    def encode(
        self,
        time_us: int,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        ends: Sequence[int],
        requests: Sequence[str | None],
        unsynced: int,
    ) -> bytes | None:
        """Encode raw rows without headers; None if they have no shape that is known here.

        `ends` and `requests` are the runs of the producer column. Keys and requests must be given
        for all rows or for none, values for all.
        """
        rows = len(values)
        if rows > ROWS_MAX or None in values:
            return None
        without_key = keys.count(None)
        without_request = requests.count(None)
        if without_key not in (0, rows) or without_request not in (0, len(requests)):
            return None
        key = (rows, not without_key, 0 if without_request else len(requests))
        if key not in self._shapes:
            try:
                self._shapes[key] = _Shape(
                    self._schema, self._heads, rows, has_keys=key[1], runs=key[2]
                )
            except ValueError as error:
                log.warning("small frames are left to pyarrow: %s", error)
                self._shapes[key] = None
        shape = self._shapes[key]
        if shape is None:
            return None
        return shape.encode(time_us, keys, values, ends, requests, unsynced)  # type: ignore[arg-type]
