"""The chart as far as it can be judged without helm; `e2e/test_chart.py` renders it."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/tidewater"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = sorted((CHART / "templates").rglob("*.yaml"))


def parts(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every part of a schema that has properties of its own."""
    if "properties" in schema:
        yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from parts(child, f"{path}.{name}")


def unknown(values: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of values that the schema does not name."""
    if isinstance(values, dict) and "properties" in schema:
        for name, value in values.items():
            if name not in schema["properties"]:
                yield f"{path}.{name}"
            else:
                yield from unknown(value, schema["properties"][name], f"{path}.{name}")


@pytest.mark.parametrize("path", sorted((ROOT / "crds").glob("*.yaml")), ids=lambda p: p.name)
def test_crds_are_those_of_the_project(path: Path) -> None:
    copy = CHART / "files/crds" / path.name
    assert copy.is_file()
    assert copy.read_text() == path.read_text(), "run `make crds`"


def test_no_other_crds() -> None:
    names = {path.name for path in (CHART / "files/crds").iterdir()}
    assert names == {path.name for path in (ROOT / "crds").iterdir()}


def test_versions_are_those_of_the_components() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    core = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == core["version"]


def test_a_typing_error_is_refused() -> None:
    """Every part with known names refuses others, but for a Pool's spec, which the CRD judges."""
    open_parts = {path for path, part in parts(SCHEMA) if part.get("additionalProperties", True)}
    assert open_parts == {".poolDefaults"}


@pytest.mark.parametrize("name", ["values.yaml", "examples/production.yaml"])
def test_values_are_in_the_schema(name: str) -> None:
    values = yaml.safe_load((CHART / name).read_text())
    assert list(unknown(values, SCHEMA)) == []


def test_every_value_has_a_default_and_a_reason() -> None:
    """`helm show values` is the documentation."""
    missing = [
        f"{path}.{name}"
        for path, part in parts(SCHEMA)
        for name in part["properties"]
        if _default(f"{path}.{name}") is None
    ]
    optional = {".global", ".intervals.lease", ".intervals.deletionTimeout"}
    assert set(missing) <= optional | {".intervals.unusedPool"}


def _default(path: str) -> Any:
    found: Any = VALUES
    for name in path.strip(".").split("."):
        if name not in found:
            return None
        found = found[name]
    return found


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_nobody_may_do_everything(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"""(resources|verbs|apiGroups|nonResourceURLs):.*['"]?\*""", text)
    assert "cluster-admin" not in text


def test_no_credential_is_written_down() -> None:
    text = (CHART / "values.yaml").read_text() + (CHART / "examples/production.yaml").read_text()
    keys = re.findall(r"^\s*[\w.-]*(?:secret-access-key|credential|password): (.*)$", text, re.M)
    assert all(value.startswith("${") for value in keys)


def test_the_dashboard_shows_what_workers_measure() -> None:
    dashboard = json.loads((CHART / "dashboards/tidewater.json").read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ] + [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    shown = {name for text in expressions for name in re.findall(r"tidewater_\w+", text)}
    source = (ROOT / "worker/src/tidewater_worker/metrics.py").read_text()
    assert shown <= set(re.findall(r'"(tidewater_\w+)"', source))
    assert len(shown) >= 9


def test_third_party_images_have_a_version() -> None:
    for part in ("etcd", "seaweedfs"):
        assert re.search(r":v?\d+\.\d+", VALUES[part]["image"])
