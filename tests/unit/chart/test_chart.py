"""The chart as far as it can be judged without helm; `e2e/test_chart.py` renders it."""

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.alias_generators import to_camel

from tidewater_operator.settings import (
    CREDENTIAL,
    PASSWORD_IN_URI,
    VARIABLE,
    CatalogSettings,
    TenantSettings,
)

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/tidewater"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SOURCES = sorted((CHART / "templates").rglob("*.[ty][pa][lm]*"))
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
    optional = {".global", ".clusterDomain", ".intervals.lease", ".intervals.deletionTimeout"}
    assert set(missing) <= optional | {".intervals.unusedPool"}


def test_what_the_last_release_had_is_taken_for_another_one() -> None:
    """An upgrade is refused as a whole for a value that the schema does not name."""
    assert list(unknown({"clusterDomain": "cluster.local"}, SCHEMA)) == []
    assert all(".Values.clusterDomain" not in path.read_text() for path in SOURCES)


def test_blocks_that_the_first_release_had_not_may_be_absent() -> None:
    """`helm upgrade --reuse-values` brings the old chart's values, and null where one is new."""
    for path in SOURCES:
        assert not re.search(r"\.Values\.(tenants|pools)\b(?! \| default dict)", path.read_text())
    rights = (CHART / "templates/rbac.yaml").read_text()
    assert "get ($.Values.tenants | default dict) $field | default list" in rights
    settings = (CHART / "templates/_settings.tpl").read_text()
    assert "(.Values.pools | default dict).allowedImages | default list | toJson" in settings
    assert '.Values.etcd.takeOverFrom | default "" | quote' in settings


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


def test_the_operator_reads_secrets_of_namespaces_by_name() -> None:
    """As its settings have them, which the chart writes from the same values."""
    tenants = {to_camel(name) for name in TenantSettings.model_fields}
    assert VALUES["tenants"] == {name: [] for name in tenants}
    rights = (CHART / "templates/rbac.yaml").read_text().partition("tidewater-operator-own")[2]
    assert all(f'"{name}"' in rights for name in tenants)
    assert '(printf "%s.%s" $secret .)' in rights
    assert (
        ".Values.tenants | default dict | toYaml" in (CHART / "templates/_settings.tpl").read_text()
    )


def test_no_token_for_all_metrics_unless_it_is_asked_for() -> None:
    """Prometheus shows it to any pod that is labelled as a worker, whosever it is."""
    assert VALUES["monitoring"]["serviceMonitor"]["namespaces"] == []
    text = (CHART / "templates/monitoring.yaml").read_text()
    shared, _, rest = text.partition("kind: ClusterRoleBinding")
    assert shared.rstrip().endswith("{{- if $all }}")
    assert "kind: ClusterRoleBinding" not in rest
    assert "{{- if and $kubernetes (not $named) }}\n{{- fail" in text


def test_no_credential_is_written_down() -> None:
    text = (CHART / "values.yaml").read_text() + (CHART / "examples/production.yaml").read_text()
    keys = re.findall(r"^\s*[\w.-]*(?:secret-access-key|credential|password): (.*)$", text, re.M)
    assert all(value.startswith("${") for value in keys)


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("s3.secret-access-key", "abc", False),
        ("s3.secret-access-key", "${S3_SECRET_KEY}", True),
        ("s3.access-key-id", "AKIA", True),
        ("s3.session-token", "abc", False),
        ("gcs.oauth2.token-expires-at", "1", True),
        ("adls.account-key", "abc", False),
        ("adls.connection-string", "AccountName=a;AccountKey=b", False),
        ("adls.connection-string", "AccountName=a;AccountKey=${AZURE_KEY}", True),
        ("credential", "id:secret", False),
        ("credential", "id:${CLIENT_SECRET}", True),
        ("header.Authorization", "Bearer abc", False),
        ("uri", "postgresql+psycopg2://tidewater:abc@db/iceberg", False),
        ("uri", "postgresql+psycopg2://tidewater:${SQL_PASSWORD}@db/iceberg", True),
        ("uri", "postgresql+psycopg2://tidewater@db/iceberg", True),
        ("uri", "http://catalog:8181/api", True),
    ],
)
def test_properties_name_credentials_and_hold_none(name: str, value: str, taken: bool) -> None:
    """They are written to ConfigMaps; the message says where credentials belong."""
    refused = pytest.raises(ValueError, match=rf"{re.escape(name)} .*Secret")
    with nullcontext() if taken else refused:
        CatalogSettings(properties={"type": "rest", name: value})


def test_the_chart_refuses_credentials_by_the_same_rules() -> None:
    text = (CHART / "templates/_settings.tpl").read_text().replace("\\\\", "\\")
    for rule in (CREDENTIAL, PASSWORD_IN_URI, VARIABLE):
        assert f'"{rule.pattern}"' in text
    assert "put it in the Secret that catalog.secretName names" in text


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


# ---- names that YAML would take for something else

BARE = re.compile(r"(?:^|[{,] ?)\s*(?:- )?([\w./-]+): \{\{ (.+?) \}\}(?:$|[,}])", re.M)
"""A value that is a template's alone, without quotes around it."""
NO_TEXT = {"allowForeign", "enabled", "replicas", "port", "endpoints"}
"""Keys whose values are numbers, yes or no, or lists."""
FIXED = ("| quote", "toJson", "ternary ", ".Release.Service", "index . 1", 'printf "%s-%s"')
"""What is quoted, or the chart's own words."""


def test_every_text_is_quoted() -> None:
    """A namespace or catalog may be named 2024 or on, and a prefix 7: the operator takes text."""
    bare = [
        f"{path.name}: {key}: {value}"
        for path in SOURCES
        for key, value in BARE.findall(path.read_text())
        if key not in NO_TEXT and not any(word in value for word in FIXED)
    ]
    assert bare == []


def test_the_test_runs_where_topics_are_served() -> None:
    """In a namespace that the operator does not watch nobody would make its topic."""
    text = (CHART / "templates/tests/roundtrip.yaml").read_text()
    chosen, _, objects = text.partition("apiVersion:")
    assert "has $.Release.Namespace . | ternary $.Release.Namespace (first .)" in chosen
    assert ".Release.Namespace" not in objects
    places = re.findall(r"namespace: (\{\{.*?\}\})", objects)
    assert set(places) == {"{{ $where | quote }}"}
    assert len(places) == objects.count("metadata:") + 1, "each object, and who the role is given"
    assert "//tidewater.{{ $where }}.svc:8080" in objects
    assert "value: {{ $where }}/tidewater-test" in objects
