"""Going over the frames of a segment, and telling a torn write from damage. Pure.

One rule for everybody who reads a segment from its beginning: recovery, the index, and whoever
only looks (`tidewater log verify`). A segment ends where nothing but zeros follows; whatever else
follows the last valid frame is a problem, and `why_damaged` says if it may be an acknowledged
message: a bad frame with a valid one *behind* it that was written after the bad one was fsynced,
or a frame that is all there but wrong. A write that was cut short leaves the zeros that stood
there before, in whole sectors or up to the end of the file; a flipped bit does not.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import pyarrow as pa

from tidewater_core import names
from tidewater_core.errors import Corrupt
from tidewater_worker.log import frame as fmt

PADDING_BYTES_MAX: Final = 64
"""A body may end with this many zeros, which look like the preallocated ones behind it."""
SECTOR_BYTES: Final = 512
"""A disk writes this much whole or not at all."""


class Scan:
    """Goes over a segment's frames in order; then it knows where they end, and why there."""

    def __init__(self, data: bytes, header: fmt.SegmentHeader) -> None:
        self.at = header.size
        """Byte of the frame that was yielded last; in the end, of what is no frame."""
        self.offset = header.base_offset
        """Of that frame; in the end, of the message after the last one."""
        self.problem = ""
        """Why what follows is no frame; empty if nothing follows."""
        self._data, self._schema = data, header.schema

    def __iter__(self) -> Iterator[tuple[fmt.Frame, pa.RecordBatch]]:
        """Yield the valid frames with their rows."""
        data, buffer = self._data, pa.py_buffer(self._data)
        while isinstance(decoded := fmt.decode_frame(data, self.at), fmt.Frame):
            if decoded.base_offset != self.offset:
                self.problem = f"offset {decoded.base_offset}, expected {self.offset}"
                return
            batch = _read(buffer, decoded, self._schema)
            if batch is None:
                self.problem = "its rows are not of the segment's schema"
                return
            yield decoded, batch
            self.at, self.offset = decoded.end_at, self.offset + batch.num_rows
        if isinstance(decoded, fmt.Torn):
            self.problem = decoded.why
        elif data[self.at :].lstrip(b"\0"):
            self.problem = "zeros before other bytes"


def _read(buffer: pa.Buffer, frame: fmt.Frame, schema: pa.Schema) -> pa.RecordBatch | None:
    """Return a frame's rows; None if they cannot be read."""
    try:
        batch = pa.ipc.read_record_batch(
            buffer.slice(frame.body_at, frame.end_at - frame.body_at), schema
        )
        batch.validate()
    except pa.ArrowException:
        return None
    return batch


def is_unborn(data: bytes, name: str, base_offset: int) -> bool:
    """Tell whether a crash came between making the last segment's file and its header.

    The header is fsynced before the first frame is written: without a header, no message. A
    header that was damaged later has frames behind it, and is not unborn.
    """
    try:
        fmt.decode_header(data, name)
    except Corrupt as error:
        if error.reason == "SegmentVersionUnknown":
            return False
        return next(valid_frames(data, -fmt.ALIGN_BYTES, base_offset - 1), None) is None
    return False


def valid_frames(data: fmt.Bytes, after: int, offset: int) -> Iterator[tuple[int, fmt.Frame]]:
    """Look behind bad bytes for valid frames of later offsets; yield each with its byte."""
    used = len(bytes(data).rstrip(b"\0"))
    at = after + fmt.ALIGN_BYTES
    while at < used - fmt.FRAME_HEAD_BYTES:
        base, size = fmt.peek_frame(data, at)
        # A cheap look at the head first: a checksum of every position would take minutes.
        if size and offset < base < offset + 2**32 and at + size <= len(data):
            frame = fmt.decode_frame(data, at)
            if isinstance(frame, fmt.Frame):
                yield at, frame
                at = frame.end_at
                continue
        at += fmt.ALIGN_BYTES


def _synced_before(buffer: pa.Buffer, frame: fmt.Frame, schema: pa.Schema) -> int | None:
    """Return the offset below which all was fsynced when a frame was written; None: unknown."""
    batch = _read(buffer, frame, schema)
    if batch is None or names.TW_UNSYNCED not in schema.names:
        return None
    return int(frame.base_offset - batch.column(names.TW_UNSYNCED).values[0].as_py())


def why_damaged(data: bytes, at: int, offset: int, schema: pa.Schema) -> str | None:
    """Say why bad bytes are more than a write that was cut short; None if they are just that."""
    end_at = len(data)
    buffer = pa.py_buffer(data)
    for behind, frame in valid_frames(data, at, offset):
        end_at = min(end_at, behind)
        synced = _synced_before(buffer, frame, schema)
        if synced is None or synced > offset:
            return f"and a valid frame that was written later follows at byte {behind}"
    if not _is_torn(memoryview(data)[:end_at], at, offset):
        return "but the frame is all there"
    return None


def _is_torn(view: memoryview, at: int, offset: int) -> bool:
    """Tell a write that was cut short from damage to a whole frame; `view` ends behind it."""
    whole = _whole_but_for_its_head(view, at, offset)
    if whole is not None:
        # All but the head's offset or length is proven: torn only if it is a sector that they lack.
        return any(
            not any(view[at + begin : at + stop]) and any(whole[begin:stop])
            for begin, stop in _sectors(at, len(whole))
        )
    used = len(bytes(view[at:]).rstrip(b"\0"))
    _, size = fmt.peek_frame(view, at)
    length = max(size, used, fmt.FRAME_HEAD_BYTES)
    if at + length > len(view):
        return True
    return any(not any(view[at + begin : at + stop]) for begin, stop in _sectors(at, length))


def _whole_but_for_its_head(view: memoryview, at: int, offset: int) -> bytes | None:
    """Return the frame that stands here if only its offset or length is not what was written."""
    used = len(bytes(view[at:]).rstrip(b"\0"))
    aligned = -(-used // fmt.ALIGN_BYTES) * fmt.ALIGN_BYTES
    for length in range(aligned, aligned + PADDING_BYTES_MAX, fmt.ALIGN_BYTES):
        body = view[at + fmt.FRAME_HEAD_BYTES : at + length]
        if body:
            head = fmt.encode_frame_head(offset, body)
            if head[12:16] == view[at + 12 : at + 16]:
                return head + body
    return None


def _sectors(at: int, length: int) -> list[tuple[int, int]]:
    """Cut [at, at + length) at sector boundaries; the pieces count from `at`."""
    first = SECTOR_BYTES - at % SECTOR_BYTES
    cuts = [0, *range(first, length, SECTOR_BYTES), length]
    return list(pairwise(cuts))
