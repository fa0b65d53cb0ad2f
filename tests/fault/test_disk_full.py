"""The log's disk is full: producers are told, nothing acknowledged is lost, and it goes on (G6)."""

import asyncio
from pathlib import Path

import pytest

from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_testing.checker import verify
from tidewater_testing.evidence import Evidence
from tidewater_testing.parts.small_disk import SmallDisk
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.process import wait_until
from tidewater_testing.traffic import Load, Traffic, encode_arrow, encode_json

TOPIC = "shop/orders"
DISK_BYTES = 24 * 1024 * 1024
BALLAST_BYTES = 8 * 1024 * 1024
KEEP_ALL = {"log": {"segmentSize": "1Mi"}, "partitions": 2}
KEEP_NOTHING = {
    "log": {"segmentSize": "1Mi", "retention": {"time": "0s", "size": "0"}},
    "partitions": 2,
    "writer": {"flushInterval": "200ms"},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def _worker(tmp_path: Path, disk: SmallDisk, reserve: str, spec: dict[str, object]) -> Worker:
    return Worker(
        tmp_path / "w",
        [topic_manifest(TOPIC, spec)],
        log_root=disk.directory / "log",
        limits=Limits(disk_reserve_bytes=ByteSize(reserve)),
        command_prefix=disk.command_prefix,
    )


def _load(worker: Worker, **changes: object) -> Load:
    settings = {
        "senders": 4,
        "partitions": 2,
        "batch_max": 8,
        "payload_bytes_max": 40_000,
        "encoders": (encode_json, encode_arrow),
        **changes,
    }
    return Load(worker.address, TOPIC, **settings)  # type: ignore[arg-type]


async def _until_refused(traffic: Traffic) -> None:
    async with asyncio.timeout(60):
        while "503 LogDiskFull" not in traffic.record.refused:
            assert not traffic.failed(), "a sender gave up"
            await asyncio.sleep(0.05)


async def _until_more(traffic: Traffic, count: int) -> None:
    goal = traffic.record.messages + count
    async with asyncio.timeout(60):
        while traffic.record.messages < goal:
            assert not traffic.failed(), "a sender gave up"
            await asyncio.sleep(0.05)


def _verify(worker: Worker, disk: SmallDisk, traffic: Traffic) -> Evidence:
    root = disk.seen_by(worker.pid(Victim.EDGE)) / "log"
    return verify(worker.catalog_properties, root, TOPIC, traffic.record.acked, flushed=True)


@pytest.mark.parametrize("reserve", ["0", "6Mi"])
async def test_a_full_disk_refuses_and_goes_on(tmp_path: Path, reserve: str) -> None:
    """With a reserve the worker stops before the disk is full, without one the kernel does."""
    with (
        SmallDisk(tmp_path / "disk", DISK_BYTES) as disk,
        _worker(tmp_path, disk, reserve, KEEP_ALL) as worker,
    ):
        ballast = disk.seen_by(worker.pid(Victim.EDGE)) / "ballast"
        ballast.write_bytes(bytes(BALLAST_BYTES))
        async with Traffic(_load(worker)) as traffic:
            await _until_refused(traffic)
            answer = worker.post(f"/v1/{TOPIC}/messages", '{"messages": [{"value": "one more"}]}')
            assert answer.status in {200, 503}, answer
            if answer.status == 503:
                assert answer.reason == "LogDiskFull", answer.body
                assert answer.retry_after_s is not None, "503 without Retry-After"
            read = worker.get(f"/v1/{TOPIC}/messages?partition=0&offset=0&limit=1")
            assert read.status == 200, "reads go on while the disk is full"
            ballast.unlink()
            await _until_more(traffic, 40)
        await asyncio.to_thread(worker.flush, TOPIC)
        _verify(worker, disk, traffic)


async def test_a_full_disk_survives_kills(tmp_path: Path) -> None:
    """Kill -9 of the edge on a full disk: it starts again, keeps all, and goes on after."""
    with (
        SmallDisk(tmp_path / "disk", DISK_BYTES) as disk,
        _worker(tmp_path, disk, "0", KEEP_ALL) as worker,
    ):
        ballast = disk.seen_by(worker.pid(Victim.EDGE)) / "ballast"
        ballast.write_bytes(bytes(BALLAST_BYTES))
        async with Traffic(_load(worker)) as traffic:
            await _until_refused(traffic)
            for victim in (Victim.EDGE, Victim.TABLE, Victim.EDGE):
                await asyncio.to_thread(worker.kill, victim)
                await asyncio.to_thread(worker.wait_ready)
            ballast = disk.seen_by(worker.pid(Victim.EDGE)) / "ballast"
            ballast.unlink()
            await _until_more(traffic, 40)
        await asyncio.to_thread(worker.flush, TOPIC)
        _verify(worker, disk, traffic)


async def test_a_small_disk_carries_more_than_its_size(tmp_path: Path) -> None:
    """What the table has may go: backpressure, not loss, when producers are faster."""
    wanted_bytes = 3 * DISK_BYTES
    with (
        SmallDisk(tmp_path / "disk", DISK_BYTES) as disk,
        _worker(tmp_path, disk, "4Mi", KEEP_NOTHING) as worker,
    ):
        async with Traffic(_load(worker)) as traffic:
            async with asyncio.timeout(120):
                sent = seen = 0
                while sent < wanted_bytes:
                    await asyncio.sleep(0.1)
                    assert not traffic.failed(), "a sender gave up"
                    new = traffic.record.acked[seen:]
                    seen += len(new)
                    sent += sum(len(payload) for batch in new for payload in batch.payloads)
        await asyncio.to_thread(worker.flush, TOPIC)
        _verify(worker, disk, traffic)
        log = disk.seen_by(worker.pid(Victim.EDGE)) / "log"
        wait_until(
            lambda: sum(path.stat().st_size for path in log.rglob("*.wal")) < 4 * 1024 * 1024,
            30,
            "committed segments to be deleted",
        )
