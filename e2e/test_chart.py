"""The chart: what it renders, what it refuses, and what an upgrade leaves as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.install import CHART, ETCD, SEAWEEDFS, System, helm, install_chart, render
from e2e.kubectl import CommandError, Kubectl, Object, wait_for
from e2e.tenant import pool
from tidewater_operator.model.credentials import sources
from tidewater_operator.settings import OperatorSettings

pytestmark = pytest.mark.timeout(600)
PRODUCTION: dict[str, Any] = yaml.safe_load((CHART / "examples/production.yaml").read_text())
EVERYWHERE = {"monitoring": {"serviceMonitor": {"enabled": True, "namespaces": ["*"]}}}
MONITORED = {"monitoring": {"serviceMonitor": {"enabled": True, "namespaces": ["shop", "bank"]}}}
FEW_NAMESPACES = {"operator": {"watchNamespaces": ["shop", "bank"]}}
either = pytest.mark.parametrize(
    "changed",
    [{}, PRODUCTION, MONITORED, EVERYWHERE, FEW_NAMESPACES],
    ids=["quick start", "production", "monitored", "monitored everywhere", "few namespaces"],
)


def _pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for each in objects:
        if each["kind"] == "Pod":
            yield each["metadata"]["name"], each["spec"]
        elif "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


@either
def test_pods_have_no_privileges_and_known_needs(changed: dict[str, Any]) -> None:
    pods = dict(_pods(render(changed)))
    assert "tidewater-operator" in pods
    for name, pod in pods.items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"], name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert container["resources"]["limits"]["memory"], name


@either
def test_rights_are_named_one_by_one(changed: dict[str, Any]) -> None:
    roles = [each for each in render(changed) if each["kind"] in {"ClusterRole", "Role"}]
    assert len(roles) >= 10
    for role in roles:
        for rule in role["rules"]:
            words = [word for part in rule.values() for word in part]
            assert not any("*" in word for word in words), role["metadata"]["name"]
            if "secrets" in rule.get("resources", ()):
                assert rule["resourceNames"], role["metadata"]["name"]


@either
def test_settings_are_what_the_operator_reads(changed: dict[str, Any]) -> None:
    maps = {e["metadata"]["name"]: e for e in render(changed) if e["kind"] == "ConfigMap"}
    settings = OperatorSettings.from_yaml(maps["tidewater-operator"]["data"]["settings.yaml"])
    assert settings.auth.mode == "kubernetes"
    assert settings.catalog.properties["type"] == "rest"


def test_the_operator_may_read_the_ca_of_its_workers() -> None:
    """Without it no worker's certificate is trusted, and none is asked how it is."""
    (role,) = [
        each
        for each in render(PRODUCTION)
        if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", "tidewater-operator")
    ]
    secret = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    assert {**secret, "resourceNames": [PRODUCTION["tls"]["secretName"]]} in role["rules"]


@either
def test_workers_are_shown_a_token_for_them_alone(changed: dict[str, Any]) -> None:
    """The API server takes it for nobody, and it is where the operator looks for it."""
    objects = render(changed)
    (operator,) = [each for each in objects if each["kind"] == "Deployment"]
    pod = operator["spec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "worker-token"]
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "tidewater"
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    maps = {e["metadata"]["name"]: e for e in objects if e["kind"] == "ConfigMap"}
    settings = OperatorSettings.from_yaml(maps["tidewater-operator"]["data"]["settings.yaml"])
    assert settings.auth.worker_token_path == f"{mounts['worker-token']}/token"
    (role,) = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", "tidewater-operator")
    ]
    ours = {"topics", "subscriptions"}
    verbs = [rule["verbs"] for rule in role["rules"] if ours & set(rule["resources"])]
    assert sorted(verb for some in verbs for verb in some) == ["get", "list", "report", "watch"]


@pytest.mark.parametrize(
    "changed",
    [
        MONITORED,
        {**FEW_NAMESPACES, "monitoring": {"serviceMonitor": {"enabled": True}}},
        {**FEW_NAMESPACES, "monitoring": {"serviceMonitor": {"enabled": True, "namespaces": []}}},
    ],
)
def test_a_token_for_metrics_is_one_namespaces(changed: dict[str, Any]) -> None:
    """Any pod that is labelled as a worker is shown it: it opens nothing elsewhere."""
    objects = render(changed)
    roles = {e["metadata"]["name"]: e["rules"] for e in objects if e["kind"] == "ClusterRole"}
    rule = {"apiGroups": ["tidewater.dev"], "resources": ["topics"], "verbs": ["report"]}
    assert roles["tidewater-reporter"] == [rule]
    shown = {}
    for each in objects:
        if each["kind"] == "PodMonitor":
            (namespace,) = each["spec"]["namespaceSelector"]["matchNames"]
            (endpoint,) = each["spec"]["podMetricsEndpoints"]
            shown[namespace] = endpoint["authorization"]["credentials"]["name"]
    assert shown == {name: f"tidewater-metrics-{name}" for name in ("shop", "bank")}
    bound = [e for e in objects if any("metrics" in s["name"] for s in e.get("subjects", ()))]
    assert {
        (e["kind"], e["metadata"]["namespace"], e["roleRef"]["name"], e["subjects"][0]["name"])
        for e in bound
    } == {
        ("RoleBinding", namespace, "tidewater-reporter", account)
        for namespace, account in shown.items()
    }
    accounts = {
        e["metadata"]["annotations"]["kubernetes.io/service-account.name"]: e["metadata"]["name"]
        for e in objects
        if e.get("type") == "kubernetes.io/service-account-token"
    }
    assert accounts == {name: name for name in shown.values()}


def test_one_token_for_all_metrics_is_asked_for() -> None:
    with pytest.raises(CommandError, match=r"name monitoring\.serviceMonitor\.namespaces"):
        render({"monitoring": {"serviceMonitor": {"enabled": True}}})
    (monitor,) = [e for e in render(EVERYWHERE) if e["kind"] == "PodMonitor"]
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    nobody = {"auth": {"mode": "none"}, "monitoring": {"serviceMonitor": {"enabled": True}}}
    (monitor,) = [e for e in render(nobody) if e["kind"] == "PodMonitor"]
    assert "authorization" not in monitor["spec"]["podMetricsEndpoints"][0]
    assert not [e for e in render(nobody) if e.get("type", "").endswith("account-token")]


def test_credentials_of_namespaces_are_read_by_their_names() -> None:
    """The operator may read those Secrets that it is told of, and no other of its namespace."""
    shared = PRODUCTION["catalog"]["secretName"], PRODUCTION["etcd"]["secretName"]
    tenants = {"separateCatalog": ["shop", "bank"], "separateEtcd": ["bank"]}
    objects = render({**PRODUCTION, "tenants": tenants})
    (rule,) = [
        rule
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("Role", "tidewater-operator-own")
        for rule in each["rules"]
        if rule["resources"] == ["secrets"]
    ]
    separate = {f"{shared[0]}.shop", f"{shared[0]}.bank", f"{shared[1]}.bank"}
    assert set(rule["resourceNames"]) == {*shared, *separate}
    assert rule["verbs"] == ["get"]
    maps = {e["metadata"]["name"]: e for e in objects if e["kind"] == "ConfigMap"}
    settings = OperatorSettings.from_yaml(maps["tidewater-operator"]["data"]["settings.yaml"])
    told = {source for name in ("shop", "bank") for source in sources(settings, name, "x").values()}
    assert told == {*separate, shared[1]}


def test_production_runs_nothing_that_holds_data() -> None:
    objects = render(PRODUCTION)
    assert not [each for each in objects if each["kind"] == "StatefulSet"]
    secrets = {each["metadata"]["name"] for each in objects if each["kind"] == "Secret"}
    assert secrets == {"tidewater-metrics-shop", "tidewater-metrics-bank"}
    (operator,) = [each for each in objects if each["kind"] == "Deployment"]
    assert operator["spec"]["replicas"] == 2


def _catalog(properties: dict[str, str]) -> dict[str, Any]:
    return {
        "seaweedfs": {"enabled": False},
        "catalog": {"properties": {"type": "rest", **properties}},
    }


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"etcd": {"endpoint": "http://x:2379"}}, "endpoint"),
        ({"etcd": {"enabled": False}}, "endpoints"),
        ({"seaweedfs": {"enabled": False}}, "type"),
        ({"auth": {"mode": "anonymous"}}, "mode"),
        ({"operator": {"replicas": "2"}}, "replicas"),
        ({"tenants": {"separateEtcd": ["shop"]}}, "separateEtcd needs"),
        ({"tenants": {"separateCatalog": ["Shop"]}}, "separateCatalog"),
        (_catalog({"s3.secret-access-key": "abc"}), "put it in the Secret"),
        (_catalog({"uri": "postgresql://u:abc@db/iceberg"}), "put it in the Secret"),
    ],
)
def test_wrong_values_are_refused(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint):
        render(changed)


@pytest.mark.parametrize(("asked", "policy"), [(False, "Retain"), (True, "Delete")])
def test_data_stays_unless_asked(policy: str, *, asked: bool) -> None:
    objects = render({"uninstall": {"deleteData": asked}, "crds": {"keep": not asked}})
    for each in objects:
        kept = each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
        if each["kind"] == "StatefulSet":
            policies = each["spec"]["persistentVolumeClaimRetentionPolicy"]
            assert policies["whenDeleted"] == policy
        if each["kind"] == "CustomResourceDefinition":
            assert kept is not asked
        if each["metadata"]["name"] == "tidewater-catalog-credentials":
            assert kept is not asked


@pytest.fixture(scope="module")
def pools_go(system: System) -> Iterator[None]:
    """Take the pool of `helm test` away: it would stay for ten minutes after its topic.

    Not before the module ends: with its last pool a namespace loses its right.
    """
    yield
    system.kubectl("delete", "pools", "--all", "--wait=false")


@pytest.mark.usefixtures("pools_go")
def test_helm_test(system: System) -> None:
    """A topic is made, written, flushed, read and deleted, by a pod of the release."""
    helm(system.kubectl, "test", "tidewater", "--timeout=4m", timeout_s=270)


def test_upgrade_leaves_data_keys_and_rights(namespace: Kubectl, system: System) -> None:
    """Rights: of each namespace that was there all the time; others are on their way out."""
    living: list[set[str]] = []

    def facts() -> tuple[Object, Object, set[str]]:
        pods = system.kubectl.get("pods")["items"]
        data = {ETCD.rpartition("/")[2] + "-0", SEAWEEDFS.rpartition("/")[2] + "-0"}
        uids = {
            each["metadata"]["name"]: each["metadata"]["uid"]
            for each in pods
            if each["metadata"]["name"] in data
        }
        keys = system.kubectl.get("secret", "tidewater-catalog-credentials")["data"]
        may_ask = _may_ask(system)
        living.append(_living(system))
        return uids, keys, may_ask

    def rights(found: set[str]) -> set[str]:
        return {name for name in found if all(name in then for then in living)}

    namespace.apply([pool(1)])
    wait_for(lambda: namespace.namespace in _may_ask(system), 90, "a namespace with the right")
    before = facts()
    generation = _generation(system)
    changed = {"operator": {"replicas": 2, "podAnnotations": {"changed": "yes"}}}
    assert install_chart(system.kubectl, system.tag, changed) == system
    upgraded = facts()
    assert _generation(system) > generation
    install_chart(system.kubectl, system.tag)
    back = facts()
    for after in (upgraded, back):
        assert after[:2] == before[:2]
        assert rights(after[2]) == rights(before[2])
    assert namespace.namespace in rights(before[2])


def _living(system: System) -> set[str]:
    """Return the namespaces that are not on their way out."""
    found = system.kubectl.get("namespaces")["items"]
    return {e["metadata"]["name"] for e in found if "deletionTimestamp" not in e["metadata"]}


def _may_ask(system: System) -> set[str]:
    """Return the namespaces whose workers may ask who somebody is."""
    reviewers = system.kubectl.get("clusterrolebinding", "tidewater-workers")
    return {each["namespace"] for each in reviewers.get("subjects") or ()}


def _generation(system: System) -> int:
    return int(system.kubectl.get("deployment", "tidewater-operator")["metadata"]["generation"])
