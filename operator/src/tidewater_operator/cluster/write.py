"""Bring objects to what they should be; write nothing that is already so."""

import logging
from collections.abc import Mapping
from typing import Final

from tidewater_core.errors import Invalid
from tidewater_core.names import LABEL_MANAGED_BY
from tidewater_operator.cluster.api import (
    BY_NAME,
    CLUSTER_ROLE_BINDING,
    STATEFUL_SET,
    Api,
    ApiRefused,
)
from tidewater_operator.model.compare import (
    RestartReason,
    covers,
    restart_reasons,
    stamped,
    volume_bytes,
)
from tidewater_operator.model.names import ANNOTATION_HASH, MANAGER, WORKER_ACCOUNT, Manifest
from tidewater_operator.observed import Key

NAME_TAKEN: Final = "NameTaken"
BIND_TRIES: Final = 10
"""Passes over other namespaces change the same binding: as many as run at a time, and some more."""
_ADOPTED: Final = frozenset({"Secret", "ServiceAccount"})
"""Kinds that are ours by their names: a person may have made the account first, to bind it to a
cloud's role, and a copy of a Secret may be its own source, in the release's namespace."""
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


async def make(api: Api, manifest: Manifest) -> None:
    """Create an object; one of its name that is there by now is somebody's, and stays as it is."""
    kind, namespace = BY_NAME[manifest["kind"]], manifest["metadata"]["namespace"]
    try:
        await api.create(kind, namespace, manifest)
    except ApiRefused as error:
        if error.code != 409:
            raise


async def settle(api: Api, objects: Mapping[Key, Manifest], manifest: Manifest) -> Manifest | None:
    """Apply a manifest unless it is there as it is; return what was written."""
    return await _settle(api, objects, stamped(manifest))


async def _settle(api: Api, objects: Mapping[Key, Manifest], wanted: Manifest) -> Manifest | None:
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    live = objects.get((kind, name))
    if is_settled(live, wanted):
        return None
    if live is None and kind not in _ADOPTED:
        await _check_name(api, wanted)
    log.info("apply %s %s/%s", kind, wanted["metadata"].get("namespace"), name)
    written = await api.apply(wanted)
    if live is not None and _version(live) == _version(written):
        return None  # somebody (a webhook, say) makes of it what was there before
    return written


async def _check_name(api: Api, wanted: Manifest) -> None:
    """Refuse to write over what somebody else made; we know our own by their labels."""
    kind, meta = wanted["kind"], wanted["metadata"]
    there = await api.get(BY_NAME[kind], meta.get("namespace"), meta["name"])
    if there is None:
        return
    marks = there["metadata"].get("labels") or {}
    notes = there["metadata"].get("annotations") or {}
    if marks.get(LABEL_MANAGED_BY) == MANAGER or ANNOTATION_HASH in notes:
        return  # made meanwhile, or ours without its label
    raise Invalid(
        NAME_TAKEN,
        f"{kind} {meta['name']} is there and is not the operator's (managed by "
        f"{marks.get(LABEL_MANAGED_BY) or 'nobody who says so'}): it stays as it is. Remove it, "
        "or give the pool another name",
    )


def _version(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("resourceVersion", ""))


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
    # Those that are there never shrink, and what others set in them is theirs.
    spec = {**manifest["spec"], "volumeClaimTemplates": live["spec"]["volumeClaimTemplates"]}
    wanted = {**stamped(manifest), "spec": spec}
    written, reasons = await _settle(api, objects, wanted), restart_reasons(live, wanted)
    if volume_bytes(manifest) > volume_bytes(live):
        # Volumes of a StatefulSet are fixed when it is made. So it is made again, around its pods:
        # now that all else was taken. Refused without it, nobody would look after them.
        log.info("replace StatefulSet %s/%s: larger volumes", meta["namespace"], meta["name"])
        await api.delete(STATEFUL_SET, meta["namespace"], meta["name"], meta["uid"], "Orphan")
    return written, reasons


async def bind_reviewers(api: Api, binding: str, namespace: str, *, wanted: bool) -> None:
    """Let the workers of a namespace ask who somebody is, or no longer.

    One object for all namespaces: changed only if it is still as it was read, else read again.
    """
    for left in reversed(range(BIND_TRIES)):
        live = await api.get(CLUSTER_ROLE_BINDING, None, binding)
        if live is None:
            log.warning("there is no ClusterRoleBinding %s: workers cannot check tokens", binding)
            return
        change = _other_subjects(live, namespace, wanted=wanted)
        if change is None:
            return
        try:
            await api.merge(CLUSTER_ROLE_BINDING, None, binding, change)
            return
        except ApiRefused as error:
            if error.code != 409 or not left:
                raise


def _other_subjects(live: Manifest, namespace: str, *, wanted: bool) -> Manifest | None:
    """Return how the workers of a namespace become subjects, or cease to be; None: it is so."""
    subject = {"kind": "ServiceAccount", "name": WORKER_ACCOUNT, "namespace": namespace}
    subjects = live.get("subjects") or []
    others = [one for one in subjects if not covers(one, subject)]
    if wanted == (len(others) < len(subjects)):
        return None
    return {
        "metadata": {"resourceVersion": live["metadata"]["resourceVersion"]},
        "subjects": [*others, subject] if wanted else others,
    }
