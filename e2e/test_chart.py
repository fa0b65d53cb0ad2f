"""The chart: what it renders, what it refuses, and what an upgrade leaves as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.install import CHART, ETCD, SEAWEEDFS, System, helm, install_chart, render
from e2e.kubectl import CommandError, Object
from tidewater_operator.settings import OperatorSettings

pytestmark = pytest.mark.timeout(600)
PRODUCTION: dict[str, Any] = yaml.safe_load((CHART / "examples/production.yaml").read_text())
MONITORED = {"monitoring": {"serviceMonitor": {"enabled": True}}}
FEW_NAMESPACES = {"operator": {"watchNamespaces": ["shop", "bank"]}}
either = pytest.mark.parametrize(
    "changed",
    [{}, PRODUCTION, MONITORED, FEW_NAMESPACES],
    ids=["quick start", "production", "monitored", "few namespaces"],
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


def test_production_runs_nothing_that_holds_data() -> None:
    objects = render(PRODUCTION)
    assert not [each for each in objects if each["kind"] == "StatefulSet"]
    secrets = {each["metadata"]["name"] for each in objects if each["kind"] == "Secret"}
    assert secrets == {"tidewater-metrics"}
    (operator,) = [each for each in objects if each["kind"] == "Deployment"]
    assert operator["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"etcd": {"endpoint": "http://x:2379"}}, "endpoint"),
        ({"etcd": {"enabled": False}}, "endpoints"),
        ({"seaweedfs": {"enabled": False}}, "type"),
        ({"auth": {"mode": "anonymous"}}, "mode"),
        ({"operator": {"replicas": "2"}}, "replicas"),
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


def test_helm_test(system: System) -> None:
    """A topic is made, written, flushed, read and deleted, by a pod of the release."""
    helm(system.kubectl, "test", "tidewater", "--timeout=4m", timeout_s=270)


def test_upgrade_leaves_data_keys_and_rights(system: System) -> None:
    def facts() -> tuple[Object, ...]:
        pods = system.kubectl.get("pods")["items"]
        data = {ETCD.rpartition("/")[2] + "-0", SEAWEEDFS.rpartition("/")[2] + "-0"}
        uids = {
            each["metadata"]["name"]: each["metadata"]["uid"]
            for each in pods
            if each["metadata"]["name"] in data
        }
        keys = system.kubectl.get("secret", "tidewater-catalog-credentials")["data"]
        reviewers = system.kubectl.get("clusterrolebinding", "tidewater-workers")
        return uids, keys, {"subjects": reviewers.get("subjects")}

    before = facts()
    generation = _generation(system)
    changed = {"operator": {"replicas": 2, "podAnnotations": {"changed": "yes"}}}
    assert install_chart(system.kubectl, system.tag, changed) == system
    assert facts() == before
    assert _generation(system) > generation
    install_chart(system.kubectl, system.tag)
    assert facts() == before


def _generation(system: System) -> int:
    return int(system.kubectl.get("deployment", "tidewater-operator")["metadata"]["generation"])
