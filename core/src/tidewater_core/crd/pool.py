"""Pool: a group of workers of one namespace, and the unit that scales.

A Topic names a pool; one that does not exist is made with the operator's defaults.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from tidewater_core.crd.base import (
    Count,
    Flag,
    Model,
    ObjectMeta,
    cel,
    rules,
    size_between,
)
from tidewater_core.crd.explain import problems
from tidewater_core.crd.status import PoolStatus
from tidewater_core.names import POOL_NAME_CHARS_MAX, POOL_WORKERS_ENDING
from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize

REPLICAS_MAX = 1_000
"""Most workers of a pool."""

_FREE: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}
"""Kubernetes' own types: the API server checks them when the workers are made."""
FreeMap = Annotated[dict[str, Any], Field(max_length=100, json_schema_extra=_FREE)]
FreeList = Annotated[list[FreeMap], Field(max_length=100)]
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")


class StorageSpec(Model):
    """The disk of each worker."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.storageClass) == has(oldSelf.storageClass)"
                " && (!has(self.storageClass) || self.storageClass == oldSelf.storageClass)",
                "storageClass cannot change: make another pool and move the topics there",
            )
        )
    )

    size: Annotated[ByteSize, size_between("64Mi", "1024Ti")] = ByteSize("10Gi")
    """Size of each worker's volume. May grow, if the StorageClass can."""
    storage_class: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """StorageClass of the volumes; the cluster's default when left out."""


def _known_limits(limits: dict[str, Any]) -> dict[str, Any]:
    try:
        _limits().validate_python(_snake(limits))
    except ValidationError as error:
        raise ValueError("; ".join(problems(error))) from error
    return limits


@cache
def _limits() -> TypeAdapter[Limits]:
    return TypeAdapter(Limits)


def _snake(limits: Mapping[str, Any]) -> dict[str, Any]:
    return {_CAMEL.sub(r"_\1", name).lower(): value for name, value in limits.items()}


class PoolSpec(Model):
    """What a pool should be."""

    replicas: Annotated[Count, Field(ge=1, le=REPLICAS_MAX)] = 1
    """Number of workers. Workers that are too many are drained before they go."""
    storage: StorageSpec = StorageSpec()
    """The disk of each worker."""
    resources: FreeMap = Field(default={})
    """Requests and limits of the worker container; the operator's when left out."""
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The worker image; the operator's when left out."""
    node_selector: Annotated[dict[str, str], Field(max_length=32)] = Field(default={})
    """Labels of the nodes that may run the workers."""
    tolerations: FreeList = Field(default=[])
    """Taints that the workers tolerate."""
    affinity: FreeMap = Field(default={})
    """Affinity of the worker pods."""
    topology_spread: FreeList = Field(default=[])
    """Topology spread constraints; by nodes, if possible, when left out."""
    limits: Annotated[FreeMap, AfterValidator(_known_limits)] = Field(default={})
    """Bounds on what callers can make grow, such as requestBytesMax: 32Mi."""
    flight: Flag = True
    """Serve Arrow Flight."""
    pod_annotations: Annotated[dict[str, str], Field(max_length=32)] = Field(default={})
    """Annotations of the worker pods. Changing one restarts the workers, one at a time."""

    @field_validator("topology_spread")
    @classmethod
    def _spread_has_a_key(cls, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for item in items:
            if not item.get("topologyKey"):
                raise ValueError("each topologySpread needs a topologyKey")
        return items

    @property
    def limits_settings(self) -> dict[str, Any]:
        """The limits by the names that the worker's settings have."""
        return _snake(self.limits)


class Pool(Model):
    """A group of workers that topics share."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')"
                f" && self.metadata.name.size() <= {POOL_NAME_CHARS_MAX}",
                f"a pool's name must be at most {POOL_NAME_CHARS_MAX} characters of a-z, 0-9 and "
                "'-'",
            ),
            cel(
                f"!self.metadata.name.endsWith('{POOL_WORKERS_ENDING}')",
                f"a pool's name must not end in {POOL_WORKERS_ENDING}: another pool's Service may "
                "have that name",
            ),
        )
    )

    api_version: Literal["tidewater.dev/v1alpha1"] = "tidewater.dev/v1alpha1"
    """Always tidewater.dev/v1alpha1."""
    kind: Literal["Pool"] = "Pool"
    """Always Pool."""
    metadata: ObjectMeta
    """Name, namespace, labels."""
    spec: PoolSpec = PoolSpec()
    """What the pool should be."""
    status: PoolStatus | None = None
    """What the pool is, written by the operator."""
