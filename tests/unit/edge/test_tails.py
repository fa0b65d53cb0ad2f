"""The newest messages in memory have one bound for all partitions of a worker (G6)."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

from tidewater_core.clock import SystemClock
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.names import TopicName
from tidewater_core.settings import CatalogSettings, Limits, WorkerSettings
from tidewater_core.units import ByteSize
from tidewater_testing import logs
from tidewater_worker.log.recover import Recovered
from tidewater_worker.log.syncpool import SyncPool
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic

PARTITIONS = 20
BOUND = 64 * 1024


async def test_many_partitions_have_one_bound(tmp_path: Path) -> None:
    settings = WorkerSettings(
        worker_id="w", log_root=tmp_path, run_dir=tmp_path, coordination="unused",
        catalog=CatalogSettings(), limits=Limits(tails_bytes_max=ByteSize("64Ki")),
    )  # fmt: skip
    coordination: Any = None
    node = Node(settings, coordination, SystemClock())
    loop = asyncio.get_running_loop()
    node._loop, node._pool = loop, SyncPool(loop, threads=1)
    topic = Topic(TopicName.parse("shop/orders"), UUID(int=1), TopicSpec(), "{}", {})
    appenders = []
    for number in range(PARTITIONS):
        directory = tmp_path / str(number)
        directory.mkdir()
        partition = Partition("shop/orders", number, directory)
        appenders.append(node.make_appender(topic, partition, Recovered()))
    for appender in appenders:
        for sequence in range(10):
            await logs.offer(appender, logs.make_submission(sequence, [b"x" * 1000]))
    held = [appender.tail.nbytes for appender in appenders]
    assert BOUND / 2 < sum(held) <= BOUND, f"G6 Bounded: {sum(held)} bytes of tails"
    assert all(each.tail.end == 10 for each in appenders)
    assert held[0] == 0, "the oldest went"
    assert held[-1] > 0
    for appender in appenders:
        await appender.close()
    assert not any(appender.tail.nbytes for appender in appenders)
    node._pool.close()
