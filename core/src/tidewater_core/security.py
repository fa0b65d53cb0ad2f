"""Settings of who may use a worker, and of TLS. The whole of it: docs/security.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from tidewater_core.units import Duration

AUDIENCE = "tidewater"
"""What tokens for workers alone are made out to: the API server itself takes none of them."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TTL_MS_MAX = 10 * 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthSettings:
    """Who may produce, consume and administer (G9)."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    mode: Literal["none", "kubernetes"] = "none"
    """`none`: whoever reaches the port may do everything. `kubernetes`: bearer tokens are judged by
    the API server (TokenReview, SubjectAccessReview), so that RBAC says who may."""
    api_server: str = "https://kubernetes.default.svc"
    """The API server."""
    token_path: Path = _ACCOUNT / "token"
    """The worker's own token, for the API server; read again, since it is replaced by and by."""
    ca_path: Path = _ACCOUNT / "ca.crt"
    """Who signed the API server's certificate."""
    namespace_path: Path = _ACCOUNT / "namespace"
    """The worker's own namespace: who may `report` topics there may read its metrics, too. A file
    that is not there: those alone who may `get` the path `/metrics`."""
    peer_token_path: Path | None = None
    """The worker's own token for other workers; None: the one at `token_path`. Needed with
    `audiences`, which that one does not have. The operator's pools have one for `tidewater`."""
    audiences: tuple[str, ...] = ()
    """A user's token must be for one of these; empty: for the API server, or for `tidewater`."""
    allow_ttl: Duration = Duration("10s")
    """How long a permission counts before it is asked for again: revoking takes this long."""
    deny_ttl: Duration = Duration("5s")
    """The same for a refusal and for a token that is not valid."""
    token_ttl: Duration = Duration("60s")
    """How long a token counts as valid before it is asked for again; never past its own end."""
    review_timeout: Duration = Duration("5s")
    """How long the API server may take. Past it the request is refused with 503."""

    def __post_init__(self) -> None:
        """Check what no type can say."""
        if not self.api_server.startswith("https://"):
            raise ValueError("api_server must begin with https://: it is told users' tokens")
        for name in ("allow_ttl", "deny_ttl", "token_ttl", "review_timeout"):
            if not 1 <= getattr(self, name).ms <= TTL_MS_MAX:
                raise ValueError(f"{name} must be from 1ms to 10m")

    def namespace(self) -> str:
        """Return the namespace that the worker is in; empty: in none, or nobody told."""
        try:
            return self.namespace_path.read_text().strip()
        except OSError:
            return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsSettings:
    """PEM files for HTTPS and Flight over TLS; they are read again when they were replaced."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    cert: Path
    """The worker's certificate, with the intermediate ones after it."""
    key: Path
    """Its key."""
    ca: Path | None = None
    """Who signs the workers' certificates, for calls from worker to worker; None: the system's
    roots."""
    client_ca: Path | None = None
    """Who signs clients' certificates: with it a client without one is not let in at all."""
