"""The sparse index of a segment: offset → byte and time → offset. Pure but for `rebuild`.

    index := magic "TWIDX001"  end-offset:u64  size:u64  last-time:i64  count:u32
             entry[count]  crc32:u32
    entry := offset:u64  byte:u64  time:i64 (µs of the frame's first row)

Written beside a segment when it is sealed and never needed: a missing or foreign one is rebuilt
from the frames. `end-offset` and `size` spare recovery a scan of every sealed segment.
"""

import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Final

import pyarrow as pa

from tidewater_core import names
from tidewater_core.errors import Corrupt
from tidewater_worker.log import frame as fmt
from tidewater_worker.log.scan import Scan

MAGIC: Final = b"TWIDX001"
SUFFIX: Final = ".idx"
STRIDE_BYTES: Final = 128 * 1024
"""A seek reads at most this much to find its frame."""
_HEAD: Final = struct.Struct("<8sQQqI")
_ENTRY: Final = struct.Struct("<QQq")
_CRC: Final = struct.Struct("<I")


class SparseIndex:
    """Where every ~128 KiB of a segment begins."""

    def __init__(self) -> None:
        self.end_offset = 0
        self.size = 0
        self.last_time_us = 0
        self._offsets: list[int] = []
        self._bytes: list[int] = []
        self._times: list[int] = []

    def note(self, offset: int, rows: int, at: int, end_at: int, time_us: int) -> None:
        """Record a frame that was appended at byte `at`."""
        if not self._bytes or at - self._bytes[-1] >= STRIDE_BYTES:
            self._offsets.append(offset)
            self._bytes.append(at)
            self._times.append(time_us)
        self.end_offset, self.size, self.last_time_us = offset + rows, end_at, time_us

    def byte_for(self, offset: int) -> tuple[int, int] | None:
        """Return (offset, byte) of the last entry at or before `offset`."""
        i = bisect_right(self._offsets, offset) - 1
        return (self._offsets[i], self._bytes[i]) if i >= 0 else None

    def time_of(self, offset: int) -> int | None:
        """Return about when a message came: the time of the last entry at or before it."""
        i = max(bisect_right(self._offsets, offset) - 1, 0)
        return self._times[i] if self._times else None

    def offset_before(self, time_us: int) -> int | None:
        """Return an indexed offset whose frame is before `time_us`, the nearest there is."""
        i = bisect_left(self._times, time_us)
        return self._offsets[max(i - 1, 0)] if self._offsets else None

    def to_bytes(self) -> bytes:
        """Encode for the file beside the segment."""
        entries = zip(self._offsets, self._bytes, self._times, strict=True)
        data = _HEAD.pack(
            MAGIC, self.end_offset, self.size, self.last_time_us, len(self._offsets)
        ) + b"".join(_ENTRY.pack(*entry) for entry in entries)
        return data + _CRC.pack(zlib.crc32(data))

    @classmethod
    def from_bytes(cls, data: bytes) -> "SparseIndex | None":
        """Decode; None for anything that is not a whole index."""
        if len(data) < _HEAD.size + _CRC.size:
            return None
        if zlib.crc32(data[: -_CRC.size]) != _CRC.unpack_from(data, len(data) - _CRC.size)[0]:
            return None
        magic, end_offset, size, last_time_us, count = _HEAD.unpack_from(data)
        if magic != MAGIC or len(data) != _HEAD.size + count * _ENTRY.size + _CRC.size:
            return None
        index = cls()
        for offset, at, time_us in _ENTRY.iter_unpack(data[_HEAD.size : -_CRC.size]):
            index._offsets.append(offset)
            index._bytes.append(at)
            index._times.append(time_us)
        index.end_offset, index.size, index.last_time_us = end_offset, size, last_time_us
        return index


def load(segment: Path) -> SparseIndex | None:
    """Load the index beside a sealed segment, if it is there and fits the segment."""
    try:
        index = SparseIndex.from_bytes(segment.with_suffix(SUFFIX).read_bytes())
        if index is None or index.size != os.stat(segment).st_size:
            return None
    except FileNotFoundError:
        return None
    return index


def first_time_us(batch: pa.RecordBatch) -> int:
    """Return the publish time of a batch's first row."""
    time_us: int = batch.column(names.TW_TIME)[0].value
    return time_us


def rebuild(data: bytes, header: fmt.SegmentHeader, name: str) -> SparseIndex:
    """Index a whole, sealed segment; every frame is checked."""
    index = SparseIndex()
    index.end_offset, index.size = header.base_offset, header.size
    scan = Scan(data, header)
    for frame, batch in scan:
        index.note(scan.offset, batch.num_rows, scan.at, frame.end_at, first_time_us(batch))
    if scan.problem:
        raise Corrupt("FrameCorrupt", f"{name} byte {scan.at}: {scan.problem}")
    return index
