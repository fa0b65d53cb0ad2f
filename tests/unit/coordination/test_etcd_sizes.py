"""Cursors of any size: a transaction is cut where etcd would refuse it (G6)."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tidewater_coordination.etcd import cursors, store
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import CursorKey, WorkerInfo
from tidewater_testing.parts.etcd import Etcd
from tidewater_worker.dispatch.cursor import (
    FAILURES_MAX,
    RANGES_MAX,
    Cursor,
    Progress,
    encode_failures,
    encode_ranges,
)
from tidewater_worker.dispatch.store import ProgressStore

TOPIC = "shop/orders"


def largest(step: int) -> bytes:
    """Return the progress of a cursor that is as full of holes as one may be."""
    cursor = Cursor(0)
    cursor._starts = [step * (2 * i + 1) for i in range(RANGES_MAX)]
    cursor._ends = [start + step for start in cursor._starts]
    failures = {i * step: 1_000_000 for i in range(FAILURES_MAX)}
    progress = Progress("u" * 36, "t" * 36, cursor.next, encode_ranges(cursor))
    return msgspec.json.encode(
        msgspec.structs.replace(progress, failed=encode_failures(0, failures))
    )


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[EtcdCoordination]:
    """Give a worker's session in an etcd of its own."""
    with Etcd(tmp_path) as etcd:
        made = EtcdCoordination(etcd.endpoints)
        await made.start(WorkerInfo("a", "http://a", "", "volume-a"), 10)
        try:
            yield made
        finally:
            await made.close()


async def test_large_cursors_share_a_store_with_small_ones(port: EtcdCoordination) -> None:
    wide = 2**53 // (2 * RANGES_MAX)
    epochs = [(await port.acquire(TOPIC, number)).epoch for number in range(9)]
    data = [largest(wide), *[largest(1)] * 8]
    items = {CursorKey("shop/s", TOPIC, p): (data[p], epochs[p]) for p in range(9)}
    other = CursorKey("shop/other", TOPIC, 0)
    progress = ProgressStore(port)
    await asyncio.gather(
        progress.save({key: partial(lambda found: found, found) for key, found in items.items()}),
        progress.save({other: lambda: (b"{}", epochs[0])}),
    )
    assert await port.load_cursors("shop/s", TOPIC) == dict(enumerate(data))
    assert await port.load_cursors("shop/other", TOPIC) == {0: b"{}"}
    # The store itself cuts, too, whoever asks.
    await port.store_cursors({key: found[0] for key, found in items.items()})


async def test_what_is_known_of_cursors_does_not_outlive_their_subscriptions(
    port: EtcdCoordination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscriptions come and go as long as a worker runs; one that stays goes on as before."""
    for known in (port._cursor_revisions, port._owner_revisions):
        monkeypatch.setattr(known, "_look_at", 10)
    monkeypatch.setattr(cursors, "FORGET_AFTER", 10)
    await port.register_subscription("shop/stays", "{}", "u")
    stays = CursorKey("shop/stays", TOPIC, 0)
    for number in range(25):
        topic, name = f"shop/t{number}", f"shop/s{number}"
        await port.register_topic(topic, "{}", "u")
        await port.register_subscription(name, "{}", "u")
        epoch = (await port.acquire(topic, 0)).epoch
        await port.store_cursors({CursorKey(name, topic, 0): b"1"}, {(topic, 0): epoch})
        await port.store_cursors({stays: b"%d" % number})
        await port.unregister_subscription(name)
        await port.unregister_topic(topic)
    assert len(port._cursor_revisions) <= 11
    assert len(port._owner_revisions) <= 11
    assert await port.load_cursors("shop/stays", TOPIC) == {0: b"24"}


async def test_who_forgets_a_subscription_waits_for_no_change_that_nobody_watches(
    port: EtcdCoordination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CATCH_UP_S", 60.0)
    await port.register_subscription("shop/s", "{}", "u")
    await port.store_cursors({CursorKey("shop/s", TOPIC, n): b"1" for n in range(100)})
    async with asyncio.timeout(20):
        await port.unregister_subscription("shop/s")
    assert await port.load_cursors("shop/s", TOPIC) == {}
