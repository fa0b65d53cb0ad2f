"""Subscriptions follow the registry, whatever goes wrong with one of them or in between."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tidewater_coordination.port import RegisteredSubscription, Registry
from tidewater_core.errors import Corrupt, Invalid
from tidewater_worker.dispatch.manager import Dispatch

WAIT_S = 10.0


class Port:
    """A registry that answers nonsense at first."""

    def __init__(self) -> None:
        self.faults: list[Exception] = [ValueError("an odd record"), SystemError("odder")]
        self.version = 1

    async def changed(self, version: int, _: float) -> int:
        if self.faults:
            raise self.faults.pop()
        await asyncio.sleep(0 if version != self.version else 0.01)
        return self.version

    async def load_cursors(self, _subscription: str, _topic: str) -> dict[int, bytes]:
        return {}

    async def registry(self) -> Registry:
        names = ("shop/bad", "shop/good")
        return Registry(
            version=self.version,
            subscriptions={n: RegisteredSubscription(n, "u", '{"topic":"orders"}') for n in names},
        )


async def test_an_error_nobody_foresaw_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = SimpleNamespace(clock=None, topics={})
    monkeypatch.setattr(asyncio, "sleep", _short(asyncio.sleep))
    port: Any = Port()
    manager = Dispatch(node, port)
    seen: list[str] = []

    async def sync_one(registered: RegisteredSubscription, _: int) -> None:
        if registered.name == "shop/bad":
            raise SystemError("a fault")
        seen.append(registered.name)

    monkeypatch.setattr(manager, "_sync_one", sync_one)
    following = asyncio.create_task(manager._follow(0))
    async with asyncio.timeout(WAIT_S):
        while not seen:
            assert not following.done()
            await asyncio.sleep(0)
    following.cancel()
    assert seen[0] == "shop/good", "one bad subscription never stands in the way of another"
    assert not port.faults
    broken: Any = SimpleNamespace(open=_broken, name="shop/bad")
    assert not await manager._opened(broken)


async def _broken() -> bool:
    raise SystemError("a fault")


def _short(sleep: Any) -> Any:
    async def short(_: float) -> None:
        await sleep(0)

    return short


async def test_a_refused_one_is_looked_at_again_though_nothing_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its filter may name a column that its topic gets a moment later."""
    node: Any = SimpleNamespace(clock=None, topics={})
    port: Any = Port()
    port.faults = []
    manager = Dispatch(node, port)
    tries = 0

    async def sync_one(registered: RegisteredSubscription, _: int) -> None:
        nonlocal tries
        tries += registered.name == "shop/bad"
        if registered.name == "shop/bad" and tries < 3:
            raise Invalid("InvalidFilter", "there is no column 'region'")

    monkeypatch.setattr(manager, "_sync_one", sync_one)
    await manager._sync()
    assert set(manager.refused) == {"shop/bad"}
    following = asyncio.create_task(manager._follow(port.version))
    async with asyncio.timeout(WAIT_S):
        while manager.refused:
            assert not following.done()
            await asyncio.sleep(0)
    following.cancel()
    assert tries == 3


class Spoilt(Port):
    """A registry in which a record can be spoilt, as etcd's says it."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = []
        self.is_spoilt = False

    async def registry(self) -> Registry:
        found = await super().registry()
        if not self.is_spoilt:
            return found
        left = {n: of for n, of in found.subscriptions.items() if n != "shop/good"}
        return msgspec.structs.replace(
            found, subscriptions=left, unreadable=("subscriptions/shop/good",)
        )


async def test_one_whose_record_cannot_be_read_is_there_all_the_same() -> None:
    node: Any = SimpleNamespace(clock=None, topics={}, topic=lambda *_: None)
    port: Any = Spoilt()
    manager = Dispatch(node, port)
    await manager._sync()
    served = manager.local("shop", "orders", "good")
    port.is_spoilt = True
    await manager._sync()
    assert manager.local("shop", "orders", "good") is served
    assert served.ended is None
    assert manager.refused["shop/good"].reason == "RecordUnreadable"
    port.is_spoilt = False
    await manager._sync()
    assert manager.local("shop", "orders", "good") is served
    assert not manager.refused


async def test_a_worker_that_never_read_it_does_not_say_that_there_is_none() -> None:
    node: Any = SimpleNamespace(clock=None, topics={}, topic=lambda *_: None)
    port: Any = Spoilt()
    port.is_spoilt = True
    manager = Dispatch(node, port)
    await manager._sync()
    with pytest.raises(Corrupt, match="unreadable at subscriptions/shop/good"):
        manager.local("shop", "orders", "good")
