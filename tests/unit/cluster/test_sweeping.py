"""What is left of a topic that is gone is deleted, and nothing of one that is made again."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from owner_fakes import TOPIC, World
from tidewater_worker.log.recover import recover


async def test_a_topic_made_again_while_the_old_logs_go_keeps_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: the last step deleted the topic's directory, whatever was in it by then."""
    world = World(tmp_path, monkeypatch)
    await world.start()
    await world.assign("a")
    worker = await world.settle("a")
    directory = worker.partition.directory
    at_the_end, go_on = threading.Event(), threading.Event()

    def rmtree(path: Path, *args: Any, **named: Any) -> None:
        if path == directory.parent:
            at_the_end.set()
            assert go_on.wait(20)
        shutil_rmtree(path, *args, **named)

    shutil_rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    await world.store.unregister_topic(TOPIC)
    await worker.round()
    async with asyncio.timeout(20):
        while not at_the_end.is_set():
            await asyncio.sleep(0.01)
    again = UUID(int=77)
    await world.store.register_topic(TOPIC, '{"partitions":1}', str(again))
    await world.assign("a")
    for _ in range(5):
        await worker.round()
        await asyncio.sleep(0.02)
    stored = []
    if worker.is_open:
        stored.append(await worker.append(b"early", 1))
    go_on.set()
    async with asyncio.timeout(20):
        while worker.node.owning.leaving.sweeping:
            await asyncio.sleep(0.01)
    worker = await world.settle("a")
    stored.append(await worker.append(b"late", 2))
    found = recover(directory, again, 0, repair=False)
    assert found.next_offset == stored[-1].offset + 1, "G1 Durable: acknowledged, and deleted"
    await world.close()
