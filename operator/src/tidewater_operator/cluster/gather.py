"""Read one namespace, all of it at once."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from tidewater_core.errors import Invalid, Retryable
from tidewater_core.names import LABEL_MANAGED_BY
from tidewater_operator.cluster.api import (
    BUDGET,
    CLAIM,
    CONFIG_MAP,
    JOB,
    NAMESPACE,
    NETWORK_POLICY,
    POD,
    POOL,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    SUBSCRIPTION,
    TOPIC,
    Api,
    ApiRefused,
    Kind,
)
from tidewater_operator.model.names import MANAGER, Manifest
from tidewater_operator.observed import Snapshot

OURS: Final = f"{LABEL_MANAGED_BY}={MANAGER}"
_MADE: Final = (
    STATEFUL_SET,
    SERVICE,
    CONFIG_MAP,
    SERVICE_ACCOUNT,
    BUDGET,
    NETWORK_POLICY,
    ROLE_BINDING,
)
log = logging.getLogger(__name__)


async def gather(
    api: Api, namespace: str, secrets: Mapping[str, Mapping[str, str]]
) -> Snapshot | None:
    """Return what there is in a namespace; None if there is no such namespace.

    `secrets` are those to be copied there.
    """
    found = await _namespace(api, namespace)
    if found is None:
        return None
    lists = await asyncio.gather(
        *(api.list(kind, namespace) for kind in (TOPIC, SUBSCRIPTION, POOL)),
        *(api.list(kind, namespace, OURS) for kind in (CLAIM, POD, JOB, *_MADE)),
    )
    topics, subscriptions, pools, claims, pods, jobs, *made = lists
    copies = await asyncio.gather(*(api.get(SECRET, namespace, name) for name in secrets))
    objects: dict[tuple[str, str], Manifest] = {
        (item["kind"], item["metadata"]["name"]): item for items in made for item in items
    }
    objects |= {
        ("Secret", copy["metadata"]["name"]): {**copy, "kind": "Secret"}
        for copy in copies
        if copy is not None
    }
    return Snapshot(
        namespace=namespace,
        uid=str(found["metadata"].get("uid", "")),
        is_terminating="deletionTimestamp" in found["metadata"],
        topics=_staying(topics),
        subscriptions=_staying(subscriptions),
        pools=_staying(pools),
        objects=objects,
        claims=tuple(claims),
        pods=tuple(pods),
        jobs=tuple(jobs),
        secrets=secrets,
    )


async def cluster_id(api: Api) -> str:
    """Return what tells this cluster from every other.

    Without it nothing may be touched: the registry may be another cluster's.
    """
    try:
        found = await api.get(NAMESPACE, None, "kube-system")
    except ApiRefused as error:
        if error.code != 403:
            raise
        raise Invalid(
            "NoClusterId",
            "the right to get namespaces/kube-system is missing: its uid tells this cluster from "
            "every other. Give the operator a ClusterRole with the verb get on namespaces, also "
            f"if it serves some namespaces alone (watchNamespaces): {error.message}",
        ) from error
    if found is None:
        raise Retryable("NoClusterId", "there is no namespace kube-system", 1_000)
    return str(found["metadata"]["uid"])


async def _namespace(api: Api, name: str) -> Manifest | None:
    try:
        return await api.get(NAMESPACE, None, name)
    except ApiRefused as error:
        if error.code == 403:  # rights in some namespaces alone: no word of the namespace itself
            return {"metadata": {"name": name}}
        raise


def _staying(items: list[Manifest]) -> tuple[Manifest, ...]:
    """Leave out what a person has deleted, whoever's finalizer holds it."""
    return tuple(item for item in items if "deletionTimestamp" not in item["metadata"])


async def everything(api: Api, kind: Kind, namespaces: list[str]) -> list[Manifest]:
    """Return all objects of a kind, in the whole cluster or in some namespaces.

    One of these that is gone, and our rights in it, keeps us from none of the others.
    """
    if not namespaces:
        return await api.list(kind)
    lists = await asyncio.gather(*(_all_that_may_be_seen(api, kind, name) for name in namespaces))
    return [item for items in lists for item in items]


async def _all_that_may_be_seen(api: Api, kind: Kind, namespace: str) -> list[Manifest]:
    try:
        return await api.list(kind, namespace)
    except ApiRefused as error:
        if error.code not in (403, 404):
            raise
        log.warning("%s of namespace %s cannot be listed: %s", kind.plural, namespace, error)
        return []
