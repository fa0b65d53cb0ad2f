"""Where a Tidewater server is, and what every request to it carries."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from tidewater.credentials import Token, tls_context, token_source
from tidewater.http1 import header_line, request_head
from tidewater_core.errors import Invalid

DEFAULT_URL = "http://127.0.0.1:8080"
"""Where `tidewater dev` listens."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One server address."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    """Path in front of every target, when the server stands behind a proxy; no slash at its end."""
    token: str | Callable[[], str] | None = None
    """Bearer token sent with every request, or what to call for the one of the moment."""
    ca: str | None = None
    """File of the CA that signed the server's certificate; None: those that the machine trusts."""

    def __str__(self) -> str:
        """Return the address as a URL, without the token."""
        return f"{'https' if self.tls else 'http'}://{self._authority}{self.prefix}"

    @property
    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def bearer(self) -> str | None:
        """Return the token as it is now."""
        return self.token() if callable(self.token) else self.token

    def head(self, method: str, target: str, **headers: str | None) -> bytes:
        """Return a request head; header names are given with `_` for `-`, None leaves one out."""
        lines = [header_line("Host", self._authority)]
        if (token := self.bearer) is not None:
            lines.append(header_line("Authorization", f"Bearer {token}"))
        for name, value in headers.items():
            if value is not None:
                lines.append(header_line(name.replace("_", "-"), value))
        return request_head(method, self.prefix + target, b"".join(lines))

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings of a connection, None for plain HTTP."""
        return tls_context(self.ca) if self.tls else None

    def sibling(self, url: str) -> "Origin | None":
        """Return another server of the same system; None if it may not be trusted with the token.

        Whoever was asked over TLS is not followed to an address without it.
        """
        try:
            other = parse_url(url)
        except Invalid:
            return None
        if self.tls and not other.tls:
            return None
        return replace(other, token=self.token, ca=self.ca)


def parse_url(url: str, token: Token | None = None, ca: str | None = None) -> Origin:
    """Return the origin that a URL names."""
    try:
        parts = urlsplit(url)
    except ValueError as error:  # brackets around what is no IPv6 address
        raise Invalid("BadUrl", f"not a server URL: {url!r} ({error})") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise Invalid("BadUrl", f"not a server URL: {url!r} (expected {DEFAULT_URL} or the like)")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:  # of a label that is empty or too long, `a..b`
        raise Invalid("BadUrl", f"no host's name in the server URL {url!r}: {error}") from error
    if parts.query or parts.fragment or parts.username or parts.password:
        raise Invalid("BadUrl", "a server URL has no query, fragment or user")
    try:
        port = parts.port
    except ValueError as error:
        raise Invalid("BadUrl", f"bad port in the server URL {url!r}") from error
    tls = parts.scheme == "https"
    return Origin(
        host=parts.hostname,
        port=port if port is not None else (443 if tls else 80),
        tls=tls,
        prefix=parts.path.rstrip("/"),
        token=token_source(token),
        ca=ca,
    )
