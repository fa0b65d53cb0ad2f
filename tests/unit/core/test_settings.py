"""Settings survive the trip from operator to worker, and mistakes are named."""

import json
from pathlib import Path

import pytest

from tidewater_core.errors import Invalid
from tidewater_core.settings import (
    Limits,
    WorkerSettings,
    embedded,
    parse_listen,
)
from tidewater_core.units import ByteSize


def test_round_trip(tmp_path: Path) -> None:
    settings = embedded(tmp_path, "0.0.0.0:0")
    assert WorkerSettings.from_json(settings.to_json()) == settings


def test_embedded_keeps_everything_under_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = embedded(Path("data"))
    data = tmp_path / "data"
    assert settings.log_root == data / "log"
    assert settings.run_dir == data / "run"
    assert settings.coordination == str(data / "coordination.db")
    assert settings.catalog.name == "tidewater"
    assert settings.catalog.properties == {
        "type": "sql",
        "uri": f"sqlite:///{data}/catalog.db",
        "warehouse": f"file://{data}/warehouse",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker_id": ""}, "worker_id must not be empty"),
        ({"listen_port": 70_000}, "not a TCP port"),
        ({"coordination": ""}, "coordination must be"),
        ({"log_rot": "/x"}, "log_rot: no such field"),
        ({"shutdown_deadline": 30}, "shutdown_deadline: 30 is not text with a unit"),
        ({"limits": {"message_bytes_max": "1Gi"}}, "message_bytes_max .* request_bytes_max"),
        ({"limits": {"batch_rows_max": 0}}, "batch_rows_max must be at least 1"),
        ({"limits": {"x": 1}}, "limits.x: no such field"),
        ({"catalog": {"properties": {"uri": 1}}}, "catalog.properties.uri: must be text"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    data = json.loads(embedded(tmp_path).to_json()) | change
    with pytest.raises(Invalid, match=message):
        WorkerSettings.from_json(json.dumps(data))


def test_not_json_is_said() -> None:
    with pytest.raises(Invalid, match="InvalidSettings"):
        WorkerSettings.from_json("{")


@pytest.mark.parametrize(
    "low_high",
    [
        {"key_bytes_max": ByteSize("16Mi")},
        {"request_bytes_max": ByteSize("1Gi")},
        {"partition_inflight_bytes_max": ByteSize("1Gi")},
        {"group_bytes_max": ByteSize("1Mi")},
        {"read_bytes_max": ByteSize("1Mi")},
        {"log_bytes_max": ByteSize("1Mi")},
    ],
)
def test_limits_keep_their_relations(low_high: dict[str, ByteSize]) -> None:
    with pytest.raises(ValueError, match="must not be larger than"):
        Limits(**low_high)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        (":0", ("127.0.0.1", 0)),
        ("[::1]:9", ("::1", 9)),
        ("host.example:1", ("host.example", 1)),
    ],
)
def test_listen_address(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize("text", ["", "8080", "host", "host:", "host:x", "host:70000", "host:-1"])
def test_bad_listen_address(text: str) -> None:
    with pytest.raises(Invalid, match="host:port"):
        parse_listen(text)
