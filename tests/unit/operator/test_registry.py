"""Whose registry it is, what is forgotten of it, and how etcd is asked after its Secret changed."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tidewater_coordination.etcd.login import Login
from tidewater_core.clock import SystemClock
from tidewater_core.errors import Invalid, Retryable, TidewaterError
from tidewater_operator import main
from tidewater_operator.cluster.api import ApiRefused
from tidewater_operator.cluster.gather import cluster_id
from tidewater_operator.etcd_secret import EtcdSecret
from tidewater_operator.hearing import Hearing
from tidewater_operator.registry import Registries, Standing
from tidewater_operator.settings import Intervals
from tidewater_testing.api_server import ApiServer
from tidewater_testing.namespace import SETTINGS
from tidewater_testing.parts.certificates import Authority
from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.place import CLUSTER, Place, served

MakePlace = Callable[..., Place]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


@pytest.fixture
async def make(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[MakePlace]:
    """Give places, each a cluster with an operator, that share one prefix."""
    made: list[Place] = []

    def place(**more: Any) -> Place:
        made.append(Place(etcd, request.node.name, **more))
        return made[-1]

    yield place
    for one in made:
        await one.close()


def told(place: Place, kind: str, name: str) -> dict[str, tuple[str, str]]:
    found = place.api.find(kind, name)
    assert found is not None
    conditions = found.get("status", {}).get("conditions", ())
    return {one["type"]: (one["status"], one["reason"]) for one in conditions}


def events(place: Place) -> set[str]:
    return {one["reason"] for path, one in place.api.objects.items() if "/events/" in path}


async def test_tables_of_namespaces_count_before_their_first_pass(make: MakePlace) -> None:
    """With tables that may be anybody's: an operator that starts knows whose they are."""
    first, anew = make(), make()
    await served(first)
    assert list(await anew.registries.elsewhere("bank")) == ["shop/orders"]
    assert await anew.registries.elsewhere("shop") == {}


# ---- another cluster


async def test_the_registry_of_another_cluster_is_not_touched(make: MakePlace) -> None:
    first, second = make(), make(cluster="cluster-b")
    await served(first)
    before = await first.registries.read("shop")
    second.api.objects.clear()  # it has no such namespace
    with pytest.raises(Invalid, match="ForeignRegistry"):
        await second.registries.namespaces()
    assert (await second.run()).is_empty
    assert await first.registries.read("shop") == before
    second.api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
    second.apply("Topic", "orders", partitions=1)
    with pytest.raises(Invalid, match=f"etcd.takeOverFrom={CLUSTER}"):
        await second.run()
    assert told(second, "Topic", "orders")["Ready"] == ("Unknown", "ForeignRegistry")
    assert "ForeignRegistry" in events(second)
    assert second.api.find("Pool", "default") is None, "nothing is made there, either"
    assert await first.registries.read("shop") == before


async def test_a_person_may_take_over_and_nothing_is_forgotten_by_it(make: MakePlace) -> None:
    first = make()
    await served(first)
    before = await first.registries.read("shop")
    second = make(cluster="cluster-b", take_over_from=CLUSTER)
    second.api.objects.clear()  # its namespaces are not there yet
    assert await second.registries.namespaces() == []
    assert (await second.run()).is_empty
    second.api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
    assert (await second.run()).is_empty
    after = await second.registries.read("shop")
    assert (after.topics, after.subscriptions, after.owners, after.assignments) == (
        before.topics,
        before.subscriptions,
        before.owners,
        before.assignments,
    )
    with pytest.raises(Invalid, match="ForeignRegistry"):
        await first.registries.namespaces()
    second.apply("Topic", "orders", partitions=2)
    await second.run()
    assert await second.registries.namespaces() == ["shop"], "it is this cluster's now"


async def test_what_did_not_say_whose_it_is_stays(make: MakePlace, etcd: Etcd) -> None:
    """An earlier operator noted no cluster: that a namespace is not here proves nothing."""
    place = make()
    await served(place)
    prefix = place.registries._prefix
    etcd.control("put", f"{prefix}/.namespaces/shop", "{}")
    place.api.objects.clear()
    assert (await place.run()).is_empty
    assert "shop/orders" in (await place.registries.read("shop")).topics
    assert await place.registries.standing("shop", "x") is Standing.LEFT


async def test_a_change_at_the_same_time_is_not_overwritten(make: MakePlace, etcd: Etcd) -> None:
    place = make()
    await served(place)
    found = await place.registries._look("shop")
    etcd.control("put", f"{place.registries._prefix}/.cluster", '{"uid": "cluster-b"}')
    answer = await place.registries._client.txn(found.conditions, [])
    assert not answer.succeeded


async def test_passes_that_find_it_to_be_nobodys_at_once_all_go_on(make: MakePlace) -> None:
    """At a first start; one that raised would say that etcd does not answer."""
    place, other = make(), make(cluster="cluster-b")
    first = await place.registries._owned([])
    assert await place.registries._owned([]) == first, "that nothing is there was so a moment ago"
    with pytest.raises(Invalid, match="ForeignRegistry"):
        await other.registries._owned([])


async def test_a_registry_that_is_never_still_is_given_up(
    make: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make()

    async def lost(*_: Any) -> None:
        return None

    monkeypatch.setattr(place.registries, "_claim", lost)
    with pytest.raises(Retryable, match="RegistryChanged"):
        await place.registries.namespaces()


# ---- who we are


async def test_the_missing_right_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rights in some namespaces alone a trace of a 403 helps nobody."""
    api = ApiServer()

    async def refused(*_: Any) -> None:
        raise ApiRefused(403, "Forbidden", "namespaces is forbidden")

    monkeypatch.setattr(api, "get", refused)
    with pytest.raises(Invalid, match=r"NoClusterId.*get namespaces/kube-system"):
        await cluster_id(api)


def test_what_a_person_must_change_ends_the_operator_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def missing(*_: Any) -> int:
        raise Invalid("NoClusterId", "a right is missing")

    monkeypatch.setattr(main, "_run", missing)
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS.model_dump_json(by_alias=True, exclude_none=True))
    assert main.main([f"--settings={path}"]) == 2
    assert "a right is missing" in caplog.text


# ---- another namespace of the name


async def test_a_namespace_that_was_made_again_begins_anew(make: MakePlace) -> None:
    """It was deleted and made again while no operator ran: what its name held is forgotten."""
    place = make()
    await served(place)
    old = (await place.registries.read("shop")).topics["shop/orders"]
    place.api.objects.clear()
    place.api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
    path = place.apply("Topic", "orders", partitions=2)
    await place.run()
    await place.run()
    registry = await place.registries.read("shop")
    assert registry.topics["shop/orders"].uuid == place.api.objects[path]["metadata"]["uid"]
    assert registry.topics["shop/orders"].uuid != old.uuid
    assert registry.owners == {}
    assert told(place, "Topic", "orders")["Ready"][1] != "PreviousDeleting"


# ---- the Secret


def secret(**data: bytes | str) -> dict[str, Any]:
    texts = {
        key.replace("_", "."): base64.b64encode(
            value.encode() if isinstance(value, str) else value
        ).decode()
        for key, value in data.items()
    }
    meta = {"name": "etcd", "namespace": "tidewater"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": texts}


class Nobody:
    """Stands for keepers and for the lease."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gained = asyncio.Event()
        self.gained.set()

    def mark(self, name: str) -> None:
        """Note nothing."""


async def sweeping(api: ApiServer, registries: Registries, source: EtcdSecret) -> None:
    """Do what the operator does for ever, every second."""
    intervals = Intervals.model_validate({"status": "1s", "resync": "1s"})
    settings = SETTINGS.model_copy(update={"intervals": intervals})
    nobody: Any = Nobody()
    await main._sweep(settings, api, registries, source, nobody, nobody, Hearing(), SystemClock())


async def until(ask: Callable[[], Awaitable[object]]) -> None:
    """Wait until etcd answers."""
    async with asyncio.timeout(20):
        while True:
            with suppress(TidewaterError):
                await ask()
                return
            await asyncio.sleep(0.2)


async def test_a_new_password_is_used(tmp_path: Path) -> None:
    with Etcd(tmp_path / "etcd") as etcd:
        for name in ("root", "operator"):
            etcd.control("user", "add", f"{name}:one")
            etcd.control("user", "grant-role", name, "root")
        etcd.control("auth", "enable")
        api = ApiServer()
        api.put(secret(username="operator", password="one"))
        source = EtcdSecret(api, "tidewater", "etcd", tmp_path)
        registries = Registries(etcd.endpoints, "t", await source.login(), cluster="c")
        await registries.standing("shop", "uid")
        await registries.read("shop")
        for change in (("delete", "operator"), ("add", "operator:two")):
            etcd.control("--user=root:one", "user", *change)
        etcd.control("--user=root:one", "user", "grant-role", "operator", "root")
        with pytest.raises(Retryable, match="StoreRefused"):
            await registries.namespaces()
        task = asyncio.create_task(sweeping(api, registries, source))
        api.put(secret(username="operator", password="two"))
        await until(registries.namespaces)
        assert (await registries.read("shop")).topics == {}
        task.cancel()
        await registries.close()


async def test_renewed_certificates_are_used(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other-ca")
    ours, theirs = authority.sign("client"), stranger.sign("client")
    ca = authority.ca.read_bytes()
    with Etcd(tmp_path / "etcd", tls=authority.sign("etcd"), client_ca=authority.ca) as etcd:
        api = ApiServer()
        api.put(
            secret(ca_crt=ca, tls_crt=theirs.cert.read_bytes(), tls_key=theirs.key.read_bytes())
        )
        source = EtcdSecret(api, "tidewater", "etcd", tmp_path)
        registries = Registries(etcd.endpoints, "t", await source.login(), cluster="c")
        with pytest.raises(Retryable, match="StoreAway"):
            await registries.namespaces()
        task = asyncio.create_task(sweeping(api, registries, source))
        api.put(secret(ca_crt=ca, tls_crt=ours.cert.read_bytes(), tls_key=ours.key.read_bytes()))
        await until(registries.namespaces)
        task.cancel()
        await registries.close()


async def test_a_certificate_without_its_key_changes_nothing(tmp_path: Path) -> None:
    api = ApiServer()
    source = EtcdSecret(api, "tidewater", "etcd", tmp_path)
    api.put(secret(ca_crt="ca", tls_crt="one", tls_key="key"))
    login = await source.login()
    for half in (secret(tls_crt="two"), secret(tls_crt="two", tls_key=""), secret(tls_key="two")):
        api.put(half)
        assert await source.renewed() == login
        assert (tmp_path / "tls.crt").read_text() == "one"
        with pytest.raises(Invalid, match="BadSecret"):
            await source.login()


async def test_a_secret_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    api = ApiServer()
    source = EtcdSecret(api, "tidewater", "etcd", tmp_path)
    with pytest.raises(Invalid, match="SecretNotFound"):
        await source.renewed()
    path = api.put(secret(username="root", password="one", ca_crt="pem"))
    login = await source.login()
    assert login == Login(ca=str(tmp_path / "ca.crt"), user="root", password="one")
    assert (tmp_path / "ca.crt").stat().st_mode & 0o777 == 0o600
    stamp = login.stamp()
    assert (await source.renewed()).stamp() == stamp, "the same file is not written again"
    api.remove(path)
    assert await source.renewed() == login


async def test_a_namespace_that_is_asked_for_twice_at_once_is_opened_once(make: MakePlace) -> None:
    """The first pass and the watch begin together; what neither keeps would watch for ever."""
    registries = make().registries
    first, second = await asyncio.gather(registries.store("shop"), registries.store("shop"))
    assert first is second
    await registries.release("shop")
    assert not [task for task in asyncio.all_tasks() if "Mirror" in repr(task)]
