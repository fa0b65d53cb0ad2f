"""Certificates that are renewed, and an etcd that comes back with another past."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tidewater_coordination import connect
from tidewater_coordination.etcd import client as client_module
from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.keys import Keys
from tidewater_coordination.etcd.login import Login
from tidewater_coordination.etcd.mirror import Mirror
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.port import WorkerInfo
from tidewater_coordination.session import SessionKeeper
from tidewater_core.errors import Retryable
from tidewater_core.settings import CoordinationTls
from tidewater_testing.parts.certificates import Authority
from tidewater_testing.parts.etcd import Etcd

TOPIC = "shop/orders"
TTL_S = 3.0
ME = WorkerInfo("a", "http://a", "", "volume-a")


async def _assigned(store: EtcdCoordination, wanted: dict[int, str], within_s: float) -> None:
    """Wait until a store has heard of an assignment, by its versions alone."""
    deadline = time.monotonic() + within_s
    registry = await store.registry()
    while registry.assignments.get(TOPIC) != wanted:
        assert time.monotonic() < deadline, f"the watch has ended: {registry.assignments}"
        version = await store.changed(registry.version, 0.5)
        if version != registry.version:
            registry = await store.registry()


async def test_all_goes_on_with_another_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G7: the watch and the session ended with the connections of the old certificate."""
    monkeypatch.setattr(client_module, "HANG_UP_S", 0.1)
    authority = Authority(tmp_path / "ca")
    used, renewed = authority.sign("client"), authority.sign("renewed")
    tls = CoordinationTls(ca=str(authority.ca), cert=str(used.cert), key=str(used.key))
    with Etcd(tmp_path / "etcd", tls=authority.sign("etcd"), client_ca=authority.ca) as etcd:
        store, other = (connect(etcd.coordination, tls=tls) for _ in range(2))
        assert isinstance(store, EtcdCoordination)
        assert isinstance(other, EtcdCoordination)
        await store.start(ME, TTL_S)
        await other.start()
        session = store.session
        for number in range(2):
            shutil.copy(renewed.cert, used.cert)
            shutil.copy(renewed.key, used.key)
            os.utime(used.cert, (number, number))
            store.client._renew_certificates()  # as after a call that failed
            await asyncio.sleep(0.3)
            assert not store.client._hanging_up
            await other.set_assignment(TOPIC, {number: "a"})
            await _assigned(store, {number: "a"}, 5)
        await asyncio.sleep(TTL_S)
        assert (store.session, store.session_deadline > time.monotonic()) == (session, True)
        await store.close()
        await other.close()


class _Silent(grpc.GenericRpcHandler):
    """A server that takes every call and answers none."""

    def service(self, handler_call_details: Any) -> Any:
        async def stream(_calls: object, _context: object) -> AsyncIterator[bytes]:
            await asyncio.sleep(60)
            yield b""

        async def one(_call: object, _context: object) -> bytes:
            await asyncio.sleep(60)
            return b""

        if handler_call_details.method in (wire.WATCH, wire.LEASE_KEEP_ALIVE):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(one)


async def test_what_is_cut_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended connection is a store that is away; a CancelledError would end whoever asks."""
    monkeypatch.setattr(client_module, "HANG_UP_S", 0.0)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Silent(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    login, stamps = Login(), [(1,), (2,), (2,)]
    monkeypatch.setattr(Login, "stamp", lambda _self: stamps[0])
    client = EtcdClient([f"http://127.0.0.1:{port}"], login)
    client.open()

    async def watch() -> None:
        async for _ in client.watch(b"a", b"b", 0):
            pass

    calls = [
        asyncio.create_task(watch()),
        asyncio.create_task(client.keep_alive(1, 0.5)),
        asyncio.create_task(client._call(wire.RANGE, b"", 0.5)),
    ]
    cancelled = asyncio.create_task(watch())
    await asyncio.sleep(0.2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    stamps.pop(0)
    client._renew_certificates()
    for said in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(said, Retryable), repr(said)
        assert said.reason == "StoreAway"
    await client.close()
    await server.stop(0)


@pytest.mark.parametrize("is_begun_anew", [False, True])
async def test_a_registry_with_another_past_is_followed(
    tmp_path: Path, is_begun_anew: bool
) -> None:
    """G7: its revisions are lower than those that were waited for."""
    copy = tmp_path / "copy"
    with Etcd(tmp_path / "etcd") as etcd:
        store = EtcdCoordination(etcd.endpoints)
        await store.start(ME, TTL_S)
        (server,) = etcd.servers
        data = tmp_path / "etcd" / "e0"
        server.kill()
        shutil.copytree(data, copy)
        server.start()
        etcd.wait()
        for number in range(50):
            await store.set_assignment(TOPIC, {number: "a"})
        before = (await store.registry()).version
        server.kill()
        shutil.rmtree(data)
        if not is_begun_anew:
            shutil.copytree(copy, data)
        # Longer than a call waits: to read everything again fails once, too.
        await asyncio.sleep(client_module.CALL_S + 1)
        server.start()
        etcd.wait()
        other = EtcdCoordination(etcd.endpoints)
        await other.start()
        woken = await asyncio.gather(*(store.changed(before, 20) for _ in range(3)))
        assert set(woken) != {before}
        await other.set_assignment(TOPIC, {99: "a"})
        await _assigned(store, {99: "a"}, 5)
        assert (await store.registry()).version < before
        await store.close()
        await other.close()


class _Broken:
    """A client whose first watch, and first read after it, end as nobody foresaw."""

    def __init__(self) -> None:
        self.reads = self.watches = 0

    async def range(self, _key: bytes, _end: bytes) -> wire.RangeAnswer:
        self.reads += 1
        if self.reads == 2:
            raise ValueError("a fault of the program")
        return wire.RangeAnswer(self.reads, (), more=False)

    async def watch(self, *_of: object) -> AsyncIterator[wire.WatchAnswer]:
        self.watches += 1
        if self.watches == 1:
            raise ValueError("a fault of the program")
        await asyncio.sleep(60)
        yield  # type: ignore[misc]


async def test_nothing_ends_the_watch_and_the_session_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tidewater_coordination.etcd.mirror.RETRY_S", 0.01)
    client = _Broken()
    mirror = Mirror(client, Keys("t"))  # type: ignore[arg-type]
    await mirror.start()
    while client.watches < 2:
        await asyncio.sleep(0.01)
    assert (client.reads, mirror.version) == (3, 3)
    assert caplog.text.count("a fault of the program") >= 2
    await mirror.close()

    async def open_() -> str:
        return "1"

    async def renew(_session: str) -> bool:
        failed.append(True)
        if len(failed) == 1:
            raise ValueError("a fault of the program")
        return True

    failed: list[bool] = []
    keeper = SessionKeeper(0.1, open_, renew)
    await keeper.start()
    while len(failed) < 3:
        await asyncio.sleep(0.01)
    assert keeper.counters["session_renewals_failed"] == 1
    await keeper.close()
