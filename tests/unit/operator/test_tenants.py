"""What the people of a namespace can get wrong, or try: it is theirs to see, and nobody else's."""

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidewater_operator.model.credentials import sources
from tidewater_operator.settings import OperatorSettings
from tidewater_testing.namespace import SETTINGS
from tidewater_testing.parts.certificates import Authority
from tidewater_testing.parts.etcd import Etcd
from tidewater_testing.place import Place, served

TLS = "tidewater-tls"
SET = "/apis/apps/v1/namespaces/shop/statefulsets/tidewater-default"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as part:
        yield part


@pytest.fixture
async def place(etcd: Etcd, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    found = Place(etcd, request.node.name.replace("[", "-").replace("]", ""))
    yield found
    await found.close()


def ready(place: Place, kind: str, name: str) -> tuple[str, str, str]:
    found = place.api.find(kind, name)
    assert found is not None
    (one,) = [c for c in found["status"]["conditions"] if c["type"] == "Ready"]
    return one["status"], one["reason"], one["message"]


def events(place: Place) -> set[str]:
    return {one["reason"] for path, one in place.api.objects.items() if "/events/" in path}


def with_tls() -> OperatorSettings:
    given = SETTINGS.model_dump(by_alias=True, mode="json", exclude_none=True)
    return OperatorSettings.model_validate({**given, "tls": {"secretName": TLS}})


def with_credentials(**tenants: list[str]) -> OperatorSettings:
    given = SETTINGS.model_dump(by_alias=True, mode="json", exclude_none=True)
    names = {"catalogSecret": "keys", "tenants": tenants}
    return OperatorSettings.model_validate(given | names)


def keys(name: str, value: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": "tidewater"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {"KEY": value}}


def authority(data: bytes) -> dict[str, Any]:
    meta = {"name": TLS, "namespace": "shop"}
    data_b64 = {"ca.crt": base64.b64encode(data).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data_b64}


@pytest.mark.parametrize("bad", [b"-----BEGIN CERTIFICATE-----\nno", b"none", b"\xff\xfe"])
async def test_a_ca_that_is_none_is_told_and_stops_nothing(
    place: Place, bad: bytes, tmp_path: Path
) -> None:
    place.use(with_tls())
    place.api.put(authority(bad))
    await served(place)
    assert ready(place, "Topic", "orders")[0] == "True", "the namespace is looked after"
    status, reason, message = ready(place, "Pool", "default")
    assert (status, reason) == ("False", "BadCertificateAuthority")
    assert f"ca.crt of Secret {TLS}" in message
    assert "BadCertificateAuthority" in events(place)
    place.api.put(authority(Authority(tmp_path).ca.read_bytes()))
    await place.run()
    assert ready(place, "Pool", "default")[:2] == ("True", "Ready")


async def test_nothing_is_kept_of_the_ca_of_a_namespace_that_is_gone(
    place: Place, tmp_path: Path
) -> None:
    place.use(with_tls())
    place.api.put(authority(Authority(tmp_path).ca.read_bytes()))
    await served(place)
    assert list(place.reconciler._trust._known) == ["shop"]
    place.api.objects.clear()
    assert (await place.run()).is_empty
    assert place.reconciler._trust._known == {}


async def test_an_image_that_is_not_allowed_is_not_run(place: Place) -> None:
    """Whoever chooses a worker's program has the catalog's keys, and the tokens of its users."""
    await served(place)
    place.apply("Pool", "default", replicas=3, image="elsewhere/evil:1")
    await place.run()
    spec = place.api.objects[SET]["spec"]
    assert spec["template"]["spec"]["containers"][0]["image"] == SETTINGS.worker_image
    assert spec["replicas"] == 1, "it goes on as it was"
    status, reason, message = ready(place, "Pool", "default")
    assert (status, reason) == ("False", "ImageNotAllowed")
    assert "elsewhere/evil:1" in message
    assert "ImageNotAllowed" in events(place)
    assert ready(place, "Topic", "orders")[0] == "True"
    place.apply("Pool", "default", replicas=1, image="tidewater-worker:2")
    await place.run()
    spec = place.api.objects[SET]["spec"]
    assert spec["template"]["spec"]["containers"][0]["image"] == "tidewater-worker:2"


COPY = "/api/v1/namespaces/shop/secrets/tidewater-catalog"


async def test_a_namespace_with_credentials_of_its_own_gets_no_others(place: Place) -> None:
    """Who may read Secrets there would have every tenant's tables."""
    place.use(with_credentials(separateCatalog=["shop"]))
    place.api.put(keys("keys", "c2hhcmVk"))
    place.apply("Topic", "orders", partitions=2)
    await place.run()
    await place.run()
    assert COPY not in place.api.objects, "not the shared ones either"
    status, reason, message = ready(place, "Pool", "default")
    assert (status, reason) == ("False", "SecretNotFound")
    assert "keys.shop" in message
    place.api.put(keys("keys.shop", "c2hvcA=="))
    await place.run()
    assert place.api.objects[COPY]["data"] == {"KEY": "c2hvcA=="}


async def test_a_namespace_leaves_the_shared_credentials(place: Place) -> None:
    place.use(with_credentials())
    place.api.put(keys("keys", "c2hhcmVk"))
    place.api.put(keys("keys.shop", "c2hvcA=="))
    await served(place)
    assert place.api.objects[COPY]["data"] == {"KEY": "c2hhcmVk"}
    place.use(with_credentials(separateCatalog=["shop"]))
    await place.run()
    assert place.api.objects[COPY]["data"] == {"KEY": "c2hvcA=="}


def test_whose_secret_is_copied_where() -> None:
    given = SETTINGS.model_dump(by_alias=True, mode="json", exclude_none=True)
    etcd_settings = {"endpoints": ["https://etcd:2379"], "secret": "etcd-client"}
    tenants = {"separateCatalog": ["shop", "home"], "separateEtcd": ["bank"]}
    names = {"catalogSecret": "tidewater-catalog", "etcd": etcd_settings, "tenants": tenants}
    settings = OperatorSettings.model_validate(given | names)
    found = {name: sources(settings, name, "home") for name in ("shop", "bank", "web", "home")}
    shared = {"tidewater-catalog": "tidewater-catalog", "tidewater-etcd": "etcd-client"}
    assert found == {
        "shop": shared | {"tidewater-catalog": "tidewater-catalog.shop"},
        "bank": shared | {"tidewater-etcd": "etcd-client.bank"},
        "web": shared,
        "home": {"tidewater-etcd": "etcd-client"},
    }, "the shared Secret itself is never overwritten"


def test_separate_from_nothing_is_refused() -> None:
    given = SETTINGS.model_dump(by_alias=True, mode="json", exclude_none=True)
    with pytest.raises(ValueError, match="separateEtcd"):
        OperatorSettings.model_validate(given | {"tenants": {"separateEtcd": ["shop"]}})
