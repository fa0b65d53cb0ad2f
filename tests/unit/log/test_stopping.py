"""A write or a sync fails: from then on nothing is taken, acknowledged or called durable."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.clock import SystemClock
from tidewater_core.crd.topic import SyncMode
from tidewater_core.errors import Conflict, Corrupt, OutcomeUnknown, Retryable, TidewaterError
from tidewater_testing import logs
from tidewater_worker.log import appender as module
from tidewater_worker.log.appender import Appender
from tidewater_worker.log.group import encode_group
from tidewater_worker.log.segment import SegmentWriter
from tidewater_worker.log.syncpool import SyncPool

Change = Callable[..., None]


class Log:
    """A log in a test, and what it told about its durable end."""

    def __init__(self, directory: Path, pool: SyncPool, **options: Any) -> None:
        self.told: list[int] = []
        self.appender = Appender(
            directory, logs.TOPIC_UUID, logs.PARTITION,
            replace(logs.log_options(1 << 26), **options), logs.reopen(directory), pool,
            asyncio.get_running_loop(), SystemClock(), self.told.append,
        )  # fmt: skip

    async def send(self, *payloads: bytes) -> int:
        return (await logs.offer(self.appender, logs.make_submission(0, payloads))).offset


@pytest.fixture
async def pool() -> AsyncIterator[SyncPool]:
    made = SyncPool(asyncio.get_running_loop(), threads=2)
    yield made
    made.close()


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, number: int = errno.EIO) -> None:
    """Let a system call fail once, as the kernel does: it reports a lost write one time."""
    real = getattr(os, name)

    def call(*args: Any) -> Any:
        monkeypatch.setattr(os, name, real)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, call)


PERIODIC = {"sync": SyncMode.PERIODIC, "sync_interval_s": 3_600.0}


async def assert_stopped(log: Log, durable: int) -> None:
    """Nothing more is taken, and nothing more is durable, whoever asks for it."""
    appender = log.appender
    assert isinstance(appender.failure, Corrupt)
    with pytest.raises(Corrupt):
        await log.send(b"refused")
    for _ in range(2):
        with pytest.raises(Corrupt):
            await appender.make_durable()
    await appender.close()
    assert appender.durable_end == durable, "G1 Durable: only what was fsynced counts"
    assert max(log.told, default=0) <= durable, "G1 Durable: the table was told"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_failed_sync_is_not_made_good_by_the_next_one(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log = Log(tmp_path, pool, **PERIODIC)
    await log.send(b"a")
    await log.appender.make_durable()
    await log.send(b"b")
    fail_once(monkeypatch, "fdatasync", number)
    with pytest.raises(Corrupt, match="LogSyncFailed"):
        await log.appender.make_durable()
    await assert_stopped(log, durable=1)


async def test_a_failed_sync_by_time_stops_the_log_and_its_timer(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, pool, sync=SyncMode.PERIODIC, sync_interval_s=0.01)
    fail_once(monkeypatch, "fdatasync")
    await log.send(b"a")
    while log.appender.failure is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await assert_stopped(log, durable=0)


async def test_a_write_under_way_when_a_sync_fails_is_not_acknowledged(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, pool, **PERIODIC)
    await log.send(b"a")
    reached, opened = threading.Event(), threading.Event()
    real = SegmentWriter.append

    def slow(*args: Any) -> None:
        reached.set()
        assert opened.wait(10)
        real(*args)

    monkeypatch.setattr(SegmentWriter, "append", slow)
    under_way = asyncio.create_task(log.send(b"x" * 100_000))  # too large for the loop itself
    await asyncio.to_thread(reached.wait, 10)
    fail_once(monkeypatch, "fdatasync")
    with pytest.raises(Corrupt):
        await log.appender.make_durable()
    opened.set()
    with pytest.raises(OutcomeUnknown):
        await under_way
    assert log.appender.end == 1
    await assert_stopped(log, durable=0)
    assert log.appender._sync_timer is None or log.appender._sync_timer.cancelled()


async def test_a_failed_close_makes_nothing_durable(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, pool, **PERIODIC)
    await log.send(b"a")
    fail_once(monkeypatch, "fsync")
    await log.appender.close()
    assert log.told == []
    assert log.appender.failure is not None


async def test_a_flush_during_a_rotation_covers_what_was_acknowledged(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, pool, segment_bytes=4_000, **PERIODIC)
    await log.send(b"x" * 3_000)
    reached, opened = threading.Event(), threading.Event()
    real = SegmentWriter.create

    def slow(*args: Any) -> SegmentWriter:
        reached.set()
        assert opened.wait(10)
        return real(*args)

    monkeypatch.setattr(SegmentWriter, "create", slow)
    second = asyncio.create_task(log.send(b"y" * 3_000))
    await asyncio.to_thread(reached.wait, 10)  # the old segment is sealed, there is no new one
    try:
        await log.appender.make_durable()
        assert log.appender.durable_end == 1, "G2: a flush left out what was acknowledged"
    finally:
        opened.set()
    assert await second == 1
    await log.appender.close()
    assert log.appender.durable_end == 2


async def test_a_sealing_that_failed_counts_for_a_sync_beside_it(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation's failure and a flush's success may be heard of in either order."""
    writer = SegmentWriter.create(
        tmp_path, logs.TOPIC_UUID, 0, 0, logs.log_options(1).schema
    )  # fmt: skip
    fail_once(monkeypatch, "fsync")
    with pytest.raises(OSError, match="Input/output"):
        writer.seal()
    with pytest.raises(OSError, match="failed before"):
        writer.sync()
    writer.abandon()


async def test_a_full_disk_between_two_segments_is_made_good(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, pool, segment_bytes=4_000, **PERIODIC)
    await log.send(b"x" * 3_000)
    real = SegmentWriter.create

    def full(*_: Any) -> SegmentWriter:
        monkeypatch.setattr(SegmentWriter, "create", real)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(SegmentWriter, "create", full)
    with pytest.raises(Retryable, match="LogDiskFull"):
        await log.send(b"y" * 3_000)
    await log.appender.make_durable()
    assert log.appender.durable_end == 1, "what is sealed is durable"
    assert await log.send(b"y" * 3_000) == 1
    await log.appender.close()
    assert logs.reopen(tmp_path).next_offset == 2


async def test_a_group_that_cannot_be_encoded_leaves_nobody_waiting(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, pool, group_bytes_max=10)
    real = encode_group

    def broken(*_: Any) -> Any:
        monkeypatch.setattr(module, "encode_group", real)
        raise KeyError("a fault of ours")

    monkeypatch.setattr(module, "encode_group", broken)
    answers: list[Any] = []
    for number in range(3):
        submission = logs.make_submission(number, [b"0123456789"], "p")
        submission.done = answers.append
        log.appender.offer(submission)
    async with asyncio.timeout(10):
        await asyncio.gather(log.appender.settle(), log.appender.settle())
    assert [type(answer).__name__ for answer in answers] == ["Retryable", "Stored", "Stored"]
    assert log.appender.pending_bytes == 0
    await log.appender.close()


async def test_who_waits_for_the_end_hears_of_a_log_that_stops(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, pool)
    await log.send(b"a")
    fail_once(monkeypatch, "fdatasync")
    sent = [asyncio.create_task(log.send(b"%d" % i)) for i in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await asyncio.gather(log.appender.settle(), log.appender.settle())
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert all(isinstance(answer, TidewaterError) for answer in answers)


async def test_an_error_of_ours_stops_the_log_and_no_thread(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a job raises, it is heard of and the next job finds a thread."""

    def broken(*_: Any) -> None:
        raise KeyError("a fault of ours")

    for number in range(3):  # more than there are threads
        log = Log(tmp_path / str(number), pool)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentWriter, "append", broken)
            with pytest.raises(OutcomeUnknown):
                await log.send(b"a")
        assert log.appender.failure is not None
        await log.appender.close()
    log = Log(tmp_path / "last", pool)
    assert await log.send(b"a") == 0
    await log.appender.close()


async def test_a_closed_log_begins_no_segment(tmp_path: Path, pool: SyncPool) -> None:
    """Whoever offers to it all the same: the directory may be another process's by now (G5)."""
    log = Log(tmp_path, pool)
    await log.send(b"a")
    await log.appender.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OutcomeUnknown):
        await log.send(b"b")
    assert sorted(path.name for path in tmp_path.iterdir()) == names


async def test_another_request_under_the_sequence_of_one_under_way_is_refused(
    tmp_path: Path, pool: SyncPool
) -> None:
    appender = Log(tmp_path, pool).appender
    first = asyncio.create_task(logs.offer(appender, logs.make_submission(7, [b"a"], "p")))
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="SequenceReused"):
        await logs.offer(appender, logs.make_submission(7, [b"x", b"y"], "p"))
    assert (await first).count == 1
    await appender.close()


async def test_options_that_change_under_way_do_not_make_a_group_durable(
    tmp_path: Path, pool: SyncPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that was written without a sync is not called durable by a topic that wants one."""
    log = Log(tmp_path, pool, **PERIODIC)
    await log.send(b"a")
    reached, opened = threading.Event(), threading.Event()
    real = SegmentWriter.append

    def slow(*args: Any) -> None:
        reached.set()
        assert opened.wait(10)
        real(*args)

    monkeypatch.setattr(SegmentWriter, "append", slow)
    under_way = asyncio.create_task(log.send(b"x" * 100_000))
    await asyncio.to_thread(reached.wait, 10)
    log.appender.change(replace(log.appender.options, sync=SyncMode.ALWAYS))
    opened.set()
    await under_way
    assert log.appender.durable_end == 0, "G1 Durable: nothing was fsynced"
    await log.appender.close()
