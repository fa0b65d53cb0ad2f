"""Manifests: what kubectl takes is taken, and what is wrong is named."""

import pytest

from tidewater_core.crd.manifest import load_manifests
from tidewater_core.crd.subscription import Subscription
from tidewater_core.crd.topic import SyncMode, Topic
from tidewater_core.errors import Invalid

TOPIC = """
apiVersion: tidewater.dev/v1alpha1
kind: Topic
metadata: {name: orders, namespace: shop}
"""
SUBSCRIPTION = """
apiVersion: tidewater.dev/v1alpha1
kind: Subscription
metadata: {name: billing, namespace: shop}
spec: {topic: orders, startFrom: {timestamp: 2026-01-31T12:00:00Z}}
"""


def test_several_documents() -> None:
    topic, subscription = load_manifests(f"{TOPIC}---{SUBSCRIPTION}---\n# nothing\n")
    assert isinstance(topic, Topic)
    assert isinstance(subscription, Subscription)
    assert subscription.spec.start_from.timestamp == "2026-01-31T12:00:00Z"


def test_a_spec_without_a_value_is_a_default() -> None:
    (topic,) = load_manifests(f"{TOPIC}spec:\n  writer:\n  log: {{sync: None}}")
    assert isinstance(topic, Topic)
    assert topic.spec.log.sync is SyncMode.NONE
    assert topic.spec.writer.batch_rows == 100_000


def test_a_list_is_unpacked() -> None:
    topic = "{apiVersion: tidewater.dev/v1alpha1, kind: Topic, metadata: {name: a}}"
    (loaded,) = load_manifests(f"apiVersion: v1\nkind: List\nitems: [{topic}]")
    assert loaded.metadata.namespace == "default"


def test_nothing_is_an_empty_list() -> None:
    assert load_manifests("") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "this is not YAML"),
        ("- a", "document 1 is not a map"),
        ("kind: Topic", "apiVersion must be tidewater.dev/v1alpha1, not None"),
        (TOPIC.replace("v1alpha1", "v1"), "apiVersion must be tidewater.dev/v1alpha1"),
        (TOPIC.replace("Topic", "Topik"), "kind must be Topic, Subscription or Pool, not 'Topik'"),
        (TOPIC.replace("name: orders, ", ""), "metadata.name: is required"),
        (TOPIC.replace("orders", "or.ders"), "name 'or.ders' must be 1 to 63 characters"),
        (TOPIC.replace("shop", "../x"), "namespace '../x' must be 1 to 63 characters"),
        (f"{TOPIC}spec: {{partitions: 0}}", r"\(Topic orders\): spec.partitions: must be greater"),
        (f"{TOPIC}spec: []", "spec: must be a map of fields"),
        (f"{TOPIC}sepc: {{}}", "sepc: no such field; did you mean spec"),
        (f"{TOPIC}---{TOPIC}", "Topic shop/orders is there twice"),
        (f"{TOPIC}x: !!python/object/apply:os.system [ls]", "this is not YAML"),
        ("[" * 5_000, "this is not YAML"),
    ],
)
def test_mistakes_are_named(text: str, told: str) -> None:
    with pytest.raises(Invalid, match=told):
        load_manifests(text)


def test_the_second_document_is_named() -> None:
    with pytest.raises(Invalid, match=r"document 2 \(Subscription billing\): spec.topic: must be"):
        load_manifests(f"{TOPIC}---{SUBSCRIPTION.replace('topic: orders', 'topic: 3')}")
