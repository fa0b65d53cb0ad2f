"""The Pool kind: defaults, what it refuses, and the names that come from it."""

import pytest

from tidewater_core.crd.manifest import load_all, load_manifests
from tidewater_core.crd.pool import Pool, PoolSpec
from tidewater_core.errors import Invalid
from tidewater_core.names import (
    POOL_NAME_CHARS_MAX,
    POOL_WORKERS_ENDING,
    dedicated_pool,
    is_dns_label,
)

POOL = """
apiVersion: tidewater.dev/v1alpha1
kind: Pool
metadata: {name: fast, namespace: shop}
spec:
"""


def test_an_empty_spec_is_a_good_pool() -> None:
    (pool,) = load_all(POOL)
    assert isinstance(pool, Pool)
    assert pool.spec == PoolSpec()
    assert pool.spec.replicas == 1


def test_without_a_cluster_there_is_nothing_to_size() -> None:
    assert load_manifests(POOL) == []


def test_limits_have_the_names_of_manifests() -> None:
    spec = PoolSpec.model_validate({"limits": {"requestBytesMax": "16Mi", "headersMax": 5}})
    assert spec.limits_settings == {"request_bytes_max": "16Mi", "headers_max": 5}


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("replicas: 0", "greater than or equal to 1"),
        ("storage: {size: 1Mi}", "is not between 64Mi and 1024Ti"),
        ("limits: {requestBytes: 1Mi}", "no such field"),
        ("limits: {requestBytesMax: 1Mi}", "must not be larger than"),
        ("topologySpread: [{maxSkew: 1}]", "topologyKey"),
    ],
)
def test_mistakes_are_named(spec: str, told: str) -> None:
    with pytest.raises(Invalid, match=told):
        load_all(f"{POOL}  {spec}\n")


@pytest.mark.parametrize("name", ["a", "orders", "x" * 34, "x" * 35, "y" * 63, "a-" * 31 + "b"])
def test_a_dedicated_pool_has_a_name_that_fits(name: str) -> None:
    pool = dedicated_pool(name)
    assert is_dns_label(pool)
    assert len(pool) <= POOL_NAME_CHARS_MAX


def test_long_names_that_begin_alike_have_pools_of_their_own() -> None:
    assert dedicated_pool("z" * 60 + "a") != dedicated_pool("z" * 60 + "b")


@pytest.mark.parametrize("name", ["workers", "jobs-workers", "x" * 20 + "-workers", "workers-2"])
def test_no_dedicated_pool_has_the_name_of_anothers_service(name: str) -> None:
    pool = dedicated_pool(name)
    assert not pool.endswith(POOL_WORKERS_ENDING)
    assert is_dns_label(pool)
    assert len(pool) <= POOL_NAME_CHARS_MAX
    assert pool.startswith(f"topic-{name[:20]}"), "a person knows whose it is"
