"""A log that stopped is seen by everybody, refuses messages, and is opened again (G1, G7)."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from owner_fakes import TOPIC, Member, World
from tidewater_core.errors import Corrupt, OutcomeUnknown
from tidewater_testing import wal
from tidewater_worker import metrics, report, stats
from tidewater_worker.cluster import owning, taking
from tidewater_worker.log.producers import Duplicate, Stored
from tidewater_worker.partition import DirectoryLock


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World(tmp_path, monkeypatch)
    await made.start()
    await made.assign("a")
    yield made
    await made.close()


async def fail_a_sync(worker: Member, monkeypatch: pytest.MonkeyPatch, sequence: int) -> None:
    """Send a message whose fdatasync fails, once."""
    with monkeypatch.context() as patch:

        def failing(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(AssertionError) as told:
            await worker.append(b"unknown", sequence)
        assert isinstance(told.value.args[0], OutcomeUnknown)


def assert_seen(worker: Member, reason: str) -> None:
    """Check that producers, the operator, readiness, metadata and metrics are told the reason."""
    partition, node = worker.partition, worker.node
    with pytest.raises(Corrupt, match=reason):
        partition.ready()
    told = report._partition(partition, 0.0)
    assert (told["open"], told["state"], told["reason"]) == (False, "stopped", reason)
    assert told["message"]
    (waiting,) = stats.not_ready(node)
    assert (waiting["reason"], waiting["stopped"]) == (reason, True)
    assert stats.metadata(node, node.topics[TOPIC])["partitions"][0]["reason"] == reason
    samples = {(name, labels): value for name, labels, value in metrics._topics(node)}
    labels = 'namespace="shop",topic="orders",partition="0"'
    assert samples["tidewater_partition_open", labels] == 0
    assert samples["tidewater_partition_refused", f'{labels},reason="{reason}"'] == 1


async def test_a_log_that_stopped_is_seen_and_opened_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await world.settle("a")
    for sequence in range(3):
        await a.append(b"%d" % sequence, sequence)
    stopped, epoch = a.partition.appender, a.partition.epoch
    await fail_a_sync(a, monkeypatch, 3)
    assert_seen(a, "LogWriteFailed")
    assert a.node.owning._has_failed(), "the next round is made because of it"
    await a.round()
    assert a.partition.readable() is stopped, "not at once, and it can be read meanwhile"
    monkeypatch.setattr(owning, "REOPEN_S", 0.0)
    a.partition.reopen_at = 0.0
    await world.settle("a")
    while a.partition.appender is stopped or not a.partition.is_open:
        await a.round()
        await asyncio.sleep(0.01)
    assert a.partition.epoch > epoch
    assert a.partition.ready().next_offset in (3, 4), "what failed may be there or not"
    assert isinstance(await a.append(b"2", 2), Duplicate)
    assert isinstance(await a.append(b"unknown", 3), Stored)
    assert (await a.append(b"4", 4)).offset == 4, "once, whether it was there or not"
    assert stats.not_ready(a.node) == []
    assert report._partition(a.partition, 0.0)["open"]


async def test_a_log_that_lost_what_it_had_acknowledged_stays_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await world.settle("a")
    for sequence in range(3):
        await a.append(b"%d" % sequence, sequence)
    await fail_a_sync(a, monkeypatch, 3)
    (segment,) = wal.read_log(a.partition.directory)
    segment.path.write_bytes(segment.path.read_bytes()[: segment.frames[2].at])
    monkeypatch.setattr(owning, "REOPEN_S", 0.0)
    for _ in range(3):
        await a.round()
    assert_seen(a, "AcknowledgedLost")
    assert "below offset 3 " in str(a.partition.refusal)


async def test_an_error_nobody_foresaw_leaves_a_reason_and_no_lock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise SystemError("Negative size passed to PyUnicode_New")

    with monkeypatch.context() as patch:
        broken.__name__ = "recover"
        patch.setattr(taking, "recover", broken)
        a = await world.join("a")
        await a.round()
    assert_seen(a, "OpeningFailed")
    DirectoryLock(a.partition.directory).release()
    await world.settle("a")
    await a.append(b"0", 0)
