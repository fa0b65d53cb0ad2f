"""The group commit of cursors: what shares a write, and who hears of a failure (G4)."""

import asyncio
from collections.abc import Mapping

import pytest

from tidewater_coordination.port import CursorKey, Registry
from tidewater_core.errors import Fenced, Retryable
from tidewater_worker.dispatch import store as store_module
from tidewater_worker.dispatch.store import GROUP_MAX, Encode, ProgressStore


class Port:
    """A store that takes its time, and fails as it is told."""

    def __init__(self) -> None:
        self.stored: dict[CursorKey, bytes] = {}
        self.writes: list[int] = []
        self.fenced: set[tuple[str, int]] = set()
        self.away = False
        self.bytes_max = 1 << 30
        self.gate = asyncio.Event()
        self.gate.set()

    async def registry(self) -> Registry:
        return Registry()

    async def changed(self, since: int, timeout_s: float) -> int:
        await asyncio.sleep(timeout_s)
        return since

    async def load_cursors(self, subscription: str, topic: str) -> dict[int, bytes]:
        return {}

    async def store_cursors(
        self,
        items: Mapping[CursorKey, bytes],
        epochs: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        await self.gate.wait()
        self.writes.append(len(items))
        if self.away:
            raise Retryable("StoreAway", "away")
        if sum(map(len, items.values())) > self.bytes_max:
            raise Retryable("StoreRefused", "request is too large")
        if self.fenced & set(epochs or ()):
            raise Fenced("Fenced", "another epoch")
        self.stored.update(items)


def item(number: int, text: str = "x") -> tuple[CursorKey, Encode]:
    return CursorKey("ns/s", "ns/t", number), lambda: (text.encode(), 1)


async def test_acks_that_come_during_a_write_share_the_next() -> None:
    port = Port()
    store = ProgressStore(port)
    port.gate.clear()
    first = asyncio.create_task(store.save(dict([item(0)])))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    others = [asyncio.create_task(store.save(dict([item(i)]))) for i in range(1, 20)]
    await asyncio.sleep(0)
    assert not first.done()
    port.gate.set()
    await asyncio.gather(first, *others)
    assert port.writes == [1, 19]
    assert len(port.stored) == 20


async def test_the_newest_progress_is_written() -> None:
    """What is written is what holds when the write begins, not when it was asked for."""
    port = Port()
    store = ProgressStore(port)
    value = ["old"]
    key = CursorKey("ns/s", "ns/t", 0)
    task = asyncio.create_task(store.save({key: lambda: (value[0].encode(), 1)}))
    value[0] = "new"
    await task
    assert port.stored[key] == b"new"


async def test_a_fenced_partition_fails_alone() -> None:
    port = Port()
    port.fenced = {("ns/t", 1)}
    store = ProgressStore(port)
    good, bad = await asyncio.gather(
        store.save(dict([item(0)])), store.save(dict([item(1)])), return_exceptions=True
    )
    assert good is None
    assert isinstance(bad, Fenced)
    assert list(port.stored) == [CursorKey("ns/s", "ns/t", 0)]


async def test_a_partition_that_moved_is_not_stored() -> None:
    port = Port()
    store = ProgressStore(port)
    with pytest.raises(Fenced, match="another owner"):
        await store.save({CursorKey("ns/s", "ns/t", 0): lambda: None})
    assert not port.stored


async def test_a_store_that_is_away_is_told_and_tried_again() -> None:
    port = Port()
    port.away = True
    store = ProgressStore(port)
    with pytest.raises(Retryable):
        await store.save(dict([item(0)]))
    port.away = False
    await store.save(dict([item(0)]))
    assert len(port.stored) == 1


async def test_a_write_is_bounded() -> None:
    port = Port()
    await ProgressStore(port).save(dict(item(i) for i in range(GROUP_MAX + 5)))
    assert port.writes == [GROUP_MAX, 5]


async def test_what_is_only_worth_keeping_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LAZY_S", 0.02)
    port = Port()
    store = ProgressStore(port)
    store.note(*item(0))
    await asyncio.sleep(0)
    assert not port.writes
    await asyncio.sleep(0.1)
    assert port.writes == [1]
    store.note(*item(1))
    await store.close()
    assert len(port.stored) == 2


async def test_a_write_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "GROUP_BYTES_MAX", 10)
    port = Port()
    port.bytes_max = 12
    store = ProgressStore(port)
    await store.save(dict(item(i, "x" * size) for i, size in enumerate((4, 4, 4, 12, 1))))
    assert port.writes == [2, 1, 1, 1]


async def test_what_is_too_large_for_the_store_fails_alone() -> None:
    port = Port()
    port.bytes_max = 5
    store = ProgressStore(port)
    small, large = await asyncio.gather(
        store.save(dict([item(0)])), store.save(dict([item(1, "x" * 6)])), return_exceptions=True
    )
    assert small is None
    assert isinstance(large, Retryable)
    assert list(port.stored) == [CursorKey("ns/s", "ns/t", 0)]


async def test_a_fault_of_ours_is_told_to_those_who_wait() -> None:
    def broken() -> tuple[bytes, int]:
        raise ZeroDivisionError("a fault")

    port = Port()
    store = ProgressStore(port)
    with pytest.raises(Retryable, match="ZeroDivisionError"):
        await asyncio.wait_for(store.save({CursorKey("ns/s", "ns/t", 0): broken}), 5)
    await store.save(dict([item(1)]))
    assert len(port.stored) == 1


async def test_an_ack_of_before_is_not_stored_by_what_came_after() -> None:
    """The partition left and came back while a write was under way: its progress is another one."""
    port = Port()
    store = ProgressStore(port)
    key = CursorKey("ns/s", "ns/t", 0)
    port.gate.clear()
    busy = asyncio.create_task(store.save(dict([item(7)])))
    await asyncio.sleep(0)
    before = asyncio.create_task(store.save({key: lambda: None}))
    await asyncio.sleep(0)
    after = asyncio.create_task(store.save({key: lambda: (b"without that ack", 2)}))
    await asyncio.sleep(0)
    port.gate.set()
    await asyncio.gather(busy, after)
    with pytest.raises(Fenced, match="another owner"):
        await before
    assert port.stored[key] == b"without that ack"
