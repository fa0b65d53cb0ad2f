"""The generated CRDs: structural, complete, current, and agreeing with the models."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tidewater_core.crd.base import time_between
from tidewater_core.crd.generate import render, structural_schema
from tidewater_core.crd.pool import Pool
from tidewater_core.crd.subscription import Subscription
from tidewater_core.crd.topic import Topic, TopicSpec
from tidewater_core.units import Duration

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


def test_no_pool_may_have_the_name_of_anothers_service() -> None:
    pool, topic = (structural_schema(kind) for kind in (Pool, Topic))
    by_name = {one["rule"] for one in pool["x-kubernetes-validations"]}
    assert "!self.metadata.name.endsWith('-workers')" in by_name
    named = topic["properties"]["spec"]["properties"]["pool"]["x-kubernetes-validations"]
    assert [one["rule"] for one in named] == ["!self.endsWith('-workers')"]
    # What was registered before there was this rule is still read.
    assert TopicSpec.from_json('{"pool":"old-workers"}').pool == "old-workers"


def test_the_rules_that_guard_history_are_there() -> None:
    text = "".join(render().values())
    for promise in (
        "partitions may grow, never shrink",
        "column names that begin with tw_ are reserved",
        "files stay below the table''s location: write.data.path, write.metadata.path,",
        "!k.endsWith('location-provider.impl')",
        "the table''s name cannot change",
        "a subscription stays with its topic",
        "only applies again with a new resetToken",
    ):
        assert promise in text


class Span(int):
    """A CEL duration, as far as our rules use one; in milliseconds."""

    def __add__(self, other: int) -> "Span":
        return Span(int(self) + other)

    def __sub__(self, other: int) -> "Span":
        return Span(int(self) - other)

    def getMinutes(self) -> "Whole":
        return Whole(self // 60_000)


class Whole(int):
    """A CEL int: dividing it leaves one."""

    def __truediv__(self, other: int) -> "Whole":
        return Whole(self // other)


def duration(text: str) -> Span:
    """Read a text as CEL does, which knows no days."""
    assert "d" not in text, f"duration({text!r}) is an error"
    return Span(Duration(text))


def moment(seconds: int) -> Span:
    """Return a moment: all that matters of two of them is their difference."""
    return Span(seconds * 1_000)


def holds(rule: str, **names: Any) -> bool:
    """Evaluate a rule about durations: CEL that becomes Python by few words."""
    python = re.sub(r"\[(.*)\]\.all\(t, (.*)\)", r"all(\2 for t in [\1])", rule)
    return bool(
        eval(python.replace("&&", "and"), {**names, "duration": duration, "timestamp": moment})
    )


parts = st.tuples(st.integers(0, 4_000), st.sampled_from(["ms", "s", "m", "h", "d"]))
texts = st.lists(parts, min_size=1, max_size=4).map(
    lambda found: "".join(f"{number}{unit}" for number, unit in found)
)


@given(texts)
def test_bounds_hold_for_days_too(text: str) -> None:
    rule = time_between("90s", "30d").rule
    assert holds(rule, self=text) == (90_000 <= Duration(text) <= 30 * 86_400_000), text


def test_every_duration_is_bounded_whatever_its_unit() -> None:
    rules = [
        (path, rule["rule"])
        for model in (Topic, Subscription)
        for path, node in walk(structural_schema(model))
        for rule in node.get("x-kubernetes-validations", ())
        if "duration(" in rule["rule"] and node["type"] == "string"
    ]
    assert len(rules) >= 10
    for path, rule in rules:
        assert not holds(rule, self="99999d"), f"{path}: {rule}"


@given(texts, texts)
def test_freshness_is_compared_in_any_unit(freshness: str, interval: str) -> None:
    spec = SimpleNamespace(freshness=freshness, writer=SimpleNamespace(flushInterval=interval))
    found = structural_schema(Topic)["properties"]["spec"]["x-kubernetes-validations"]
    (rule,) = [one["rule"] for one in found if "freshness" in one["message"]]
    assert holds(rule, self=spec) == (Duration(freshness) >= Duration(interval))
