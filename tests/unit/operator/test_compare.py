"""What others put into our objects is theirs, and an apply that changes nothing is none."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tidewater_core.crd.pool import Pool
from tidewater_operator.cluster.write import settle_set
from tidewater_operator.model.compare import RestartReason, covers, restart_reasons, stamped
from tidewater_operator.model.workers import around, stateful_set
from tidewater_testing.api_server import ApiServer
from tidewater_testing.namespace import SETTINGS

Manifest = dict[str, Any]


def pool(**spec: Any) -> Pool:
    meta = {"name": "default", "namespace": "shop", "uid": "u"}
    return Pool.model_validate({"metadata": meta, "spec": spec})


def workers(**spec: Any) -> Manifest:
    tolerations = [{"key": "ours", "operator": "Exists"}]
    made = pool(tolerations=tolerations, **spec)
    return stateful_set(made, SETTINGS, replicas=1, config_hash="h")


def pod(manifest: Manifest) -> Manifest:
    found: Manifest = manifest["spec"]["template"]["spec"]
    return found


def add_sidecar(live: Manifest) -> None:
    pod(live)["containers"].insert(0, {"name": "proxy", "image": "proxy:1"})
    pod(live)["initContainers"] = [{"name": "proxy-init", "image": "proxy:1"}]
    pod(live)["volumes"].insert(0, {"name": "proxy", "emptyDir": {}})


def add_toleration(live: Manifest) -> None:
    pod(live)["tolerations"].insert(0, {"key": "theirs", "operator": "Exists"})


def add_to_our_container(live: Manifest) -> None:
    (ours,) = [one for one in pod(live)["containers"] if one["name"] == "worker"]
    ours["env"].insert(0, {"name": "ZONE", "value": "a"})
    ours["volumeMounts"].insert(0, {"name": "proxy", "mountPath": "/proxy"})
    ours["ports"].insert(0, {"name": "debug", "containerPort": 9})


ADDED = [add_sidecar, add_toleration, add_to_our_container]


@pytest.mark.parametrize("add", ADDED)
def test_what_others_added_is_no_drift(add: Callable[[Manifest], None]) -> None:
    wanted = workers()
    live = json.loads(json.dumps(wanted))
    add(live)
    assert covers(live, wanted)
    assert restart_reasons(live, wanted) == []
    # Ours is still found among it.
    assert restart_reasons(live, workers(image="tidewater-worker:2")) == [
        RestartReason.IMAGE_CHANGED
    ]
    (ours,) = [one for one in pod(live)["containers"] if one["name"] == "worker"]
    ours["args"].append("--more")
    assert not covers(live, wanted)


def test_what_opens_a_door_is_drift() -> None:
    (wanted,) = [m for m in around(pool(), SETTINGS, "{}") if m["kind"] == "NetworkPolicy"]
    live = json.loads(json.dumps(wanted))
    live["spec"]["ingress"][0]["ports"].append({"port": 22, "protocol": "TCP"})
    assert not covers(live, wanted)
    live = json.loads(json.dumps(wanted))
    live["spec"]["ingress"].append({})
    assert not covers(live, wanted)


class Webhook(ApiServer):
    """Undoes one of our fields with every write, as admission may."""

    def _store(self, path: str, wanted: Manifest) -> Manifest:
        if wanted["kind"] == "StatefulSet":
            pod(wanted)["terminationGracePeriodSeconds"] = 7
        return super()._store(path, wanted)


async def test_an_apply_that_changed_nothing_was_none() -> None:
    api = Webhook()
    path = api.put(stamped(workers()))
    objects = {("StatefulSet", "tidewater-default"): api.objects[path]}
    assert (await settle_set(api, objects, workers()))[0] is None
    written, reasons = await settle_set(api, objects, workers(image="tidewater-worker:2"))
    assert written is not None
    assert reasons == [RestartReason.IMAGE_CHANGED]
