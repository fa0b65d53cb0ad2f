"""Whether an object must be written, and what a change means for its workers. Pure.

What we want is compared with what is there field by field; fields that others set are theirs, and
so are items that others put into lists whose items are told apart by a key: applying what we want
would leave them there. That cannot tell that we no longer want a field, so a hash of what was
applied stands beside it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from tidewater_operator.model.names import ANNOTATION_CONFIG, ANNOTATION_HASH, Manifest

_SUFFIXES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip

_MERGED_BY: Final = {
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists that others may add to, and what tells their items apart. Where our items have no such key
(the ports of a NetworkPolicy) the list is ours as a whole."""
_SHARED: Final = frozenset({"ownerReferences", "tolerations"})
"""Lists that others may add to whose items have no key."""


def digest(value: Any) -> str:
    """Return a short hash of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stamped(manifest: Manifest) -> Manifest:
    """Add the hash of what is applied."""
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), ANNOTATION_HASH: digest(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def covers(live: Any, wanted: Any) -> bool:
    """Tell whether everything that is wanted is there."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            _covers_field(key, live.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return (
            isinstance(live, Sequence)
            and not isinstance(live, str)
            and len(live) == len(wanted)
            and all(covers(one, other) for one, other in zip(live, wanted, strict=True))
        )
    if live is None:
        return wanted in (None, "", False, {}, [])
    return bool(live == wanted) or _same_quantity(live, wanted)


def _covers_field(key: str, live: Any, wanted: Any) -> bool:
    """Compare a field; of lists that others may add to it is enough that all of ours is there."""
    if key in _SHARED:
        return all(any(covers(one, other) for one in live or ()) for other in wanted)
    by = _MERGED_BY.get(key, ())
    if not by or any(name not in item for item in wanted for name in by):
        return covers(live, wanted)
    there = {tuple(item.get(name) for name in by): item for item in live or ()}
    return all(covers(there.get(tuple(item[name] for name in by)), item) for item in wanted)


def _same_quantity(one: Any, other: Any) -> bool:
    """Tell whether two texts are one amount: the API server writes 1000m as 1."""
    first, second = quantity(one), quantity(other)
    return first is not None and first == second


def quantity(value: Any) -> float | None:
    """Read an amount as the API server writes it: 1024Ti comes back as 1Pi; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = str(value)
    number = text.rstrip("mkMGTPEiK")
    factor = _SUFFIXES.get(text[len(number) :])
    if factor is None or not number[-1:].isdigit():
        return None
    try:
        return float(number) * factor
    except ValueError:
        return None


def volume_bytes(stateful_set: Manifest) -> float:
    """Return the size of the volumes that a StatefulSet makes; 0 if it makes none."""
    claims = stateful_set["spec"].get("volumeClaimTemplates") or [{}]
    requests = claims[0].get("spec", {}).get("resources", {}).get("requests", {})
    return quantity(requests.get("storage", "0")) or 0.0


class RestartReason(StrEnum):
    """Why workers are started anew, one at a time."""

    IMAGE_CHANGED = "ImageChanged"
    SETTINGS_CHANGED = "SettingsChanged"
    RESOURCES_CHANGED = "ResourcesChanged"
    POD_CHANGED = "PodChanged"


def restart_reasons(live: Manifest, wanted: Manifest) -> list[RestartReason]:
    """Return why applying a StatefulSet restarts its workers; empty if it does not."""
    old, new = (item["spec"]["template"] for item in (live, wanted))
    if covers(old, new):
        return []
    found = []
    after = new["spec"]["containers"][0]
    before = container_of(old, after["name"])
    if before.get("image") != after.get("image"):
        found.append(RestartReason.IMAGE_CHANGED)
    if _config(old) != _config(new):
        found.append(RestartReason.SETTINGS_CHANGED)
    if not covers(before.get("resources"), after.get("resources", {})):
        found.append(RestartReason.RESOURCES_CHANGED)
    return found or [RestartReason.POD_CHANGED]


def container_of(template: Manifest, name: str) -> Manifest:
    """Return a container of a pod's template by its name; others may have put theirs beside it."""
    found: Sequence[Manifest] = template.get("spec", {}).get("containers") or ()
    return next((one for one in found if one.get("name") == name), {})


def _config(template: Manifest) -> str:
    annotations = template["metadata"].get("annotations") or {}
    return str(annotations.get(ANNOTATION_CONFIG, ""))
