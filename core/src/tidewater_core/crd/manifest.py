"""Read the same YAML that `kubectl apply -f` takes."""

from typing import Any

import yaml
from pydantic import ValidationError

from tidewater_core.crd.explain import problems
from tidewater_core.crd.pool import Pool
from tidewater_core.crd.subscription import Subscription
from tidewater_core.crd.topic import Topic
from tidewater_core.errors import Invalid
from tidewater_core.names import API_VERSION, dns_label_problem, is_dns_label

MANIFEST_CHARS_MAX = 10_000_000
"""Longest text that is read: YAML is slow, and nobody writes more by hand."""

Item = Topic | Subscription | Pool

_KINDS: dict[str, type[Topic] | type[Subscription] | type[Pool]] = {
    "Topic": Topic,
    "Subscription": Subscription,
    "Pool": Pool,
}


class _Loader(yaml.SafeLoader):
    """Safe YAML as Kubernetes reads it: a time is text, not a date."""


_Loader.yaml_implicit_resolvers = {
    char: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for char, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_manifests(text: str) -> list[Topic | Subscription]:
    """Read the Topics and Subscriptions of a YAML text; its Pools are checked and left out.

    For who runs without a cluster, where there is one worker and nothing to size.
    """
    return [item for item in load_all(text) if not isinstance(item, Pool)]


def load_all(text: str) -> list[Item]:
    """Read a YAML text of one or more documents; raise Invalid that names document and field."""
    if len(text) > MANIFEST_CHARS_MAX:
        raise Invalid("InvalidManifest", f"the manifest is longer than {MANIFEST_CHARS_MAX}")
    try:
        # The loader is a SafeLoader that knows even less.
        documents = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, RecursionError) as error:
        raise Invalid("InvalidManifest", f"this is not YAML: {error}") from error
    loaded = [
        item
        for number, document in enumerate(documents, start=1)
        if document is not None
        for item in _load(document, number)
    ]
    seen: set[tuple[str, str, str]] = set()
    for item in loaded:
        key = (item.kind, item.metadata.namespace, item.metadata.name)
        if key in seen:
            raise Invalid("InvalidManifest", f"{key[0]} {key[1]}/{key[2]} is there twice")
        seen.add(key)
    return loaded


def _load(document: object, number: int) -> list[Item]:
    if not isinstance(document, dict):
        raise Invalid("InvalidManifest", f"document {number} is not a map of fields")
    if document.get("kind") == "List" and isinstance(document.get("items"), list):
        return [item for inner in document["items"] for item in _load(inner, number)]
    return [_load_one(document, number)]


def _load_one(document: dict[Any, Any], number: int) -> Item:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    where = f"document {number} ({document.get('kind')} {name})"
    if document.get("apiVersion") != API_VERSION:
        raise Invalid(
            "InvalidManifest",
            f"{where}: apiVersion must be {API_VERSION}, not {document.get('apiVersion')!r}",
        )
    model = _KINDS.get(str(document.get("kind")))
    if model is None:
        raise Invalid(
            "InvalidManifest",
            f"{where}: kind must be Topic, Subscription or Pool, not {document.get('kind')!r}",
        )
    try:
        item = model.model_validate(_without_nulls(document))
    except ValidationError as error:
        raise Invalid("InvalidManifest", f"{where}: {'; '.join(problems(error, model))}") from error
    for what, text in (("namespace", item.metadata.namespace), ("name", item.metadata.name)):
        if not is_dns_label(text):
            raise Invalid("InvalidManifest", f"{where}: {dns_label_problem(what, text)}")
    return item


def _without_nulls(value: object) -> object:
    """Drop fields without a value: `spec:` alone is a good topic, as for the API server."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value
