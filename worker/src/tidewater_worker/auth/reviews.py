"""TokenReview and SubjectAccessReview: the two questions to the Kubernetes API server."""

import ssl
from pathlib import Path
from typing import Any, Final

import msgspec

from tidewater_core.clock import Clock
from tidewater_core.errors import OutcomeUnknown, Retryable
from tidewater_core.security import AUDIENCE, AuthSettings
from tidewater_worker.auth.access import GROUP, Access, User
from tidewater_worker.auth.tokens import REREAD_S, TokenFile, is_for
from tidewater_worker.cluster.http import Peers

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
RETRY_MS: Final = 1_000
SAID_BYTES_MAX: Final = 300
UNAUTHORIZED: Final = 401


class KubernetesReviews:
    """Asks with the worker's own token, which is read again when it was replaced."""

    def __init__(self, settings: AuthSettings, clock: Clock) -> None:
        self._settings = settings
        self._own = TokenFile(settings.token_path, clock)
        self._trust = _Trust(settings.ca_path, clock)
        self._peers = Peers(self._trust.context)

    async def authenticate(self, token: str) -> User | None:
        """Return whom a token speaks for; None: it is not valid here."""
        if self._settings.audiences:
            return await self._user(token, self._settings.audiences)
        # The API server judges a token by its own audience unless it is asked for others.
        if is_for(token, AUDIENCE) and (found := await self._user(token, (AUDIENCE,))) is not None:
            return found
        return await self._user(token, ())

    async def _user(self, token: str, audiences: tuple[str, ...]) -> User | None:
        spec: dict[str, Any] = {"token": token}
        if audiences:
            spec["audiences"] = list(audiences)
        status = await self._review(TOKEN_REVIEWS, "authentication.k8s.io/v1", "TokenReview", spec)
        return user_of(status, audiences)

    async def authorise(self, user: User, access: Access) -> bool:
        """Tell whether a user may."""
        spec = access_spec(user, access)
        status = await self._review(
            ACCESS_REVIEWS, "authorization.k8s.io/v1", "SubjectAccessReview", spec
        )
        return status.get("allowed") is True and status.get("denied") is not True

    async def _review(self, path: str, version: str, kind: str, spec: dict[str, Any]) -> Any:
        body = msgspec.json.encode({"apiVersion": version, "kind": kind, "spec": spec})
        status, data = await self._post(path, body)
        if status == UNAUTHORIZED:
            self._own.forget()  # replaced before its time
            status, data = await self._post(path, body)
        if status not in (200, 201):
            said = data[:SAID_BYTES_MAX].decode("utf-8", "replace")
            raise Retryable("ReviewRefused", f"{kind}: {status} {said}", RETRY_MS)
        try:
            found = msgspec.json.decode(data)["status"]
        except (msgspec.DecodeError, KeyError, TypeError):
            raise Retryable("BadReview", f"{kind}: an answer without a status", RETRY_MS) from None
        if not isinstance(found, dict):
            raise Retryable("BadReview", f"{kind}: an answer without a status", RETRY_MS)
        return found

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        headers = [
            (b"authorization", self._own.authorization()),
            (b"content-type", b"application/json"),
            (b"accept", b"application/json"),
        ]
        url, limit_s = self._settings.api_server, self._settings.review_timeout.seconds
        try:
            reply = await self._peers.request(url, "POST", path, headers, body, limit_s)
        except OutcomeUnknown:
            # A review changes nothing: the connection was one that the server had just closed.
            reply = await self._peers.request(url, "POST", path, headers, body, limit_s)
        return reply.status, await reply.read()

    async def close(self) -> None:
        """Hang up."""
        await self._peers.close()


class _Trust:
    """The API server's CA; its file is replaced when the CA is renewed."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._context: ssl.SSLContext | None = None
        self._pem, self._read_at = "", float("-inf")

    def context(self) -> ssl.SSLContext:
        """Return what to check the server's certificate with."""
        now = self._clock.monotonic()
        if self._context is None or now - self._read_at >= REREAD_S:
            try:
                pem = self._path.read_text()
                if self._context is None or pem != self._pem:
                    self._context, self._pem = trusting(pem), pem
                self._read_at = now
            except (OSError, ssl.SSLError) as error:
                if self._context is None:
                    said = f"the API server's CA {self._path}: {error}"
                    raise Retryable("NoCertificateAuthority", said, RETRY_MS) from None
        return self._context


def trusting(pem: str | None) -> ssl.SSLContext:
    """Return a client's TLS settings that trust a CA; None: the system's."""
    context = ssl.create_default_context(cadata=pem)
    # Strict since Python 3.13: CAs of many clusters lack an extension that it asks for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def user_of(status: dict[str, Any], audiences: tuple[str, ...]) -> User | None:
    """Read a TokenReview's status: the user, or None if the token is not good for us."""
    if status.get("authenticated") is not True:
        return None
    # An API server that knows no audiences leaves them out, and has not looked at them.
    if audiences and not set(audiences) & set(status.get("audiences") or ()):
        return None
    user = status.get("user")
    if not isinstance(user, dict) or not user.get("username"):
        return None
    return User(
        str(user["username"]),
        str(user.get("uid") or ""),
        tuple(user.get("groups") or ()),
        tuple((key, tuple(values)) for key, values in sorted((user.get("extra") or {}).items())),
    )


def access_spec(user: User, access: Access) -> dict[str, Any]:
    """Write a SubjectAccessReview's spec."""
    spec: dict[str, Any] = {"user": user.name}
    if access.resource:
        attributes = {
            "group": GROUP,
            "version": "*",
            "resource": access.resource,
            "verb": access.verb,
            "namespace": access.namespace,
        }
        if access.name:
            attributes["name"] = access.name
        spec["resourceAttributes"] = attributes
    else:
        spec["nonResourceAttributes"] = {"path": access.name, "verb": access.verb}
    if user.uid:
        spec["uid"] = user.uid
    if user.groups:
        spec["groups"] = list(user.groups)
    if user.extra:
        spec["extra"] = {key: list(values) for key, values in user.extra}
    return spec
