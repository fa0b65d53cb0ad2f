"""Appending: order, groups, rotation, re-sends, a full disk and a failed fsync."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest

from tidewater_core.clock import SystemClock
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, OutcomeUnknown, Overloaded, Retryable, TidewaterError
from tidewater_worker.log.appender import Appender, LogOptions
from tidewater_worker.log.group import Rows, Submission
from tidewater_worker.log.producers import Duplicate, Request, Stored
from tidewater_worker.log.reader import LogReader, list_segments
from tidewater_worker.log.recover import recover
from tidewater_worker.log.segment import SegmentWriter
from tidewater_worker.log.syncpool import SyncPool

TOPIC = UUID(int=7)
Result = Stored | TidewaterError


@pytest.fixture
async def pool() -> AsyncIterator[SyncPool]:
    made = SyncPool(asyncio.get_running_loop())
    yield made
    made.close()


def options(**log: object) -> LogOptions:
    spec = TopicSpec.model_validate({"partitions": 1, "log": log})
    return LogOptions.of(spec, 10**6, 10**5)


def open_log(directory: Path, pool: SyncPool, **log: object) -> Appender:
    directory.mkdir(exist_ok=True)
    return Appender(
        directory, TOPIC, 0, options(**log), recover(directory, TOPIC, 0), pool,
        asyncio.get_running_loop(), SystemClock(), lambda _: None,
    )  # fmt: skip


def send(log: Appender, *values: bytes, request: Request | None = None) -> asyncio.Future[Result]:
    future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    rows = Rows([None] * len(values), [None] * len(values), list(values))
    submission = Submission(rows, sum(map(len, values)), future.set_result, request)
    log.check(submission)
    log.offer(submission)
    return future


def stored_values(directory: Path, end: int) -> list[bytes]:
    batches = LogReader(directory).read(0, end, 10**9)
    return [value for found in batches for value in found.batch.column("value").to_pylist()]


async def test_requests_of_one_turn_share_a_frame_and_keep_their_order(
    tmp_path: Path, pool: SyncPool
) -> None:
    log = open_log(tmp_path / "p", pool)
    answers = await asyncio.gather(*(send(log, b"%d" % i) for i in range(50)))
    assert answers == [Stored(i, 1) for i in range(50)]
    batches = LogReader(log.directory).read(0, 50, 10**9)
    assert [found.rows for found in batches] == [50]
    await log.close()


async def test_rotation_and_reopening_lose_nothing(tmp_path: Path, pool: SyncPool) -> None:
    sent = [os.urandom(3000).hex().encode() for _ in range(30)]
    for begin in range(0, 30, 10):
        log = open_log(tmp_path / "p", pool, segmentSize="64Ki")
        assert log.next_offset == begin
        for value in sent[begin : begin + 10]:
            await send(log, value)
        await log.close()
    assert len(list_segments(tmp_path / "p")) > 2
    assert stored_values(tmp_path / "p", 30) == sent


async def test_another_tail_cache_counts_for_an_open_log(tmp_path: Path, pool: SyncPool) -> None:
    log = open_log(tmp_path / "p", pool, tailCache="1Mi")
    for _ in range(10):
        await send(log, b"x" * 10_000)
    assert log.tail.start == 0
    log.change(options(tailCache="64Ki"))
    assert 50_000 < log.tail.nbytes <= 64 * 1024
    assert log.tail.start == 4, "the memory is given back at once"
    await send(log, b"x" * 10_000)
    assert (log.tail.start, log.tail.end) == (5, 11)
    assert len(stored_values(tmp_path / "p", 11)) == 11, "the segments have the rest"
    await log.close()


async def test_a_resend_gets_its_first_offsets_also_after_a_restart(
    tmp_path: Path, pool: SyncPool
) -> None:
    log = open_log(tmp_path / "p", pool)
    request = Request("p", 1)
    first, twin = await asyncio.gather(
        send(log, b"a", b"b", request=request), send(log, b"a", b"b", request=request)
    )
    assert first == Stored(0, 2)
    assert twin == Duplicate(0, 2), "G8: a twin of a request that is under way"
    await log.close()
    log = open_log(tmp_path / "p", pool)
    assert await send(log, b"a", b"b", request=request) == Duplicate(0, 2), "G8: after a restart"
    assert log.end == 2
    await log.close()


async def test_a_full_disk_refuses_and_then_goes_on(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path / "p", pool)
    await send(log, b"before")
    real = os.pwritev

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwritev", full)
    refused = await send(log, b"refused", request=Request("p", 1))
    assert isinstance(refused, Retryable)
    assert refused.reason == "LogDiskFull"
    monkeypatch.setattr(os, "pwritev", real)
    assert await send(log, b"after", request=Request("p", 1)) == Stored(1, 1)
    await log.close()
    assert stored_values(tmp_path / "p", 2) == [b"before", b"after"]


async def test_a_failed_fsync_stops_the_partition(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path / "p", pool)
    await send(log, b"before")

    def broken(_: SegmentWriter) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(SegmentWriter, "sync", broken)
    assert isinstance(await send(log, b"unknown"), OutcomeUnknown)
    with pytest.raises(Corrupt, match="LogWriteFailed"):
        send(log, b"refused")
    assert log.durable_end == 1, "G1: only what was fsynced counts"


async def test_bytes_in_flight_are_bounded(tmp_path: Path, pool: SyncPool) -> None:
    log = open_log(tmp_path / "p", pool)
    under_way = send(log, b"x" * 900_000)
    with pytest.raises(Overloaded, match="PartitionBusy"):
        send(log, b"y" * 200_000)
    assert await under_way == Stored(0, 1)
    await log.close()
    assert log.pending_bytes == 0


async def test_periodic_answers_before_it_is_durable_and_syncs_soon(
    tmp_path: Path, pool: SyncPool
) -> None:
    log = open_log(tmp_path / "p", pool, sync="Periodic", syncInterval="50ms")
    await send(log, b"a")
    assert (log.end, log.durable_end) == (1, 0)
    while log.durable_end < 1:
        await asyncio.sleep(0.01)
    await log.close()


async def test_a_waiting_reader_wakes_with_the_message(tmp_path: Path, pool: SyncPool) -> None:
    log = open_log(tmp_path / "p", pool)
    waiting = asyncio.create_task(log.wait_past(0, 10))
    await asyncio.sleep(0)
    assert not await log.wait_past(0, 0.01)
    await send(log, b"a")
    assert await waiting
    await log.close()


async def test_waiters_that_went_are_forgotten(tmp_path: Path, pool: SyncPool) -> None:
    log = open_log(tmp_path / "p", pool)
    for _ in range(100):
        waiting = asyncio.create_task(log.wait_past(0, 30))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not log._readers, "G6 Bounded: they were kept until the next message"
    waiting = asyncio.create_task(log.wait_past(0, 30))
    await asyncio.sleep(0)
    await send(log, b"a")
    assert await waiting
    assert not await log.wait_past(1, 0.01)
    await log.close()
