"""A cluster of three etcd servers that loses one, then its majority, and gets it back."""

import asyncio
import time
from pathlib import Path

import pytest

from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import CursorKey, WorkerInfo
from tidewater_core.errors import Retryable
from tidewater_testing.parts.etcd import Etcd

TOPIC = "shop/orders"
TTL_S = 6.0
CURSOR = CursorKey("shop/billing", TOPIC, 0)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def _eventually(store: EtcdCoordination, value: bytes) -> None:
    """Store a cursor, asking again while the cluster chooses a leader."""
    deadline = time.monotonic() + 30
    while True:
        try:
            await store.store_cursors({CURSOR: value})
        except Retryable:
            assert time.monotonic() < deadline, "no cursor was stored within 30 s"
        else:
            return


async def test_one_of_three_is_killed(tmp_path: Path) -> None:
    with Etcd(tmp_path, size=3) as etcd:
        store, other = EtcdCoordination(etcd.endpoints), EtcdCoordination(etcd.endpoints)
        await store.start(WorkerInfo("a", "http://a", "", "volume-a"), TTL_S)
        await other.start(WorkerInfo("b", "http://b", "", "volume-b"), TTL_S)
        epoch = (await store.acquire(TOPIC, 0)).epoch
        await store.store_cursors({CURSOR: b"1"})
        session = store.session
        for number, server in enumerate(etcd.servers):  # one after the other, each is the first
            server.kill()
            await _eventually(store, b"%d" % number)
            assert (await other.load_cursors("shop/billing", TOPIC))[0] == b"%d" % number
            version = (await other.registry()).version
            await store.register_topic(TOPIC, f'{{"partitions":{number + 1}}}', "u")
            assert await other.changed(version, 20) != version, "the watch goes on"
            server.start()
            etcd.wait()
        assert store.session == session, "the session outlives the loss of any one server"
        assert (await other.registry()).owners[TOPIC][0].epoch == epoch
        etcd.servers[0].kill()
        etcd.servers[1].kill()
        with pytest.raises(Retryable, match="StoreAway"):
            await store.store_cursors({CURSOR: b"lost majority"})
        assert (await other.registry()).owners[TOPIC][0].worker_id == "a", "what was known stays"
        etcd.servers[0].start()
        etcd.servers[1].start()
        etcd.wait()
        await _eventually(store, b"back")
        assert (await other.load_cursors("shop/billing", TOPIC))[0] == b"back"
        deadline = time.monotonic() + 30
        while store.session_deadline < time.monotonic():
            assert time.monotonic() < deadline, "no session after the cluster came back"
            await asyncio.sleep(0.1)
        await store.close()
        await other.close()


async def test_a_watch_on_a_server_without_a_leader_ends(tmp_path: Path) -> None:
    """It would be silent for ever else, while calls to the others go on."""
    with Etcd(tmp_path, size=3) as etcd:
        client, begun = EtcdClient([etcd.endpoints[2]]), asyncio.Event()
        client.open()
        await client.range(b"a")

        async def watch() -> None:
            async for _ in client.watch(b"a", b"b", 0):
                begun.set()

        watching = asyncio.create_task(watch())
        await asyncio.wait_for(begun.wait(), 30)
        etcd.servers[0].kill()
        etcd.servers[1].kill()
        with pytest.raises(Retryable, match="no leader"):
            await asyncio.wait_for(watching, 30)
        await client.close()
