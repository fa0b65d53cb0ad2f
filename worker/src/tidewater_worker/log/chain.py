"""The segments of one log on the disk: all but the last are sealed, the last one is written.

`rotate` and `write` run in the sync threads, for one group at a time; `sync` may run beside them.
So the segment that is written is replaced in one step, when the next one is there: whoever syncs
finds the old one, whose sealing is a sync, or the new one, behind which everything is sealed.

What is decided here is decided by the disk, not by flags: a segment takes frames of the schema
in its header and of no other, and after a failed sync it takes nothing more.
"""

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pyarrow as pa

from tidewater_core.clock import Clock
from tidewater_worker.log.group import EncodedFrame
from tidewater_worker.log.producers import Producers
from tidewater_worker.log.reader import segment_name
from tidewater_worker.log.recover import Recovered, Segment, save_producers, set_aside
from tidewater_worker.log.segment import SegmentWriter


class SegmentChain:
    """The files of one partition's log."""

    def __init__(
        self, directory: Path, topic_uuid: UUID, partition: int, recovered: Recovered, clock: Clock
    ) -> None:
        self.segments: list[Segment] = recovered.segments
        self._directory, self._topic_uuid, self._partition = directory, topic_uuid, partition
        self._clock = clock
        self._writer: SegmentWriter | None = None
        self._is_over = False
        self._began_us = clock.now_us()
        if recovered.segments:
            last = recovered.segments[-1]
            path = directory / segment_name(last.base_offset)
            self._writer = SegmentWriter.reopen(
                path, last.base_offset, last.index, recovered.schema
            )
            self._began_us = last.index.time_of(last.base_offset) or self._began_us

    def wants_rotation(
        self, schema: pa.Schema, nbytes: int, bytes_max: int, began_us_min: int
    ) -> bool:
        """Tell whether frames need a new segment: by their schema, by its size or its age."""
        writer = self._writer
        if writer is None or writer.is_closed:
            return True
        if writer.schema is not schema:
            if writer.schema != schema:
                return True
            writer.schema = schema  # the next comparison is quick
        has_frames = writer.index.end_offset > writer.base_offset
        too_large = writer.position + nbytes > bytes_max
        too_old = self._began_us < began_us_min
        return has_frames and (too_large or too_old)

    def rotate(self, base: int, schema: pa.Schema, producers: Producers) -> None:
        """Seal the segment and begin the next; if that fails, it can be tried again."""
        assert not self._is_over, "another process may have the log by now"
        # The producers first: a segment whose producers are not saved costs a longer recovery.
        self._directory.mkdir(parents=True, exist_ok=True)
        save_producers(self._directory, base, producers)
        if self._writer is not None and not self._writer.is_closed:
            self._writer.seal()
            self.segments[-1].sealed_at_us = self._clock.now_us()
        writer = SegmentWriter.create(
            self._directory, self._topic_uuid, self._partition, base, schema
        )
        writer.index.end_offset = base
        if self.segments and self.segments[-1].base_offset == base:
            self.segments.pop()  # it held nothing, and the new one has its name
        self.segments.append(Segment(base, writer.index))
        self._writer, self._began_us = writer, self._clock.now_us()

    def write(self, frames: Sequence[EncodedFrame], *, sync: bool) -> None:
        """Append a group's frames to the segment that is written."""
        writer = self._writer
        assert writer is not None, "rotation comes first"
        assert frames[0].schema is writer.schema, "a segment has one schema"
        buffers: list[bytes | memoryview] = []
        for frame in frames:
            buffers.append(frame.head)
            buffers += frame.pieces
        at = writer.position
        writer.append(buffers, sum(frame.nbytes for frame in frames))
        for frame in frames:
            end_at = at + frame.nbytes
            writer.index.note(frame.base_offset, frame.rows, at, end_at, frame.time_us)
            at = end_at
        if sync:
            writer.sync()

    def is_without(self, offset: int) -> bool:
        """Tell whether nothing from `offset` on is in the log, for certain."""
        writer = self._writer
        return writer is None or not (writer.is_broken or writer.index.end_offset > offset)

    def sync(self) -> None:
        """Make all that was written before this call durable."""
        if (writer := self._writer) is not None:
            writer.sync()

    def note_durable(self, end: int) -> None:
        """Note beside the last segment how far it is durable."""
        if (writer := self._writer) is not None:
            writer.note_durable(end)

    def close(self) -> None:
        """Make all of it durable and close."""
        self._is_over = True
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """Close and leave the last segment as it is: what it holds is for recovery to say."""
        self._is_over = True
        if self._writer is not None:
            self._writer.abandon()

    def set_aside(self) -> None:
        """Take all segments out of the log but keep their bytes."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for segment in self.segments:
            set_aside(self._directory, segment.base_offset)
        self.segments.clear()
