"""The REST catalog, made fit for a process that runs for months.

pyiceberg's client sends requests without a timeout and learns that its OAuth2 token has expired
from a refused request. Here every request has a timeout, the token is renewed before it expires,
and a request that is refused for its token all the same is sent once more with a new one (a
request that was refused as unauthorized was not carried out, so that is safe for commits too).
Imported only where a REST catalog is configured: it costs memory.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.rest.auth import AuthManager
from pyiceberg.catalog.rest.response import TokenResponse
from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter

from tidewater_core.clock import Clock, SystemClock
from tidewater_worker.table.patience import connect_timeout_s, read_timeout_s

log = logging.getLogger(__name__)

RENEW_AT: Final = 0.75
"""Part of a token's life after which it is renewed."""
DEFAULT_SCOPE: Final = "catalog"
OAUTH_PARAMETERS: Final = ("audience", "resource")


class TimeoutAdapter(HTTPAdapter):
    """Gives every request a timeout."""

    def __init__(self, connect_s: float, read_s: float) -> None:
        self._timeout = (connect_s, read_s)
        super().__init__()

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        """Send with a timeout."""
        kwargs["timeout"] = kwargs.get("timeout") or self._timeout
        return super().send(request, *args, **kwargs)


class RenewingToken(AuthManager):
    """OAuth2 client credentials whose token is renewed before it expires. Thread-safe."""

    def __init__(
        self,
        session: Session,
        url: str,
        credential: str,
        parameters: Mapping[str, str],
        clock: Clock | None = None,
    ) -> None:
        self._session = session
        self._url = url
        client_id, colon, secret = credential.partition(":")
        self._client = (client_id, secret) if colon else (None, credential)
        self._parameters = dict(parameters)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._token: str | None = None
        self._renew_at = 0.0

    def auth_header(self) -> str:
        """Return the header, with a new token if the old one is about to expire."""
        with self._lock:
            if self._token is None or self._clock.monotonic() >= self._renew_at:
                self._fetch()
            return f"Bearer {self._token}"

    def discard(self) -> None:
        """Forget the token: the catalog has refused it."""
        with self._lock:
            self._token = None

    def _fetch(self) -> None:
        client_id, secret = self._client
        form = {"grant_type": "client_credentials", "client_secret": secret, **self._parameters}
        if client_id is not None:
            form["client_id"] = client_id
        response = self._session.post(
            self._url,
            data=form,
            headers={"Content-type": "application/x-www-form-urlencoded"},
            auth=_no_auth,
        )
        response.raise_for_status()
        answer = TokenResponse.model_validate_json(response.text)
        self._token = answer.access_token
        life_s = answer.expires_in
        self._renew_at = self._clock.monotonic() + (
            life_s * RENEW_AT if life_s is not None else float("inf")
        )
        log.info("catalog token renewed url=%s expires_in_s=%s", self._url, life_s)


def _no_auth(request: PreparedRequest) -> PreparedRequest:
    """Send the token request itself without a token."""
    return request


class PatientRestCatalog(RestCatalog):
    """RestCatalog with timeouts and a token that does not run out."""

    def _create_session(self) -> Session:
        session = super()._create_session()
        self._mount_timeouts(session)
        return session

    def _mount_timeouts(self, session: Session) -> None:
        adapter = TimeoutAdapter(
            connect_timeout_s(self.properties), read_timeout_s(self.properties)
        )
        for prefix, mounted in list(session.adapters.items()):
            if type(mounted) is HTTPAdapter:
                session.mount(prefix, adapter)

    def _create_legacy_oauth2_auth_manager(self, session: Session) -> AuthManager:
        credential = self.properties.get("credential")
        if credential is None:
            return super()._create_legacy_oauth2_auth_manager(session)
        self._mount_timeouts(session)
        parameters = {"scope": self.properties.get("scope") or DEFAULT_SCOPE}
        for name in OAUTH_PARAMETERS:
            if value := self.properties.get(name):
                parameters[name] = value
        url = self.properties.get("oauth2-server-uri") or f"{self.uri.rstrip('/')}/v1/oauth/tokens"
        return RenewingToken(session, url, credential, parameters)

    def _refresh_token(self) -> None:
        """Get another token: pyiceberg is about to repeat a request refused for its token."""
        if isinstance(self._auth_manager, RenewingToken):
            self._auth_manager.discard()
        else:
            super()._refresh_token()
