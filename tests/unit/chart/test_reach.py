"""Who reaches what: the labels of all our pods against the selectors of the chart's policies."""

import re
from pathlib import Path

import pytest

from tidewater_core.crd.pool import Pool
from tidewater_core.crd.topic import TopicSpec
from tidewater_operator.maintenance.decide import Trigger
from tidewater_operator.maintenance.job import job
from tidewater_operator.model.workers import around, stateful_set
from tidewater_pipeline.executors import ExecutorOptions, executor_conf
from tidewater_testing.namespace import SETTINGS, manifest

TEMPLATES = Path(__file__).resolve().parents[3] / "charts/tidewater/templates"
POLICIES = (TEMPLATES / "networkpolicy.yaml").read_text()
PART_OF, COMPONENT = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
LABEL = "spark.kubernetes.executor.label."
POOL = Pool.model_validate({"metadata": {"name": "p", "namespace": "shop", "uid": "u"}})


def workers() -> dict[str, str]:
    made = stateful_set(POOL, SETTINGS, replicas=1, config_hash="h")
    return dict(made["spec"]["template"]["metadata"]["labels"])


def driver() -> dict[str, str]:
    topic = manifest("Topic", "orders", "u", {})
    made = job(topic, TopicSpec(), "p", Trigger.MANUAL, SETTINGS, work_bytes=1)
    return dict(made["spec"]["template"]["metadata"]["labels"])


def executors() -> dict[str, str]:
    told = dict.fromkeys(("POD_NAME", "POD_NAMESPACE", "POD_IP", "PIPELINE_IMAGE"), "x")
    conf = executor_conf(ExecutorOptions(count=2), told, "/t")
    return {key.removeprefix(LABEL): value for key, value in conf.items() if key.startswith(LABEL)}


def of_the_chart(template: str) -> dict[str, str]:
    """Return what decides of the labels of a pod that the chart makes."""
    text = (TEMPLATES / template).read_text()
    helpers = (TEMPLATES / "_helpers.tpl").read_text()
    by_helper = re.search(r'"tidewater.podLabels" \(list \. "(\w+)"\)', text)
    if by_helper is not None:
        part = helpers.partition('define "tidewater.podLabels"')[2].partition("end")[0]
        assert f"{PART_OF}: tidewater" in part
        return {PART_OF: "tidewater", COMPONENT: by_helper[1]}
    pod = text.partition("kind: Pod\n")[2].partition("spec:")[0]
    assert 'include "tidewater.labels"' in pod
    assert f"{PART_OF}: tidewater" in helpers.partition('define "tidewater.labels"')[2]
    found = re.search(rf"{COMPONENT}: (\w+)", pod)
    assert found is not None
    return {PART_OF: "tidewater", COMPONENT: found[1]}


PODS = {
    "operator": of_the_chart("operator.yaml"),
    "workers": workers(),
    "driver": driver(),
    "executors": executors(),
    "helm test": of_the_chart("tests/roundtrip.yaml"),
    "etcd": of_the_chart("etcd.yaml"),
    "seaweedfs": of_the_chart("seaweedfs.yaml"),
}


@pytest.mark.parametrize(
    ("server", "clients"),
    [
        ("etcd", {"operator", "workers", "driver"}),
        ("seaweedfs", {"workers", "driver", "executors"}),
    ],
)
def test_who_needs_a_server_reaches_it_and_nobody_else(server: str, clients: set[str]) -> None:
    rule = re.search(rf'"{server}" \(dict "ports" \(list [\d ]+\) "from" \(list (.+?)\)', POLICIES)
    assert rule is not None
    components = set(re.findall(r'"([\w-]+)"', rule[1]))
    assert f"matchLabels: {{{PART_OF}: tidewater}}" in POLICIES
    assert f"{{key: {COMPONENT}, operator: In, values: {{{{ toJson $door.from }}}}}}" in POLICIES
    let_in = {
        name
        for name, labels in PODS.items()
        if labels.get(PART_OF) == "tidewater" and labels.get(COMPONENT) in components
    }
    assert let_in == clients


def test_a_pools_policy_picks_its_workers() -> None:
    (policy,) = [one for one in around(POOL, SETTINGS, "{}") if one["kind"] == "NetworkPolicy"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= workers().items()
    doors = {one["port"] for one in policy["spec"]["ingress"][0]["ports"]}
    assert doors == {"http", "flight"}
