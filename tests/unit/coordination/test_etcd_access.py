"""etcd with prefixes, certificates, users: who gets in, and who does not."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from tidewater_coordination import connect
from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.login import Login
from tidewater_coordination.port import CursorKey, WorkerInfo
from tidewater_core.errors import Invalid, Retryable
from tidewater_core.settings import CoordinationTls, WorkerSettings
from tidewater_testing.parts.certificates import Authority
from tidewater_testing.parts.etcd import Etcd

TOPIC = "shop/orders"
TTL_S = 3.0
ME = WorkerInfo("a", "http://a", "", "volume-a")


async def test_a_prefix_is_a_world_of_its_own(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        shop = connect(etcd.coordination, prefix="tidewater/shop")
        bank = connect(etcd.coordination, prefix="tidewater/bank")
        await shop.start(ME, TTL_S)
        await bank.start(WorkerInfo("a", "http://other", "", "volume-other"), TTL_S)
        await shop.register_topic(TOPIC, "{}", "u1")
        await shop.set_assignment(TOPIC, {0: "a"})
        assert (await shop.acquire(TOPIC, 0)).epoch == 1
        assert await shop.take_lease("one")
        cursor = CursorKey("shop/billing", TOPIC, 0)
        await shop.store_cursors({cursor: b"1"}, {(TOPIC, 0): 1})
        theirs = await bank.registry()
        assert not theirs.topics
        assert not theirs.owners
        assert not theirs.assignments
        assert theirs.workers["a"].url == "http://other", "worker ids are free in each namespace"
        assert await bank.load_cursors("shop/billing", TOPIC) == {}
        assert await bank.take_lease("one")
        await bank.unregister_topic(TOPIC)
        assert TOPIC in (await shop.registry()).topics
        assert await shop.load_cursors("shop/billing", TOPIC) == {0: b"1"}
        await shop.close()
        await bank.close()


async def test_a_user_and_its_rights(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        etcd.control("user", "add", "root:secret")
        etcd.control("user", "grant-role", "root", "root")
        etcd.control("role", "add", "shop")
        etcd.control("role", "grant-permission", "shop", "--prefix=true", "readwrite", "t/shop/")
        etcd.control("user", "add", "worker:pass")
        etcd.control("user", "grant-role", "worker", "shop")
        etcd.control("auth", "enable")
        place = etcd.coordination
        for user, password in (("", ""), ("worker", "wrong")):
            refused = connect(place, prefix="t/shop", user=user, password=password)
            with pytest.raises(Retryable, match="StoreRefused"):
                await refused.start(ME, TTL_S)
            await refused.close()
        foreign = connect(place, prefix="t/bank", user="worker", password="pass")
        with pytest.raises(Retryable, match="PERMISSION_DENIED"):
            await foreign.start(ME, TTL_S)
        await foreign.close()
        store = connect(place, prefix="t/shop", user="worker", password="pass")
        await store.start(ME, TTL_S)
        await store.register_topic(TOPIC, "{}", "u1")
        session = store.session
        assert (await store.acquire(TOPIC, 0)).epoch == 1
        # A change of rights makes every token old.
        root = ("--user", "root:secret")
        etcd.control(*root, "role", "grant-permission", "shop", "read", "elsewhere")
        await store.set_assignment(TOPIC, {0: "a"})
        # A server that was started anew knows no token, and the watch has ended.
        etcd.servers[0].kill()
        etcd.servers[0].start()
        etcd.wait()
        await store.set_assignment(TOPIC, {0: "b"})
        version = (await store.registry()).version
        etcd.control(*root, "put", "t/shop/meta/assignments/shop/other", '{"0":"x"}')
        deadline = time.monotonic() + 10
        while (await store.registry()).assignments.get("shop/other") != {0: "x"}:
            assert time.monotonic() < deadline, "the watch goes on with another token"
            version = await store.changed(version, 0.5)
        assert store.session == session, "renewals go on with another token"
        assert store.session_deadline > time.monotonic()
        await store.close()


async def test_certificates(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other-ca")
    ours, theirs = authority.sign("client"), stranger.sign("client")
    with Etcd(tmp_path / "etcd", tls=authority.sign("etcd"), client_ca=authority.ca) as etcd:
        ca = str(authority.ca)
        # A Secret that is renewed under a running worker: `used` gets a good certificate later.
        used = tmp_path / "used"
        used.mkdir()
        cert, key = used / "tls.crt", used / "tls.key"
        cert.write_bytes(theirs.cert.read_bytes())
        key.write_bytes(theirs.key.read_bytes())
        for path in (cert, key):
            os.utime(path, (1, 1))
        running = EtcdClient(
            etcd.coordination.split(","), Login(ca=ca, cert=str(cert), key=str(key))
        )
        running.open()
        store = connect(etcd.coordination, tls=CoordinationTls(ca=ca, cert=str(cert), key=str(key)))
        no_certificate = connect(etcd.coordination, tls=CoordinationTls(ca=ca))
        other_server = connect(
            etcd.coordination,
            tls=CoordinationTls(ca=str(stranger.ca), cert=str(ours.cert), key=str(ours.key)),
        )
        refused = [store, no_certificate, other_server]
        for error in await asyncio.gather(
            *(one.start() for one in refused), return_exceptions=True
        ):
            assert isinstance(error, Retryable)
            assert error.reason == "StoreAway"
        await no_certificate.close()
        await other_server.close()
        missing = connect(etcd.coordination, tls=CoordinationTls(ca=str(tmp_path / "missing.crt")))
        with pytest.raises(Invalid, match="certificates"):
            await missing.start()
        cert.write_bytes(ours.cert.read_bytes())
        key.write_bytes(ours.key.read_bytes())
        assert (await running.range(b"nothing")).kvs == ()
        await running.close()
        await store.start()
        await store.register_topic(TOPIC, "{}", "u1")
        await store.close()


async def test_a_certificate_without_its_key_ends_no_process(tmp_path: Path) -> None:
    """The library aborts for it: a Secret with an empty tls.key would end all workers at once."""
    authority = Authority(tmp_path / "ca")
    ours = authority.sign("client")
    login = Login(ca=str(authority.ca), cert=str(ours.cert), key=str(ours.key))
    with Etcd(tmp_path / "etcd", tls=authority.sign("etcd"), client_ca=authority.ca) as etcd:
        client = EtcdClient(etcd.endpoints, login)
        client.open()
        await client.range(b"key")
        ours.key.write_bytes(b"")
        os.utime(ours.key, (1, 1))
        await client.range(b"key")
        await client.close()
    with pytest.raises(Invalid, match="without its key"):
        EtcdClient(["https://etcd:2379"], login).open()
    with pytest.raises(Invalid, match="without its certificate"):
        EtcdClient(["https://etcd:2379"], Login(key=str(authority.ca))).open()


def test_settings_say_it_all(tmp_path: Path) -> None:
    text = (
        '{"worker_id": "a", "log_root": "/l", "run_dir": "/r", "coordination": "https://e:2379",'
        ' "catalog": {}, "coordination_prefix": "tidewater/shop", "coordination_user": "u",'
        ' "coordination_password": "p", "coordination_tls": {"ca": "/ca"}, "assigned_only": true}'
    )
    settings = WorkerSettings.from_json(text)
    assert WorkerSettings.from_json(settings.to_json()) == settings
    assert "'p'" not in repr(settings)
    with pytest.raises(Invalid, match="cert and key"):
        WorkerSettings.from_json(text.replace('"ca": "/ca"', '"cert": "/c"'))
    with pytest.raises(Invalid, match="coordination_prefix"):
        WorkerSettings.from_json(text.replace("tidewater/shop", "/"))


async def test_a_start_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    store = connect(etcd.coordination)
    with pytest.raises(Retryable, match="StoreAway"):
        await store.start(ME, TTL_S)
    with etcd:
        await store.start(ME, TTL_S)
        assert (await store.acquire(TOPIC, 0)).epoch == 1
        await store.close()
