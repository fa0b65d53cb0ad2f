"""The two review endpoints of a Kubernetes API server, over HTTPS, for tests without a cluster.

This is no Kubernetes: it answers TokenReview and SubjectAccessReview as the API server documents
them (versions, kinds, 201, audiences, `resourceNames`, a missing name meaning all names), asks for
the caller's own token first, and knows nothing else. What a real one says is looked at end to end.
"""

import json
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidewater_core.security import AuthSettings
from tidewater_core.units import Duration
from tidewater_testing.parts.certificates import Authority

OWN_TOKEN = "the-workers-own"
WORKER = "system:serviceaccount:shop:tidewater-worker"
TOKEN_REVIEW = ("/apis/authentication.k8s.io/v1/tokenreviews", "TokenReview")
ACCESS_REVIEW = ("/apis/authorization.k8s.io/v1/subjectaccessreviews", "SubjectAccessReview")
DEFAULT_AUDIENCE = "https://kubernetes.default.svc"


@dataclass
class FixedClock:
    """A clock that a test moves."""

    wall_us: int = 1_700_000_000_000_000
    monotonic_s: float = 1_000.0

    def now_us(self) -> int:
        return self.wall_us + round((self.monotonic_s - 1_000.0) * 1e6)

    def monotonic(self) -> float:
        return self.monotonic_s


@dataclass(frozen=True)
class Account:
    """A user with a token."""

    name: str
    audiences: tuple[str, ...] = (DEFAULT_AUDIENCE,)
    groups: tuple[str, ...] = ("system:authenticated",)
    extra: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Role:
    """What a user may; like a rule of RBAC bound to one user in one namespace."""

    user: str
    verbs: tuple[str, ...]
    resources: tuple[str, ...] = ()
    namespace: str = ""
    names: tuple[str, ...] = ()
    """Empty: all. Not empty: a question without a name is not allowed, as in RBAC."""
    paths: tuple[str, ...] = ()

    def allows(self, spec: Mapping[str, Any]) -> bool:
        """Tell whether the rule allows what a review asks for."""
        if spec.get("user") != self.user:
            return False
        if (asked := spec.get("nonResourceAttributes")) is not None:
            return asked["path"] in self.paths and asked["verb"] in self.verbs
        asked = spec["resourceAttributes"]
        return (
            asked["group"] == "tidewater.dev"
            and asked["resource"] in self.resources
            and asked["verb"] in self.verbs
            and asked["namespace"] == self.namespace
            and (not self.names or asked.get("name", "") in self.names)
        )


class Reviews:
    """An HTTPS server with the two endpoints; `accounts` and `roles` may be changed at any time."""

    def __init__(
        self,
        directory: Path,
        accounts: Mapping[str, Account],
        roles: Iterable[Role],
        authority: Authority | None = None,
    ) -> None:
        self.directory = directory
        self.authority = authority or Authority(directory)
        pair = self.authority.sign("api-server")
        self.accounts: dict[str, Account] = {OWN_TOKEN: Account(WORKER), **accounts}
        self.own_tokens = {OWN_TOKEN}
        """Who may ask."""
        self.roles = list(roles)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        """Whose token asked, the kind of review, its spec."""
        self.is_away = threading.Event()
        """While set, every question is answered with 500."""
        self.token_path = directory / "token"
        self.token_path.write_text(f"{OWN_TOKEN}\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.cert, pair.key)
        reviews = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = reviews.answer(
                    self.path, self.headers.get("Authorization", ""), body
                )
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                """Keep the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def settings(self, **more: Any) -> AuthSettings:
        """Return the settings of a worker that asks here."""
        here: dict[str, Any] = {
            "api_server": self.url,
            "token_path": self.token_path,
            "ca_path": self.authority.ca,
            "allow_ttl": Duration("500ms"),
            "deny_ttl": Duration("100ms"),
            "token_ttl": Duration("1s"),
        }
        return AuthSettings(mode="kubernetes", **{**here, **more})

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Answer a question."""
        asker = authorization.removeprefix("Bearer ")
        if asker not in self.own_tokens:
            return 401, {"kind": "Status", "status": "Failure", "reason": "Unauthorized"}
        if self.is_away.is_set():
            return 500, {"kind": "Status", "status": "Failure", "reason": "InternalError"}
        asked = json.loads(body)
        kind, spec = asked["kind"], asked["spec"]
        self.asked.append((asker, kind, spec))
        if (path, kind) == TOKEN_REVIEW and asked["apiVersion"] == "authentication.k8s.io/v1":
            status = self._token(spec)
        elif (path, kind) == ACCESS_REVIEW and asked["apiVersion"] == "authorization.k8s.io/v1":
            status = {"allowed": any(role.allows(spec) for role in self.roles)}
        else:
            return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound"}
        return 201, {**asked, "status": status}

    def _token(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        account = self.accounts.get(spec["token"])
        wanted = spec.get("audiences") or [DEFAULT_AUDIENCE]
        if account is None or not (fitting := [a for a in wanted if a in account.audiences]):
            return {"user": {}, "error": "[invalid bearer token]"}
        user = {
            "username": account.name,
            "uid": f"uid-of-{account.name}",
            "groups": list(account.groups),
            "extra": dict(account.extra),
        }
        return {"authenticated": True, "user": user, "audiences": fitting}

    def asked_about(self, user: str, by: str = OWN_TOKEN, since: int = 0) -> set[tuple[str, str]]:
        """Return verb and resource of what was asked about a user by the holder of a token.

        Verdicts are kept for a while: what was asked before may not be asked again. `since` passes
        over so many questions.
        """
        return {
            (spec["resourceAttributes"]["verb"], spec["resourceAttributes"]["resource"])
            for asker, kind, spec in self.asked[since:]
            if asker == by and kind == ACCESS_REVIEW[1] and spec["user"] == user
            if "resourceAttributes" in spec
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
