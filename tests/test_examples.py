"""Every manifest of docs/examples is valid, says what it is, and fits the others.

`e2e/test_examples.py` applies them to a cluster.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidewater_core.crd.manifest import Item, load_all
from tidewater_core.crd.pool import Pool
from tidewater_core.crd.subscription import Subscription
from tidewater_core.crd.topic import Topic
from tidewater_core.names import API_VERSION

EXAMPLES = Path(__file__).resolve().parents[1] / "docs/examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


@cache
def ours() -> tuple[Item, ...]:
    """Return all Topics, Subscriptions and Pools, which must have one place each."""
    texts = [
        yaml.safe_dump(document)
        for path in FILES
        for document in documents(path)
        if document["apiVersion"] == API_VERSION
    ]
    return tuple(load_all("\n---\n".join(texts)))


@each_file
def test_is_valid(path: Path) -> None:
    """Ours by the models; of Kubernetes' own kinds nothing that grants too much."""
    for document in documents(path):
        if document["apiVersion"] == API_VERSION:
            assert load_all(yaml.safe_dump(document))
        else:
            assert document["kind"] in {"ServiceAccount", "Role", "RoleBinding"}
            for rule in document.get("rules", ()):
                assert rule["apiGroups"] == ["tidewater.dev"]
                assert "*" not in rule["verbs"] + rule["resources"]


@each_file
def test_says_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_every_kind_is_shown() -> None:
    assert {type(item) for item in ours()} == {Topic, Subscription, Pool}


def test_they_fit_together() -> None:
    """Applied in any order, all of them become ready."""
    topics = {(t.metadata.namespace, t.metadata.name) for t in ours() if isinstance(t, Topic)}
    pools = {(p.metadata.namespace, p.metadata.name) for p in ours() if isinstance(p, Pool)}
    for item in ours():
        namespace = item.metadata.namespace
        if isinstance(item, Subscription):
            assert (namespace, item.spec.topic) in topics
            if item.spec.dead_letter is not None:
                assert (namespace, item.spec.dead_letter.topic) in topics
        elif isinstance(item, Topic) and item.spec.pool != "default":
            assert (namespace, item.spec.pool) in pools
