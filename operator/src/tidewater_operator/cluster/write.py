"""Bring objects to what they should be; write nothing that is already so."""

import logging
from collections.abc import Mapping

from tidewater_operator.cluster.api import CLUSTER_ROLE_BINDING, STATEFUL_SET, Api
from tidewater_operator.model.compare import (
    RestartReason,
    covers,
    restart_reasons,
    stamped,
    volume_bytes,
)
from tidewater_operator.model.names import ANNOTATION_HASH, WORKER_ACCOUNT, Manifest
from tidewater_operator.observed import Key

log = logging.getLogger(__name__)


def is_settled(live: Manifest | None, wanted: Manifest) -> bool:
    """Tell whether an object is as it should be."""
    if live is None:
        return False
    annotations = live["metadata"].get("annotations") or {}
    same_hash = (
        annotations.get(ANNOTATION_HASH) == wanted["metadata"]["annotations"][ANNOTATION_HASH]
    )
    return same_hash and covers(live, wanted)


async def settle(api: Api, objects: Mapping[Key, Manifest], manifest: Manifest) -> Manifest | None:
    """Apply a manifest unless it is there as it is; return what was written."""
    return await _settle(api, objects, stamped(manifest))


async def _settle(api: Api, objects: Mapping[Key, Manifest], wanted: Manifest) -> Manifest | None:
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    if is_settled(objects.get((kind, name)), wanted):
        return None
    log.info("apply %s %s/%s", kind, wanted["metadata"].get("namespace"), name)
    return await api.apply(wanted)


async def settle_set(
    api: Api, objects: Mapping[Key, Manifest], manifest: Manifest
) -> tuple[Manifest | None, list[RestartReason]]:
    """Apply a StatefulSet; say why its workers will be started anew, if they will."""
    live = objects.get((manifest["kind"], manifest["metadata"]["name"]))
    if live is None:
        return await settle(api, objects, manifest), []
    meta = live["metadata"]
    if "deletionTimestamp" in meta:
        return None, []  # on its way out, its pods stay: made anew when it is gone
    if volume_bytes(manifest) > volume_bytes(live):
        # Volumes of a StatefulSet are fixed when it is made. So it is made again, around its pods.
        log.info("replace StatefulSet %s/%s: larger volumes", meta["namespace"], meta["name"])
        await api.delete(STATEFUL_SET, meta["namespace"], meta["name"], meta["uid"], "Orphan")
        return None, []
    # Those that are there never shrink, and what others set in them is theirs.
    spec = {**manifest["spec"], "volumeClaimTemplates": live["spec"]["volumeClaimTemplates"]}
    wanted = {**stamped(manifest), "spec": spec}
    return await _settle(api, objects, wanted), restart_reasons(live, wanted)


async def bind_reviewers(api: Api, binding: str, namespace: str, *, wanted: bool) -> None:
    """Let the workers of a namespace ask who somebody is, or no longer.

    One object for all namespaces: changed only if it is still as it was read.
    """
    live = await api.get(CLUSTER_ROLE_BINDING, None, binding)
    if live is None:
        log.warning("there is no ClusterRoleBinding %s: workers cannot check tokens", binding)
        return
    subject = {"kind": "ServiceAccount", "name": WORKER_ACCOUNT, "namespace": namespace}
    subjects = live.get("subjects") or []
    others = [one for one in subjects if not covers(one, subject)]
    if wanted == (len(others) < len(subjects)):
        return
    await api.merge(
        CLUSTER_ROLE_BINDING,
        None,
        binding,
        {
            "metadata": {"resourceVersion": live["metadata"]["resourceVersion"]},
            "subjects": [*others, subject] if wanted else others,
        },
    )
