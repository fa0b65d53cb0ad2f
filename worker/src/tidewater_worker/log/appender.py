"""Appending to one partition: group commit, acknowledgement, rotation.

Runs in the event loop; only write and fdatasync leave it, one group at a time. While a group is on
its way to the disk the next one gathers: under load many requests share one fdatasync, and a lone
request waits for nobody.

    offer → pending → (take group: offsets, frames) → thread: write, fdatasync → tail → ack

Invariants (G1): offsets are given when a group is taken and only one group is under way, so the
log has no gap; `durable_end` moves only after fdatasync returned; with `Always` nothing is
acknowledged or shown to a reader past it. A group that failed was never acknowledged and is
not in the file (a full disk), or the partition stops for good (any other error: after a failed
fsync nobody knows what the disk holds).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

import pyarrow as pa

from tidewater_core.clock import Clock
from tidewater_core.crd.topic import SyncMode, TopicSpec
from tidewater_core.errors import Corrupt, OutcomeUnknown, Overloaded, Retryable, TidewaterError
from tidewater_worker.log.group import EncodedFrame, Submission, encode_group
from tidewater_worker.log.ipc import SmallFrames
from tidewater_worker.log.latency import Latencies
from tidewater_worker.log.producers import Duplicate, Producers, Request, Stored
from tidewater_worker.log.reader import segment_name
from tidewater_worker.log.recover import Recovered, Segment, save_producers, set_aside
from tidewater_worker.log.segment import NO_SPACE, SegmentWriter
from tidewater_worker.log.syncpool import SyncPool
from tidewater_worker.log.tail import Tail
from tidewater_worker.schema import log_schema

SMALL_GROUP_BYTES: Final = 64 * 1024
"""A group this small is written in the time that handing it to a thread takes."""
DISK_FULL_RETRY_MS: Final = 1_000
OVERLOADED_RETRY_MS: Final = 100
SESSION_RETRY_MS: Final = 1_000
SESSION_LOST: Final = "this worker may have been taken for dead and must join again first"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How one partition's log behaves."""

    schema: pa.Schema
    sync: SyncMode
    sync_interval_s: float
    """How long an acknowledged message may wait for its fdatasync, unless `sync` is Always."""
    segment_bytes: int
    segment_age_us: int
    tail_bytes: int
    inflight_bytes_max: int
    group_bytes_max: int

    @classmethod
    def of(cls, spec: TopicSpec, inflight_bytes_max: int, group_bytes_max: int) -> "LogOptions":
        """Read them off a Topic's spec."""
        interval = spec.log.sync_interval
        if spec.log.sync is SyncMode.NONE:
            # Nobody waits for it, but the table may only take what is durable.
            interval = spec.writer.flush_interval
        return cls(
            schema=log_schema(spec),
            sync=spec.log.sync,
            sync_interval_s=interval.seconds,
            segment_bytes=spec.log.segment_size.bytes,
            segment_age_us=spec.log.segment_age.ms * 1000,
            tail_bytes=spec.log.tail_cache.bytes,
            inflight_bytes_max=inflight_bytes_max,
            group_bytes_max=group_bytes_max,
        )


class Appender:
    """The one writer of a partition's log."""

    def __init__(
        self,
        directory: Path,
        topic_uuid: UUID,
        partition: int,
        options: LogOptions,
        recovered: Recovered,
        pool: SyncPool,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_durable: Callable[[int], None],
    ) -> None:
        self.directory = directory
        self.partition = partition
        self.options = options
        self.producers: Producers = recovered.producers
        self.segments: list[Segment] = recovered.segments
        self.next_offset = recovered.next_offset
        """The offset of the next message."""
        self.end = recovered.next_offset
        """Readers may see offsets below this: they are acknowledged."""
        self.durable_end = recovered.next_offset
        """Offsets below this are fsynced."""
        self.latencies = Latencies()
        self.tail = Tail(recovered.next_offset, options.tail_bytes)
        self.failure: TidewaterError | None = None
        self.may_append: Callable[[], bool] = lambda: True
        """Whether the partition is certainly still ours (G5); asked before and after a write."""
        self.pending_bytes = 0
        self._topic_uuid = topic_uuid
        self._pool, self._loop, self._clock = pool, loop, clock
        self._on_durable = on_durable
        self._last_time_us = recovered.last_time_us
        self._writer: SegmentWriter | None = None
        self._rotate = recovered.schema is None or recovered.schema != options.schema
        self._began_us = clock.now_us()
        if recovered.segments:
            last = recovered.segments[-1]
            path = directory / segment_name(last.base_offset)
            self._writer = SegmentWriter.reopen(path, last.base_offset, last.index)
        self._small = SmallFrames(options.schema)
        self._pending: list[Submission] = []
        self._waiting: dict[Request, list[Submission]] = {}
        self._busy = False
        self._scheduled = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._readers: list[asyncio.Future[None]] = []
        self._idle: asyncio.Future[None] | None = None

    # ---- producing

    def check(self, submission: Submission) -> None:
        """Raise if `offer` would have to refuse; a request over many partitions asks each first."""
        if self.failure is not None:
            raise self.failure
        if not self.may_append():
            raise Retryable("SessionLost", SESSION_LOST, SESSION_RETRY_MS)
        if self.pending_bytes + submission.nbytes > self.options.inflight_bytes_max:
            raise Overloaded(
                "PartitionBusy",
                f"{self.pending_bytes} bytes already wait for partition {self.partition}'s log",
                OVERLOADED_RETRY_MS,
            )
        if submission.request is not None:
            self.producers.find(submission.request, submission.count)

    def offer(self, submission: Submission) -> None:
        """Take checked messages for the log; `submission.done` tells how it ended."""
        if submission.request is not None and self._is_duplicate(submission):
            return
        self._pending.append(submission)
        self.pending_bytes += submission.nbytes
        if not self._busy and not self._scheduled:
            # At the end of this turn of the loop: what else arrived in it joins the group.
            self._scheduled = True
            self._loop.call_soon(self._start)

    def _is_duplicate(self, submission: Submission) -> bool:
        """Answer a re-sent request from memory, or tie it to the one that is under way (G8)."""
        assert submission.request is not None
        stored = self.producers.find(submission.request, submission.count)
        if stored is not None:
            submission.done(Duplicate(stored.offset, stored.count))
            return True
        if submission.request in self._waiting:
            self._waiting[submission.request].append(submission)
            return True
        self._waiting[submission.request] = []
        return False

    def _take(self) -> list[Submission]:
        group, size = self._pending, self.pending_bytes
        if size <= self.options.group_bytes_max:
            self._pending = []
            return group
        size = 0
        for i, submission in enumerate(self._pending):
            size += submission.nbytes
            if i and size > self.options.group_bytes_max:
                group, self._pending = self._pending[:i], self._pending[i:]
                break
        else:
            self._pending = []
        return group

    def _start(self) -> None:
        self._scheduled = False
        if self._busy or not self._pending:
            return
        group = self._take()
        now_us = self._clock.now_us()
        self._last_time_us = max(self._last_time_us, now_us)
        try:
            frames = encode_group(
                group,
                self.next_offset,
                self._last_time_us,
                self.options.schema,
                self._small,
                self.durable_end,
            )
        except (pa.ArrowException, ValueError, TypeError) as error:
            # Decoding checks every batch, so this is a fault of ours: fail this group alone.
            log.exception("partition %s: a group could not be encoded", self.partition)
            self._fail(group, Retryable("EncodingFailed", str(error)))
            return
        self.next_offset = frames[-1].base_offset + frames[-1].rows
        self._busy = True
        nbytes = sum(frame.nbytes for frame in frames)
        rotate = self._wants_rotation(nbytes, now_us)
        if rotate:
            self._began_us = now_us
        sync = self.options.sync is SyncMode.ALWAYS
        started = self._clock.monotonic()

        def job() -> None:
            if rotate:
                self._rotate_segment(frames[0].base_offset)
            self._write(frames, sync=sync)

        self._pool.submit(
            job,
            lambda error: self._finish(group, frames, started, error),
            is_small=nbytes <= SMALL_GROUP_BYTES and not rotate,
        )

    def _wants_rotation(self, nbytes: int, now_us: int) -> bool:
        writer = self._writer
        if writer is None or self._rotate:
            return True
        has_frames = writer.index.end_offset > writer.base_offset
        too_large = writer.position + nbytes > self.options.segment_bytes
        too_old = now_us - self._began_us > self.options.segment_age_us
        return has_frames and (too_large or too_old)

    def _rotate_segment(self, base: int) -> None:
        """Seal the segment and begin the next (in a thread: nothing else touches them now)."""
        # The producers first: a segment whose producers are not saved costs a longer recovery.
        self.directory.mkdir(parents=True, exist_ok=True)
        save_producers(self.directory, base, self.producers)
        if self._writer is not None:
            self._writer.seal()
            self.segments[-1].sealed_at_us = self._clock.now_us()
        self._writer = None
        self._writer = SegmentWriter.create(
            self.directory, self._topic_uuid, self.partition, base, self.options.schema
        )
        if self.segments and self.segments[-1].base_offset == base:
            self.segments.pop()  # it held nothing, and the new one has its name
        self.segments.append(Segment(base, self._writer.index))
        self._writer.index.end_offset = base
        self._rotate = False

    def _write(self, frames: list[EncodedFrame], *, sync: bool) -> None:
        writer = self._writer
        assert writer is not None
        buffers: list[bytes | memoryview] = []
        for frame in frames:
            buffers.append(frame.head)
            buffers.append(memoryview(frame.body))
        at = writer.position
        writer.append(buffers, sum(frame.nbytes for frame in frames))
        for frame in frames:
            end_at = at + frame.nbytes
            writer.index.note(frame.base_offset, frame.rows, at, end_at, frame.time_us)
            at = end_at
        if sync:
            writer.sync()

    def _finish(
        self,
        group: list[Submission],
        frames: list[EncodedFrame],
        started: float,
        error: OSError | None,
    ) -> None:
        self._busy = False
        if error is not None:
            self._write_failed(group, frames, error)
        else:
            self.latencies.add(self._clock.monotonic() - started)
            self.tail.append(frames)
            self.end = self.next_offset
            if self.options.sync is SyncMode.ALWAYS:
                self.durable_end = self.end
                self._on_durable(self.end)
            elif self._sync_timer is None:
                self._sync_timer = self._loop.call_later(
                    self.options.sync_interval_s, self._sync_later
                )
            self._acknowledge(group, frames[0].base_offset)
            self._wake_readers()
        if self._pending:
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._start)
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _acknowledge(self, group: list[Submission], offset: int) -> None:
        # It is on the disk, but only an owner's word counts: another one may have begun meanwhile.
        lost = None if self.may_append() else OutcomeUnknown("SessionLost", SESSION_LOST, 1_000)
        for submission in group:
            self.pending_bytes -= submission.nbytes
            stored = Stored(offset, submission.count)
            offset += submission.count
            if submission.request is not None:
                self.producers.store(submission.request, stored)
                for twin in self._waiting.pop(submission.request):
                    twin.done(lost or Duplicate(stored.offset, stored.count))
            submission.done(lost or stored)

    def _write_failed(
        self, group: list[Submission], frames: list[EncodedFrame], error: OSError
    ) -> None:
        writer = self._writer
        written = writer is not None and writer.index.end_offset > frames[0].base_offset
        if error.errno in NO_SPACE and not written:
            self.next_offset = frames[0].base_offset
            self._rotate = self._rotate or writer is None
            reason: TidewaterError = Retryable(
                "LogDiskFull", "the disk of the log is full; nothing was stored", DISK_FULL_RETRY_MS
            )
        else:
            log.error("partition %s in %s stops: %s", self.partition, self.directory, error)
            self.failure = Corrupt(
                "LogWriteFailed",
                f"writing the log failed ({error}); the partition stops until it is reopened",
            )
            reason = OutcomeUnknown("LogWriteFailed", self.failure.message)
        self._fail(group, reason)
        if self.failure is not None:
            rest, self._pending = self._pending, []
            self._fail(rest, self.failure)

    def _fail(self, group: list[Submission], error: TidewaterError) -> None:
        for submission in group:
            self.pending_bytes -= submission.nbytes
            if submission.request is not None:
                for twin in self._waiting.pop(submission.request, []):
                    twin.done(error)
            submission.done(error)

    # ---- Periodic and None

    def _sync_later(self) -> None:
        writer, end = self._writer, self.end
        if writer is None:
            self._sync_timer = None
            return
        # Writes go on meanwhile; a segment sealed in between was fsynced by its sealing.
        self._pool.submit(writer.sync, lambda error: self._synced(end, error))

    def _synced(self, end: int, error: OSError | None) -> None:
        self._sync_timer = None
        if error is not None:
            self.failure = Corrupt("LogSyncFailed", f"fdatasync failed: {error}")
            return
        self.durable_end = max(self.durable_end, end)
        self._on_durable(self.durable_end)
        if self.durable_end < self.end:
            self._sync_timer = self._loop.call_later(self.options.sync_interval_s, self._sync_later)

    async def make_durable(self) -> None:
        """Fsync what is acknowledged; at once true with `Always`."""
        if self.durable_end < self.end and (writer := self._writer) is not None:
            end = self.end
            await asyncio.to_thread(writer.sync)
            self.durable_end = max(self.durable_end, end)
            self._on_durable(self.durable_end)

    # ---- reading

    def _wake_readers(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    async def wait_past(self, offset: int, timeout_s: float) -> bool:
        """Wait until the log goes on past `offset`; False when the time is over."""
        deadline = self._clock.monotonic() + timeout_s
        while self.end <= offset:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            reader: asyncio.Future[None] = self._loop.create_future()
            self._readers.append(reader)
            try:
                await asyncio.wait_for(reader, left)
            except TimeoutError:
                if reader in self._readers:
                    self._readers.remove(reader)
                return self.end > offset
        return True

    # ---- life cycle

    def change(self, options: LogOptions) -> None:
        """Take new options; another schema begins a segment with the next group."""
        if options.schema != self.options.schema:
            self._rotate = True
            self._small = SmallFrames(options.schema)
        self.options = options

    @property
    def last_time_us(self) -> int:
        """Return the time of the last message; the next has none before it."""
        return self._last_time_us

    @property
    def start(self) -> int:
        """Return the first offset still in the log."""
        return self.segments[0].base_offset if self.segments else self.end

    def start_at(self, offset: int) -> None:
        """Begin at `offset`: a new log on a table that has rows, or one behind its table.

        Everything in the old segments should be in the table then. They leave the log, which has
        no gaps, but their bytes are kept.
        """
        assert offset >= self.next_offset, "an offset is never given twice"
        assert not self._busy, "nothing is under way"
        assert not self._pending, "nothing waits"
        self.next_offset = self.end = self.durable_end = offset
        self.tail = Tail(offset, self.options.tail_bytes)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for segment in self.segments:
            set_aside(self.directory, segment.base_offset)
        self.segments = []
        self._rotate = True

    async def settle(self) -> None:
        """Wait until what was offered is finished."""
        while self._busy or self._pending or self._scheduled:
            self._idle = self._loop.create_future()
            await self._idle

    async def close(self) -> None:
        """Finish what was offered, then close the segment."""
        await self.settle()
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        if self._writer is not None:
            await self._loop.run_in_executor(None, self._writer.close)
            self.durable_end = self.end
            self._on_durable(self.durable_end)
