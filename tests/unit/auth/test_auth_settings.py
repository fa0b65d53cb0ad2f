"""Settings of access and TLS: what they default to, how they travel, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.errors import Invalid
from tidewater_core.security import AuthSettings, TlsSettings
from tidewater_core.settings import WorkerSettings, embedded


def test_nobody_is_asked_unless_told(tmp_path: Path) -> None:
    settings = embedded(tmp_path)
    assert settings.auth.mode == "none"
    assert settings.tls is None
    assert settings.listen_host == "127.0.0.1"


def test_they_travel(tmp_path: Path) -> None:
    settings = replace(
        embedded(tmp_path),
        auth=AuthSettings(mode="kubernetes", audiences=("tidewater",), peer_token_path=Path("/t")),
        tls=TlsSettings(cert=Path("/c"), key=Path("/k"), ca=Path("/a"), client_ca=Path("/cc")),
    )
    assert WorkerSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ({"mode": "kubernets"}, "mode"),
        ({"api_server": "http://kubernetes"}, "https://"),
        ({"allow_ttl": "0s"}, "allow_ttl"),
        ({"token_ttl": "1h"}, "token_ttl"),
        ({"tokenPath": "/x"}, "tokenPath"),
    ],
)
def test_what_is_refused(tmp_path: Path, auth: dict[str, Any], said: str) -> None:
    text = json.loads(embedded(tmp_path).to_json())
    text["auth"] |= auth
    with pytest.raises(Invalid, match=said):
        WorkerSettings.from_json(json.dumps(text))


def test_whose_metrics_they_are(tmp_path: Path) -> None:
    place = tmp_path / "namespace"
    auth = AuthSettings(mode="kubernetes", namespace_path=place)
    assert auth.namespace() == "", "not in a pod"
    place.write_text("shop\n")
    assert auth.namespace() == "shop"
