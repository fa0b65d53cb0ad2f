"""Names and labels of everything that belongs to a pool. Pure."""

import re
from collections.abc import Iterable
from typing import Any, Final

from tidewater_core.crd.pool import Pool
from tidewater_core.names import (
    API_VERSION,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_PART_OF,
    LABEL_POOL,
    POOL_WORKERS_ENDING,
)

MANAGER: Final = "tidewater-operator"
"""Field manager of server-side apply, and the value of managed-by."""
HTTP_PORT: Final = 8080
FLIGHT_PORT: Final = 8815
WORKER_ACCOUNT: Final = "tidewater-worker"
WORKER_CONTAINER: Final = "worker"
NAMESPACE_SERVICE: Final = "tidewater"
CATALOG_SECRET: Final = "tidewater-catalog"  # noqa: S105
ETCD_SECRET: Final = "tidewater-etcd"  # noqa: S105
PIPELINE_ACCOUNT: Final = "tidewater-pipeline"
ANNOTATION_HASH: Final = "tidewater.dev/applied"
"""Hash of what we applied: tells that a field was taken out, which comparing cannot."""
ANNOTATION_CONFIG: Final = "tidewater.dev/config"
"""On pods: hash of the settings and Secrets that they were started with."""
_DATA: Final = "data"

Manifest = dict[str, Any]


def set_name(pool: str) -> str:
    """Return the name of a pool's StatefulSet, client Service and ConfigMap."""
    return f"tidewater-{pool}"


def headless_name(pool: str) -> str:
    """Return the Service that gives each worker a name."""
    return f"{set_name(pool)}{POOL_WORKERS_ENDING}"


def worker_name(pool: str, ordinal: int) -> str:
    """Return a worker's id, which is its pod's name."""
    return f"{set_name(pool)}-{ordinal}"


def claim_name(pool: str, ordinal: int) -> str:
    """Return the PersistentVolumeClaim of a worker."""
    return f"{_DATA}-{worker_name(pool, ordinal)}"


def worker_of_claim(claim: str) -> str:
    """Return the worker whose volume a PersistentVolumeClaim is."""
    return claim.removeprefix(f"{_DATA}-")


def ordinal_of(pool: str, worker: str) -> int | None:
    """Return a worker's number in a pool; None if it is of another."""
    match = re.fullmatch(re.escape(set_name(pool)) + r"-(0|[1-9][0-9]{0,5})", worker)
    return int(match[1]) if match else None


def shared_labels() -> dict[str, str]:
    """Return the labels of everything that we make."""
    return {
        "app.kubernetes.io/name": "tidewater",
        LABEL_PART_OF: "tidewater",
        LABEL_MANAGED_BY: MANAGER,
    }


def selector_labels(pool: str) -> dict[str, str]:
    """Return the labels that pick a pool's pods; they can never change."""
    return {
        "app.kubernetes.io/name": "tidewater",
        LABEL_COMPONENT: "worker",
        LABEL_POOL: pool,
    }


def labels(pool: str) -> dict[str, str]:
    """Return the labels of a pool's objects."""
    return {
        **shared_labels(),
        **selector_labels(pool),
        "app.kubernetes.io/instance": set_name(pool),
    }


def selector_text(pool: str) -> str:
    """Return the selector of a pool's pods as autoscalers want it."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector_labels(pool).items()))


def owner(pool: Pool) -> Manifest:
    """Return the reference by which an object goes with its pool."""
    found = _reference(pool.metadata.name, pool.metadata.uid or "")
    return {**found, "controller": True, "blockOwnerDeletion": False}


def owners(pools: Iterable[Manifest]) -> list[Manifest]:
    """Return the references by which an object goes with the last of some pools.

    By the objects as they are: one whose spec cannot be read has workers, too.
    """
    return [_reference(pool["metadata"]["name"], pool["metadata"]["uid"]) for pool in pools]


def _reference(name: str, uid: str) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": "Pool", "name": name, "uid": uid}
