"""Bearer tokens: in a request's head, in a WebSocket's opening, and the worker's own in a file."""

import base64
import binascii
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from tidewater_core.clock import Clock
from tidewater_core.errors import Retryable, Unauthenticated

TOKEN_BYTES_MAX: Final = 16 * 1024
HEADER_BYTES_MAX: Final = len("Bearer ") + TOKEN_BYTES_MAX
REREAD_S: Final = 5.0
SOCKET_PREFIX: Final = "base64url.bearer.authorization.k8s.io."
"""A browser cannot send a header with a WebSocket: the token stands among the subprotocols, in the
same way as for the Kubernetes API."""
_SCHEME: Final = b"bearer "
RawHeaders = Iterable[tuple[bytes, bytes]]


def authorization_of(headers: RawHeaders) -> bytes | None:
    """Return the Authorization header, whose name is in lower case; two of them are none."""
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            if found is not None:
                return b""
            found = value
    return found


def socket_authorization_of(headers: RawHeaders) -> tuple[bytes | None, bytes]:
    """Return the authorization of a WebSocket's opening, and its other subprotocols."""
    headers = list(headers)
    given = authorization_of(headers)
    offered = dict(headers).get(b"sec-websocket-protocol", b"").decode("latin-1")
    others = []
    for name in (part.strip() for part in offered.split(",")):
        if not name.startswith(SOCKET_PREFIX):
            others.append(name)
        elif given is None:
            text = name.removeprefix(SOCKET_PREFIX)
            try:
                given = b"Bearer " + base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except (binascii.Error, ValueError):
                given = b""
        else:
            given = b""
    return given, ", ".join(name for name in others if name).encode("latin-1")


def token_of(authorization: bytes | None) -> str:
    """Return the token of an Authorization header.

    There is one space and nothing else around it: a token has not thousands of spellings, each of
    which would be remembered.
    """
    if authorization is None:
        raise Unauthenticated("Unauthenticated", "a bearer token is needed")
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated("Unauthenticated", "the Authorization header must be: Bearer TOKEN")
    token = authorization[len(_SCHEME) :]
    if not 0 < len(token) <= TOKEN_BYTES_MAX or not _is_plain(token):
        raise Unauthenticated("Unauthenticated", "what is sent as a bearer token is none")
    return token.decode("ascii")


def _is_plain(token: bytes) -> bool:
    return all(33 <= byte <= 126 for byte in token)


def expiry_s(token: str) -> float | None:
    """Return when a JWT says that it ends, in seconds since 1970.

    It only ever makes a time shorter: nothing is believed because of it.
    """
    expires = _claims(token).get("exp")
    if isinstance(expires, int | float) and not isinstance(expires, bool):
        with suppress(OverflowError):  # it never ends
            return float(expires)
    return None


def is_for(token: str, audience: str) -> bool:
    """Tell whether a JWT says that it is for somebody.

    It only chooses what the API server is asked: nothing is believed because of it.
    """
    named = _claims(token).get("aud")
    return audience in named if isinstance(named, list) else named == audience


def _claims(token: str) -> dict[str, Any]:
    """Return what a JWT says of itself, unchecked; nothing if it is none."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        claims: Any = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=="))
    except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}


class TokenFile:
    """The worker's own token; the file is replaced while the worker runs."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._token, self._read_at = "", float("-inf")

    def token(self) -> str:
        """Return the token, at most some seconds old; `Retryable` if there is none."""
        now = self._clock.monotonic()
        if now - self._read_at >= REREAD_S:
            try:
                self._token = self._path.read_text(encoding="ascii").strip()
                self._read_at = now
            except (OSError, UnicodeDecodeError) as error:
                if not self._token:
                    raise Retryable(
                        "NoOwnToken", f"the worker's own token: {error}", 1_000
                    ) from None
        return self._token

    def authorization(self) -> bytes:
        """Return the value of an Authorization header."""
        return f"Bearer {self.token()}".encode("ascii")

    def forget(self) -> None:
        """Read the file again next time: the token was refused."""
        self._read_at = float("-inf")
