"""A round over the registry that failed half way is made again."""

import asyncio
from pathlib import Path

import pytest

from owner_fakes import World
from tidewater_coordination.port import Registry
from tidewater_worker.cluster import owning


@pytest.mark.parametrize("fault", [RuntimeError, OSError])
async def test_what_a_round_did_not_come_to_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    """Nothing else would: the registry has not changed since."""
    monkeypatch.setattr(owning, "ROUND_S", 0.05)
    world = World(tmp_path, monkeypatch)
    await world.start()
    worker = await world.join("a")
    real = worker.node.owning.leaving.sweep_once
    failed: list[int] = []

    async def sweep_once(registry: Registry) -> None:
        if not failed:
            failed.append(registry.version)
            raise fault("by script")
        await real(registry)

    monkeypatch.setattr(worker.node.owning.leaving, "sweep_once", sweep_once)
    watching = asyncio.create_task(worker.node.owning.watch())
    await world.assign("a")
    async with asyncio.timeout(20):
        while not worker.is_open:
            await asyncio.sleep(0.01)
    assert failed
    watching.cancel()
    await world.close()
