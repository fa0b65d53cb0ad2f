"""The manifests of a pool: what workers are told, what they may, and when they are written."""

import json
from typing import Any

import pytest

from tidewater_core.crd.pool import Pool
from tidewater_core.names import dedicated_pool
from tidewater_core.security import AUDIENCE
from tidewater_core.settings import WorkerSettings
from tidewater_operator.cluster.write import is_settled
from tidewater_operator.model.compare import RestartReason, covers, restart_reasons, stamped
from tidewater_operator.model.images import image_problem
from tidewater_operator.model.names import claim_name, ordinal_of, worker_of_claim
from tidewater_operator.model.settings_file import worker_settings
from tidewater_operator.model.workers import around, of_namespace, stateful_set
from tidewater_operator.settings import OperatorSettings
from tidewater_testing.namespace import SETTINGS, manifest


def pool(**spec: Any) -> Pool:
    meta = {"name": "fast", "namespace": "shop", "uid": "u1"}
    return Pool.model_validate(
        {"apiVersion": "tidewater.dev/v1alpha1", "kind": "Pool", "metadata": meta, "spec": spec}
    )


def with_settings(**more: Any) -> OperatorSettings:
    given = SETTINGS.model_dump(by_alias=True, mode="json", exclude_none=True)
    return OperatorSettings.model_validate({**given, **more})


SECURE = with_settings(
    auth={"mode": "kubernetes"}, tls={"secretName": "tidewater-tls"}, catalogSecret="keys"
)
ETCD = frozenset({"username", "password", "ca.crt", "tls.crt", "tls.key"})


def read(text: str) -> WorkerSettings:
    for name in ("POD_NAME", "ETCD_USERNAME", "ETCD_PASSWORD"):
        text = text.replace(f"${{{name}}}", "tidewater-fast-0")
    return WorkerSettings.from_json(text)


@pytest.mark.parametrize("settings", [SETTINGS, SECURE])
@pytest.mark.parametrize("etcd_keys", [frozenset(), ETCD])
def test_workers_can_read_their_settings(
    settings: OperatorSettings, etcd_keys: frozenset[str]
) -> None:
    found = read(worker_settings(pool(limits={"requestBytesMax": "16Mi"}), settings, etcd_keys))
    assert found.worker_id == "tidewater-fast-0"
    assert found.coordination_prefix == "tidewater/shop"
    assert found.assigned_only
    assert found.limits.request_bytes_max == 16 << 20
    scheme = "https" if settings is SECURE else "http"
    host = "tidewater-fast-0.tidewater-fast-workers.shop.svc"
    assert found.advertise_url == f"{scheme}://{host}:8080"


def test_no_secret_stands_in_the_settings() -> None:
    text = worker_settings(pool(), SECURE, ETCD)
    assert json.loads(text)["coordination_password"] == "${ETCD_PASSWORD}"


@pytest.mark.parametrize("settings", [SETTINGS, SECURE])
def test_pods_are_restricted(settings: OperatorSettings) -> None:
    made = stateful_set(pool(), settings, replicas=2, config_hash="h", etcd_keys=ETCD)
    spec = made["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"] == {"drop": ["ALL"]}
    # Only who asks the API server gets a token for it.
    assert spec["automountServiceAccountToken"] == (settings is SECURE)


def test_workers_show_each_other_a_token_for_workers_alone() -> None:
    made = stateful_set(pool(), SECURE, replicas=1, config_hash="h")
    spec = made["spec"]["template"]["spec"]
    (volume,) = [v for v in spec["volumes"] if v["name"] == "peer-token"]
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == AUDIENCE
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    auth = read(worker_settings(pool(), SECURE)).auth
    assert str(auth.peer_token_path) == f"{mounts['peer-token']}/token"
    assert auth.token_path != auth.peer_token_path
    assert auth.audiences == (), "ordinary tokens are good for workers, too"


@pytest.mark.parametrize(
    ("allowed", "image", "taken"),
    [
        ([], None, True),
        ([], "tidewater-worker:1", True),
        ([], "tidewater-worker:2", True),
        ([], "tidewater-worker@sha256:00", True),
        ([], "tidewater-worker-evil:1", False),
        ([], "evil.example.com/tidewater-worker:1", False),
        ([], "evil/tidewater-worker", False),
        (["mine"], "mine:1", True),
        (["mine"], "tidewater-worker:2", False),
        (["mine"], "tidewater-worker:1", True),
        (["host:5000/team/"], "host:5000/team/any:1@sha256:00", True),
        (["host:5000/team"], "host:5000/team/any:1", False),
        (["host:5000/team"], "host:5000/team:1", True),
        (["host:5000/team/worker:1"], "host:5000/team/worker:2", False),
        (["*"], "any:1", True),
    ],
)
def test_which_images_a_pool_may_name(allowed: list[str], image: str | None, taken: bool) -> None:
    settings = with_settings(pools={"allowedImages": allowed})
    spec = pool(**({"image": image} if image else {})).spec
    problem = image_problem(spec, settings)
    assert (problem == "") is taken
    assert taken or (image or "") in problem


def test_a_pool_may_run_what_it_was_made_with() -> None:
    settings = with_settings(poolDefaults={"image": "host:5000/mine:2"})
    assert image_problem(pool(image="host:5000/mine:1").spec, settings) == ""
    assert image_problem(pool(image="tidewater-worker:9").spec, settings) == ""
    assert image_problem(pool(image="host:5000/other:1").spec, settings)


def test_every_mount_has_a_volume() -> None:
    made = stateful_set(pool(), SECURE, replicas=1, config_hash="h", etcd_keys=ETCD)
    spec = made["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]} | {"data"}
    assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == volumes
    sources = next(v for v in spec["volumes"] if v["name"] == "settings")["projected"]["sources"]
    paths = {i["path"] for s in sources if "secret" in s for i in s["secret"]["items"]}
    assert {"tls/tls.crt", "etcd/ca.crt"} <= paths


def test_services_pick_the_pods() -> None:
    made = stateful_set(pool(), SETTINGS, replicas=1, config_hash="h")
    pod_labels = made["spec"]["template"]["metadata"]["labels"]
    picks = [
        manifest["spec"].get("selector") or manifest["spec"].get("podSelector")
        for manifest in [
            *around(pool(), SETTINGS, "{}"),
            *of_namespace("shop", [manifest("Pool", "fast", "u", {})], SETTINGS, {}),
        ]
        if "spec" in manifest
    ]
    assert len(picks) == 5
    for pick in picks:
        assert set(pick.get("matchLabels", pick).items()) <= set(pod_labels.items())
    assert made["spec"]["serviceName"] == "tidewater-fast-workers"


def test_workers_that_are_not_ready_hold_up_no_node() -> None:
    """Of three that crash none could be evicted: a tenant's broken pool stopped every drain."""
    made = around(pool(replicas=3), SETTINGS, "{}")
    (budget,) = [one["spec"] for one in made if one["kind"] == "PodDisruptionBudget"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_without_flight_no_door_for_it() -> None:
    ports = [
        port["name"]
        for manifest in around(pool(flight=False), SETTINGS, "{}")
        for port in manifest.get("spec", {}).get("ports", ())
    ]
    assert ports == ["http", "http"]


def test_defaults_fill_in_what_a_pool_leaves_out() -> None:
    settings = with_settings(poolDefaults={"nodeSelector": {"disk": "fast"}})
    spec = stateful_set(pool(), settings, replicas=1, config_hash="h")["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"disk": "fast"}
    own = pool(nodeSelector={"disk": "own"}, image="mine:1")
    spec = stateful_set(own, settings, replicas=1, config_hash="h")["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"disk": "own"}
    assert spec["containers"][0]["image"] == "mine:1"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tidewater-fast-0", 0),
        ("tidewater-fast-12", 12),
        ("tidewater-fast-01", None),
        ("tidewater-fast-x", None),
        ("tidewater-faster-1", None),
        ("tidewater-fast-1-2", None),
    ],
)
def test_a_workers_number(name: str, found: int | None) -> None:
    assert ordinal_of("fast", name) == found


def test_a_claim_names_its_worker() -> None:
    assert worker_of_claim(claim_name("fast", 3)) == "tidewater-fast-3"


# ---- what is written


def live_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest as the API server would: with defaults and fields of others."""
    live = json.loads(json.dumps(manifest))
    live["metadata"]["resourceVersion"] = "7"
    live["metadata"].setdefault("annotations", {})["others"] = "x"
    live["spec"]["minReadySeconds"] = 0
    return dict(live)


def test_what_is_there_is_not_written_again() -> None:
    wanted = stamped(stateful_set(pool(), SETTINGS, replicas=2, config_hash="h"))
    live = live_of(wanted)
    live["metadata"]["ownerReferences"].append({"kind": "Other", "uid": "o"})
    assert is_settled(live, wanted)
    assert not is_settled(None, wanted)


def test_drift_is_seen() -> None:
    wanted = stamped(stateful_set(pool(), SETTINGS, replicas=2, config_hash="h"))
    live = live_of(wanted)
    live["spec"]["replicas"] = 1
    assert not is_settled(live, wanted)


def test_a_field_that_we_no_longer_want_is_seen() -> None:
    before = stamped(
        stateful_set(pool(nodeSelector={"a": "b"}), SETTINGS, replicas=1, config_hash="h")
    )
    wanted = stamped(stateful_set(pool(), SETTINGS, replicas=1, config_hash="h"))
    assert covers(live_of(before), stateful_set(pool(), SETTINGS, replicas=1, config_hash="h"))
    assert not is_settled(live_of(before), wanted)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1", "1000m", True),
        ("1Gi", "1024Mi", True),
        ("1Gi", "1G", False),
        (1, "1", True),
        ("a", "b", False),
        (None, "", True),
        (None, "x", False),
        ("", None, False),
        (True, 1, True),
    ],
)
def test_amounts_are_compared_as_amounts(one: Any, other: Any, same: bool) -> None:
    assert covers(one, other) == same


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"image": "tidewater-worker:2"}, [RestartReason.IMAGE_CHANGED]),
        ({"resources": {"limits": {"memory": "3Gi"}}}, [RestartReason.RESOURCES_CHANGED]),
        ({"nodeSelector": {"disk": "fast"}}, [RestartReason.POD_CHANGED]),
        ({"replicas": 5}, []),
    ],
)
def test_why_workers_are_started_anew(change: dict[str, Any], reasons: list[RestartReason]) -> None:
    live = stateful_set(pool(), SETTINGS, replicas=1, config_hash="h")
    wanted = stateful_set(pool(**change), SETTINGS, replicas=1, config_hash="h")
    assert restart_reasons(live, wanted) == reasons


def test_changed_settings_start_workers_anew() -> None:
    live = stateful_set(pool(), SETTINGS, replicas=1, config_hash="h1")
    wanted = stateful_set(pool(), SETTINGS, replicas=1, config_hash="h2")
    assert restart_reasons(live, wanted) == [RestartReason.SETTINGS_CHANGED]


def test_dedicated_pools_of_two_topics_share_no_object() -> None:
    """Their Services were one, and each pass of one undid what the other's had done."""

    def names(topic: str) -> set[tuple[str, str]]:
        meta = {"name": dedicated_pool(topic), "namespace": "shop", "uid": "u"}
        made = around(Pool.model_validate({"metadata": meta}), SETTINGS, "{}")
        return {(one["kind"], one["metadata"]["name"]) for one in made}

    assert names("jobs").isdisjoint(names("jobs-workers"))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"intervals": {"status": "0s", "resync": "0s"}}, "status must be at least 1s"),
        ({"intervals": {"status": "500ms"}}, "status must be at least 1s"),
        ({"intervals": {"status": "2m"}}, "must not be longer than resync"),
        ({"maintenance": {"deadline": "0s"}}, "too short for any job"),
    ],
)
def test_times_that_nothing_can_be_done_in_are_refused(part: dict[str, Any], said: str) -> None:
    """`resync: 0s` does not turn it off: everything would be listed without a pause."""
    with pytest.raises(ValueError, match=said):
        with_settings(**part)
