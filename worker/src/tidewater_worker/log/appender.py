"""Appending to one partition: group commit, acknowledgement, rotation.

Runs in the event loop; only write and fdatasync leave it, one group at a time. While a group is on
its way to the disk the next one gathers: under load many requests share one fdatasync, and a lone
request waits for nobody.

    offer → lots → (take group: offsets, frames) → thread: write, fdatasync → tail → ack

Invariants (G1): offsets are given when a group is taken and only one group is under way, so the
log has no gap; `durable_end` moves only after fdatasync returned; with `Always` nothing is
acknowledged or shown to a reader past it. A group that failed was never acknowledged and is
not in the file (a full disk), or the log stops for good (`failure`, any other error: after a
failed fsync nobody knows what the disk holds). From then on nothing is taken, acknowledged or
called durable; whoever wants to go on closes it and recovers what the disk has.

A group has one schema: that of the columns its messages were decoded for. Options, the topic's
schema among them, may change at any time; what a group needs of them it takes along.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from uuid import UUID

import pyarrow as pa

from tidewater_core.clock import Clock
from tidewater_core.crd.topic import SyncMode, TopicSpec
from tidewater_core.errors import Corrupt, OutcomeUnknown, Overloaded, Retryable, TidewaterError
from tidewater_worker.log.chain import SegmentChain
from tidewater_worker.log.durable import Noting
from tidewater_worker.log.group import EncodedFrame, Rows, Submission, encode_group
from tidewater_worker.log.ipc import QuickFrames
from tidewater_worker.log.latency import Latencies
from tidewater_worker.log.producers import Duplicate, Producers, Request, Stored, reused
from tidewater_worker.log.recover import Recovered, Segment
from tidewater_worker.log.segment import NO_SPACE
from tidewater_worker.log.syncpool import SyncPool
from tidewater_worker.log.tail import Tail, TailRoom
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


@dataclass(slots=True)
class _Lot:
    """Requests of one schema that wait, in the order in which they came."""

    schema: pa.Schema
    """Of their frames."""
    quick: QuickFrames
    waiting: list[Submission] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Group:
    """What is on its way to the disk."""

    submissions: list[Submission]
    frames: list[EncodedFrame]
    is_synced: bool
    """Whether it is fsynced before it is answered."""
    started: float


class _Columns:
    """How messages with certain columns are framed."""

    def __init__(self, log: pa.Schema) -> None:
        self.log = log
        self.sent = pa.schema(list(log)[1:-2])
        """What decoding makes: all but the time, and what stands for the log alone."""
        self.quick = QuickFrames(log)

    def fits(self, sent: pa.Schema) -> bool:
        """Tell whether a batch has these columns; required or not does not matter here."""
        mine = self.sent
        return bool(sent.equals(mine)) or (sent.names == mine.names and sent.types == mine.types)

    def of(self, sent: pa.Schema) -> "_Columns":
        """Return the same for batches with other columns."""
        log = list(self.log)
        return _Columns(pa.schema([log[0], *sent, *log[-2:]]))


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
        tail_room: TailRoom | None = None,
    ) -> None:
        self.directory = directory
        self.partition = partition
        self.options = options
        self.producers: Producers = recovered.producers
        self._chain = SegmentChain(directory, topic_uuid, partition, recovered, clock)
        self.segments: list[Segment] = self._chain.segments
        self.next_offset = recovered.next_offset
        """The offset of the next message."""
        self.end = recovered.next_offset
        """Readers may see offsets below this: they are acknowledged."""
        self.durable_end = recovered.next_offset
        """Offsets below this are fsynced."""
        self.latencies = Latencies()
        self.tail = Tail(recovered.next_offset, options.tail_bytes, tail_room)
        self.failure: TidewaterError | None = None
        """Why the log has stopped for good; None while it goes on."""
        self.may_append: Callable[[], bool] = lambda: True
        """Whether the partition is certainly still ours (G5); asked before and after a write."""
        self.pending_bytes = 0
        self._pool, self._loop, self._clock = pool, loop, clock
        self._noting = Noting(loop, pool, self._chain.note_durable)
        self._on_durable = on_durable
        self._last_time_us = recovered.last_time_us
        self._columns = _Columns(options.schema)
        self._other_columns = self._columns
        """Of the last messages that were decoded for another schema."""
        self._lots: deque[_Lot] = deque()
        self._waiting: dict[Request, tuple[int, list[Submission]]] = {}
        """Requests under way: how many messages, and who sent the same again."""
        self._busy = False
        self._scheduled = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._readers: set[asyncio.Future[None]] = set()
        self._settling: list[asyncio.Future[None]] = []

    # ---- producing

    def check(self, submission: Submission) -> None:
        """Raise if `offer` would have to refuse; a request over many partitions asks each first."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
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
            under_way = self._waiting.get(submission.request)
            if under_way is not None and under_way[0] != submission.count:
                raise reused(submission.request, under_way[0], submission.count)

    def offer(self, submission: Submission) -> None:
        """Take checked messages for the log; `submission.done` tells how it ended."""
        if submission.request is not None and self._is_duplicate(submission):
            return
        columns = self._columns_of(submission)
        if not self._lots or self._lots[-1].schema is not columns.log:
            self._lots.append(_Lot(columns.log, columns.quick))
        self._lots[-1].waiting.append(submission)
        self.pending_bytes += submission.nbytes
        self._go_on()

    def _is_duplicate(self, submission: Submission) -> bool:
        """Answer a re-sent request from memory, or tie it to the one that is under way (G8)."""
        assert submission.request is not None
        stored = self.producers.find(submission.request, submission.count)
        if stored is not None:
            submission.done(Duplicate(stored.offset, stored.count))
            return True
        if submission.request in self._waiting:
            self._waiting[submission.request][1].append(submission)
            return True
        self._waiting[submission.request] = (submission.count, [])
        return False

    def _columns_of(self, submission: Submission) -> _Columns:
        """Return how messages are framed: a schema may change between decoding and here."""
        if isinstance(submission.payload, Rows):
            return self._columns
        sent = submission.payload.schema
        if self._columns.fits(sent):
            return self._columns
        if not self._other_columns.fits(sent):
            self._other_columns = self._columns.of(sent)
        return self._other_columns

    def _go_on(self) -> None:
        """See to what waits; wake who waits for nothing to be under way."""
        if self._busy or self._scheduled:
            return
        if self._lots:
            # At the end of this turn of the loop: what else arrived in it joins the group.
            self._scheduled = True
            self._loop.call_soon(self._start)
            return
        settling, self._settling = self._settling, []
        for waiter in settling:
            if not waiter.done():
                waiter.set_result(None)

    def _take(self) -> tuple[_Lot, list[Submission]]:
        lot = self._lots[0]
        group, size = lot.waiting, 0
        if self.pending_bytes > self.options.group_bytes_max:
            for i, submission in enumerate(group):
                size += submission.nbytes
                if i and size > self.options.group_bytes_max:
                    group, lot.waiting = group[:i], group[i:]
                    return lot, group
        self._lots.popleft()
        return lot, group

    def _start(self) -> None:
        self._scheduled = False
        if not self._lots:  # the log stopped meanwhile
            self._go_on()
            return
        lot, submissions = self._take()
        now_us = self._clock.now_us()
        self._last_time_us = max(self._last_time_us, now_us)
        try:
            frames = encode_group(
                submissions,
                self.next_offset,
                self._last_time_us,
                lot.schema,
                lot.quick,
                self.durable_end,
            )
        except Exception as error:
            # Decoding checks every batch, so this is a fault of ours: fail this group alone.
            log.exception("partition %s: a group could not be encoded", self.partition)
            self._fail(submissions, Retryable("EncodingFailed", str(error)))
            self._go_on()
            return
        self._submit(lot.schema, submissions, frames, now_us)

    def _submit(
        self,
        schema: pa.Schema,
        submissions: list[Submission],
        frames: list[EncodedFrame],
        now_us: int,
    ) -> None:
        options, chain = self.options, self._chain
        group = _Group(
            submissions, frames, options.sync is SyncMode.ALWAYS, self._clock.monotonic()
        )
        base, nbytes = frames[0].base_offset, sum(frame.nbytes for frame in frames)
        rotate = chain.wants_rotation(
            schema, nbytes, options.segment_bytes, now_us - options.segment_age_us
        )

        def job() -> None:
            if rotate:
                chain.rotate(base, schema, self.producers)
            chain.write(frames, sync=group.is_synced)

        self.next_offset = frames[-1].base_offset + frames[-1].rows
        self._busy = True
        self._pool.submit(
            job,
            lambda error: self._finish(group, error),
            is_small=nbytes <= SMALL_GROUP_BYTES and not rotate,
        )

    def _finish(self, group: _Group, error: Exception | None) -> None:
        self._busy = False
        if error is not None or self.failure is not None:
            self._write_failed(group, error)
        else:
            self.latencies.add(self._clock.monotonic() - group.started)
            self.tail.append(group.frames)
            self.end = self.next_offset
            if group.is_synced:
                self._advance(self.end)
            elif self._sync_timer is None:
                self._sync_timer = self._loop.call_later(
                    self.options.sync_interval_s, self._sync_later
                )
            self._acknowledge(group.submissions, group.frames[0].base_offset)
            self._wake_readers()
        self._go_on()

    def _acknowledge(self, group: list[Submission], offset: int) -> None:
        # It is on the disk, but only an owner's word counts: another one may have begun meanwhile.
        lost = None if self.may_append() else OutcomeUnknown("SessionLost", SESSION_LOST, 1_000)
        for submission in group:
            self.pending_bytes -= submission.nbytes
            stored = Stored(offset, submission.count)
            offset += submission.count
            if submission.request is not None:
                self.producers.store(submission.request, stored)
                for twin in self._waiting.pop(submission.request)[1]:
                    twin.done(lost or Duplicate(stored.offset, stored.count))
            submission.done(lost or stored)

    def _write_failed(self, group: _Group, error: Exception | None) -> None:
        base = group.frames[0].base_offset
        is_full = isinstance(error, OSError) and error.errno in NO_SPACE
        if self.failure is None and is_full and self._chain.is_without(base):
            self.next_offset = base
            reason: TidewaterError = Retryable(
                "LogDiskFull", "the disk of the log is full; nothing was stored", DISK_FULL_RETRY_MS
            )
        else:
            failure = self._poison("LogWriteFailed", "writing", error)
            reason = OutcomeUnknown(failure.reason, failure.message)
        self._fail(group.submissions, reason)

    def _poison(self, reason: str, what: str, error: Exception | None) -> TidewaterError:
        """Stop for good: what is on the disk is for the next recovery to say."""
        if self.failure is None:
            log.error("the log in %s stops: %s failed: %r", self.directory, what, error)
            self.failure = Corrupt(
                reason, f"{what} the log failed ({error}); it stops until it is reopened"
            )
            if self._sync_timer is not None:
                self._sync_timer.cancel()
            lots, self._lots = self._lots, deque()
            for lot in lots:
                self._fail(lot.waiting, self.failure)
        return self.failure

    def _fail(self, submissions: list[Submission], error: TidewaterError) -> None:
        for submission in submissions:
            self.pending_bytes -= submission.nbytes
            if submission.request is not None:
                for twin in self._waiting.pop(submission.request)[1]:
                    twin.done(error)
            submission.done(error)

    # ---- durable, sooner or later

    def _advance(self, end: int) -> None:
        """Note that all below `end` is fsynced; never after a sync or a write has failed."""
        if self.failure is None and end > self.durable_end:
            self.durable_end = end
            self._noting.later(end)
            self._on_durable(end)

    def tell_durable(self) -> None:
        """Say again how far the log is durable, to who could not use it before."""
        self._on_durable(self.durable_end)

    def _sync_later(self) -> None:
        end = self.end  # writes go on meanwhile
        self._pool.submit(self._chain.sync, lambda error: self._synced(end, error))

    def _synced(self, end: int, error: Exception | None) -> None:
        self._sync_timer = None
        if error is not None:
            self._poison("LogSyncFailed", "syncing", error)
        self._advance(end)
        if self.durable_end < self.end and self.failure is None:
            self._sync_timer = self._loop.call_later(self.options.sync_interval_s, self._sync_later)

    async def make_durable(self) -> None:
        """Fsync what is acknowledged, or raise that it cannot be; at once true with `Always`."""
        end = self.end
        if self.durable_end < end and self.failure is None:
            try:
                await asyncio.to_thread(self._chain.sync)
            except OSError as error:
                self._poison("LogSyncFailed", "syncing", error)
            self._advance(end)
        if self.durable_end < end:
            assert self.failure is not None
            raise self.failure.with_traceback(None)

    # ---- reading

    def _wake_readers(self) -> None:
        readers, self._readers = self._readers, set()
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
            self._readers.add(reader)
            try:
                await asyncio.wait_for(reader, left)
            except TimeoutError:
                return self.end > offset
            finally:
                self._readers.discard(reader)
        return True

    # ---- life cycle

    def change(self, options: LogOptions) -> None:
        """Take new options; what waits is written in the schema that it was decoded for."""
        if options.schema == self.options.schema:
            options = replace(options, schema=self.options.schema)
        else:
            self._columns = _Columns(options.schema)
        self.options = options
        self.tail.change(options.tail_bytes)

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
        assert not self._lots, "nothing waits"
        self.next_offset = self.end = self.durable_end = offset
        self.tail = self.tail.anew(offset)
        self._chain.set_aside()

    async def settle(self) -> None:
        """Wait until what was offered is finished."""
        while self._busy or self._lots or self._scheduled:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._settling.append(waiter)
            await waiter

    async def close(self) -> None:
        """Finish what was offered, then close the segment; one that failed stays as it is."""
        await self.settle()
        self._noting.stop()
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        if self.failure is None:
            try:
                await asyncio.to_thread(self._chain.close)
            except OSError as error:
                self._poison("LogSyncFailed", "closing", error)
            self._advance(self.end)
        await asyncio.to_thread(self._chain.abandon)
        self.tail.close()
