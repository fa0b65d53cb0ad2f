"""Processes killed with -9 at random moments, under load, more than fifty times in a row.

Two topics, one that fsyncs each group and one that does it now and then: the kernel keeps what a
killed process wrote, so nothing that was acknowledged may be missing from either.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tidewater_testing.checker import verify
from tidewater_testing.parts.worker import Victim, Worker, topic_manifest
from tidewater_testing.traffic import Load, Record, Traffic

ROUNDS = 51
SEED = 20_261
LOG = {"segmentSize": "256Ki", "retention": {"time": "2s", "size": "0"}}
SPEC = {"partitions": 3, "writer": {"flushInterval": "200ms"}}
TOPICS = {"shop/orders": {"log": LOG}, "shop/clicks": {"log": {**LOG, "sync": "Periodic"}}}
VICTIMS = (
    (Victim.EDGE,),
    (Victim.TABLE,),
    (Victim.EDGE, Victim.TABLE),
    (Victim.TABLE,),
    (Victim.EDGE,),
    (Victim.EDGE, Victim.TABLE, Victim.SUPERVISOR),
)
PROGRESS_TIMEOUT_S = 40.0


async def _progress(records: list[Record]) -> None:
    """Wait until every load has been promised something more: the worker is back."""
    before = [record.messages for record in records]
    async with asyncio.timeout(PROGRESS_TIMEOUT_S):
        while any(r.messages == n for r, n in zip(records, before, strict=True)):
            await asyncio.sleep(0.05)


async def _kill(worker: Worker, victims: tuple[Victim, ...]) -> None:
    if Victim.SUPERVISOR in victims:
        worker.kill(*victims)
        worker.start(wait=False)  # in this thread: a child dies with the thread that made it
    else:
        await asyncio.to_thread(worker.kill, *victims)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_acknowledged_is_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    """G1, G2 and G8 hold after every kind of kill, at every moment that was drawn."""
    draw = random.Random(SEED)
    manifests = [topic_manifest(name, {**SPEC, **spec}) for name, spec in TOPICS.items()]
    with Worker(tmp_path / "w", manifests) as worker:
        loads = [
            Traffic(Load(worker.address, name, senders=4, partitions=3, pause_s=0.02, seed=SEED))
            for name in TOPICS
        ]
        async with loads[0], loads[1]:
            records = [load.record for load in loads]
            for number in range(ROUNDS):
                if number % 4 != 3:  # every fourth kill hits while the last is being recovered
                    await _progress(records)
                await asyncio.sleep(draw.uniform(0.0, 0.6))
                await _kill(worker, VICTIMS[number % len(VICTIMS)])
            await _progress(records)
        await asyncio.to_thread(worker.wait_ready)
        for name in TOPICS:
            await asyncio.to_thread(worker.flush, name)
    for name, load in zip(TOPICS, loads, strict=True):
        record = load.record
        assert record.unknown > ROUNDS // 4, "the kills did not hit any request"
        assert record.messages > 1_000, record
        verify(
            worker.catalog_properties,
            worker.settings.log_root,
            name,
            record.acked,
            flushed=True,
        )
