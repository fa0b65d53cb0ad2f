"""Tokens in headers, in sockets' openings and in files."""

import base64
import json
from pathlib import Path

import pytest

from tidewater_core.errors import Retryable, Unauthenticated
from tidewater_testing.parts.kubernetes import FixedClock
from tidewater_worker.auth.tokens import (
    REREAD_S,
    SOCKET_PREFIX,
    TokenFile,
    authorization_of,
    expiry_s,
    is_for,
    socket_authorization_of,
    token_of,
)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], None),
        ([(b"host", b"x"), (b"authorization", b"Bearer a")], b"Bearer a"),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], b""),
    ],
)
def test_authorization_of(headers: list[tuple[bytes, bytes]], found: bytes | None) -> None:
    assert authorization_of(headers) == found


@pytest.mark.parametrize("given", [b"Bearer abc.def", b"bearer abc.def", b"BEARER abc.def"])
def test_a_token(given: bytes) -> None:
    assert token_of(given) == "abc.def"


@pytest.mark.parametrize(
    "given",
    [
        *(None, b"", b"abc", b"Basic abc", b"Bearer ", b"Bearer a b", b"Bearer \xc3\xa4"),
        *(b"Bearer  a", b"Bearer a ", b"Bearer\ta", b"Bearer a\t"),
        *(b"Bearer a\x00", b"Bearer " + b"a" * 20_000),
    ],
)
def test_no_token(given: bytes | None) -> None:
    with pytest.raises(Unauthenticated):
        token_of(given)


def jwt(**claims: object) -> str:
    middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{middle}.sig"


DEEP = f"e30.{base64.urlsafe_b64encode(b'[' * 11_000).decode()}.sig"
"""Anybody may send it: it is looked into before anybody is asked."""


@pytest.mark.parametrize(
    ("token", "end"),
    [
        (jwt(exp=1_700_000_000), 1_700_000_000.0),
        (jwt(exp=17.5), 17.5),
        (jwt(exp="soon"), None),
        (jwt(exp=True), None),
        (jwt(), None),
        ("opaque", None),
        ("a.b.c", None),
        ("a.!!.c", None),
        ("e30.W10.x", None),
        (DEEP, None),
        (jwt(exp=10**400), None),
    ],
)
def test_expiry(token: str, end: float | None) -> None:
    assert expiry_s(token) == end


@pytest.mark.parametrize(
    ("token", "ours"),
    [
        (jwt(aud="tidewater"), True),
        (jwt(aud=["https://kubernetes.default.svc", "tidewater"]), True),
        (jwt(aud=["tidewaters"]), False),
        (jwt(aud="not-tidewater"), False),
        (jwt(aud=7), False),
        (jwt(), False),
        ("opaque", False),
        ("e30.W10.x", False),
        (DEEP, False),
    ],
)
def test_audience(token: str, ours: bool) -> None:
    assert is_for(token, "tidewater") is ours


def b64(token: str) -> str:
    return base64.urlsafe_b64encode(token.encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("offered", "header", "found", "others"),
    [
        ("tidewater.v1", None, None, b"tidewater.v1"),
        (f"{SOCKET_PREFIX}{b64('t1')}, tidewater.v1", None, b"Bearer t1", b"tidewater.v1"),
        (f"{SOCKET_PREFIX}{b64('t1')}", None, b"Bearer t1", b""),
        (f"{SOCKET_PREFIX}{b64('t1')}, {SOCKET_PREFIX}{b64('t2')}", None, b"", b""),
        (f"{SOCKET_PREFIX}{b64('t1')}", b"Bearer t2", b"", b""),
        ("", b"Bearer t2", b"Bearer t2", b""),
    ],
)
def test_a_token_of_a_browser(
    offered: str, header: bytes | None, found: bytes | None, others: bytes
) -> None:
    headers = [(b"sec-websocket-protocol", offered.encode())] if offered else []
    if header is not None:
        headers.append((b"authorization", header))
    assert socket_authorization_of(headers) == (found, others)


def test_the_own_token_is_read_again(tmp_path: Path) -> None:
    clock, path = FixedClock(), tmp_path / "token"
    own = TokenFile(path, clock)
    with pytest.raises(Retryable, match="NoOwnToken"):
        own.token()
    path.write_text("one\n")
    assert own.authorization() == b"Bearer one"
    path.write_text("two\n")
    assert own.token() == "one"
    clock.monotonic_s += REREAD_S
    assert own.token() == "two"
    path.write_text("three")
    own.forget()
    assert own.token() == "three"
    path.unlink()
    clock.monotonic_s += REREAD_S
    assert own.token() == "three", "a moment without a file is no reason to stop"
