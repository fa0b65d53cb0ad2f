"""The generated CRDs: structural, complete, current, and agreeing with the models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidewater_core.crd.generate import render, structural_schema
from tidewater_core.crd.subscription import Subscription
from tidewater_core.crd.topic import Topic, TopicSpec

ROOT = Path(__file__).resolve().parents[3]
Schema = dict[str, Any]

FORBIDDEN = {"$ref", "$defs", "title", "anyOf", "oneOf", "allOf", "const", "examples"}


def walk(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}" if path else name)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from walk(node[key], f"{path}[]")


def nodes() -> list[Any]:
    return [
        pytest.param(node, id=f"{model.__name__}:{path}")
        for model in (Topic, Subscription)
        for path, node in walk(structural_schema(model))
        if path not in ("apiVersion", "kind", "metadata")
    ]


@pytest.mark.parametrize(("name", "text"), render().items())
def test_files_are_current(name: str, text: str) -> None:
    path = ROOT / "crds" / name
    assert path.is_file() and path.read_text() == text, f"crds/{name}: run `make crds`"  # noqa: PT018


@pytest.mark.parametrize("node", nodes())
def test_every_part_is_structural(node: Schema) -> None:
    assert "type" in node
    assert not FORBIDDEN & node.keys()
    assert node.get("additionalProperties") is not False
    assert not ("properties" in node and "additionalProperties" in node)


@pytest.mark.parametrize("model", [Topic, Subscription])
def test_every_field_is_explained(model: type[Topic] | type[Subscription]) -> None:
    silent = [
        path
        for path, node in walk(structural_schema(model))
        if "description" not in node
        and not path.endswith("[]")
        and path not in ("apiVersion", "kind", "metadata")
    ]
    assert silent == []


@pytest.mark.parametrize("node", nodes())
def test_rules_have_bounded_input(node: Schema) -> None:
    """The API server refuses rules whose cost it cannot bound."""
    if "x-kubernetes-validations" in node:
        if node["type"] == "string":
            assert "maxLength" in node
        if node["type"] == "array":
            assert "maxItems" in node
        for rule in node["x-kubernetes-validations"]:
            assert rule["rule"]
            assert rule["message"]


def test_defaults_of_the_schema_are_those_of_the_model() -> None:
    spec = structural_schema(Topic)["properties"]["spec"]
    assert spec["default"] == json.loads(TopicSpec().to_json())
    start = structural_schema(Subscription)["properties"]["spec"]["properties"]["startFrom"]
    assert start["default"] == {"position": "earliest"}


def test_names_and_columns() -> None:
    crds = {name: yaml.safe_load(text) for name, text in render().items()}
    assert set(crds) == {
        f"{plural}.tidewater.dev.yaml" for plural in ("topics", "subscriptions", "pools")
    }
    for crd, short in zip(crds.values(), ("twt", "tws", "twp"), strict=True):
        names = crd["spec"]["names"]
        (version,) = crd["spec"]["versions"]
        assert names["shortNames"] == [short]
        assert names["categories"] == ["tidewater"]
        assert crd["metadata"]["name"] == f"{names['plural']}.tidewater.dev"
        assert version["subresources"]["status"] == {}
        assert ("scale" in version["subresources"]) == (short == "twp")
        columns = {column["name"] for column in version["additionalPrinterColumns"]}
        assert {"Ready", "Age"} <= columns


def test_the_rules_that_guard_history_are_there() -> None:
    text = "".join(render().values())
    for promise in (
        "partitions may grow, never shrink",
        "column names that begin with tw_ are reserved",
        "the table''s name cannot change",
        "a subscription stays with its topic",
        "only applies again with a new resetToken",
    ):
        assert promise in text
