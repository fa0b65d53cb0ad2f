import os
import ssl
from pathlib import Path

import pytest

from tidewater.credentials import LOOK_AGAIN_S, TokenFile, tls_context, token_source
from tidewater.origin import parse_url
from tidewater.producing import Requests
from tidewater_core.errors import Invalid
from tidewater_core.names import TopicName


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def now_us(self) -> int:
        return 0


def test_a_token_that_rotates_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one\n")
    clock = Clock()
    token = TokenFile(path, clock)
    assert token() == "one"
    path.write_text("two two")
    assert token() == "one", "looked at a moment ago"
    clock.now += LOOK_AGAIN_S
    assert token() == "two two"
    # As Kubernetes does it: another file under the same name.
    fresh = tmp_path / "fresh"
    fresh.write_text("three")
    os.replace(fresh, path)
    clock.now += LOOK_AGAIN_S
    assert token() == "three"
    path.unlink()
    clock.now += LOOK_AGAIN_S
    assert token() == "three", "being replaced: the old one is still good"
    path.write_text("")
    clock.now += LOOK_AGAIN_S
    assert token() == "three"


def test_files_without_a_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="BadTokenFile"):
        TokenFile(tmp_path / "missing")()
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(Invalid, match="empty"):
        TokenFile(tmp_path / "empty")()
    (tmp_path / "large").write_text("x" * 100_000)
    with pytest.raises(Invalid, match="too large"):
        TokenFile(tmp_path / "large")()


def test_requests_carry_the_token_of_the_moment() -> None:
    tokens = iter(["one", "one", "two", "two", "two"])
    origin = parse_url("http://h", token=lambda: next(tokens))
    requests = Requests(TopicName("a", "b"), ack="log", partition=None, idempotent=False)
    batch = requests.batch(b"x", "application/json", None)
    first = requests.request(origin, batch)
    assert b"Authorization: Bearer one\r\n" in first
    second = requests.request(origin, batch)
    assert b"Authorization: Bearer two\r\n" in second
    assert token_source("plain") == "plain"
    assert token_source(None) is None


def test_a_ca_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="BadCa"):
        tls_context(str(tmp_path / "missing"))
    (tmp_path / "ca").write_text("nothing")
    with pytest.raises(Invalid, match="BadCa"):
        tls_context(str(tmp_path / "ca"))
    assert tls_context(None).verify_mode == ssl.CERT_REQUIRED
    assert tls_context(None) is tls_context(None), "made once: it takes longer than a request"
