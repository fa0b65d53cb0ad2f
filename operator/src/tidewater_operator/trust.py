"""Whose certificates we trust when we ask workers: the CA of their namespace's TLS Secret."""

import base64
import logging
import ssl
from typing import NamedTuple

from tidewater_core.errors import TidewaterError
from tidewater_operator.cluster.api import SECRET, Api
from tidewater_operator.life import Refusal

log = logging.getLogger(__name__)


class Trusted(NamedTuple):
    """What to trust."""

    context: ssl.SSLContext | None = None
    """None: without TLS, or if nothing can be read."""
    problem: Refusal | None = None
    """What a person must put right."""


class Trust:
    """Keeps a context per namespace, made anew when the CA is."""

    def __init__(self, api: Api, secret: str) -> None:
        self._api, self._secret = api, secret
        self._known: dict[str, tuple[str, Trusted]] = {}

    async def of(self, namespace: str) -> Trusted:
        """Return what to trust in a namespace."""
        if not self._secret:
            return Trusted()
        try:
            found = await self._api.get(SECRET, namespace, self._secret)
        except TidewaterError as error:
            log.debug("the CA of %s cannot be read: %s", namespace, error)
            return Trusted()
        data = ((found or {}).get("data") or {}).get("ca.crt", "")
        known = self._known.get(namespace)
        if known is not None and known[0] == data:
            return known[1]
        if not data:
            return Trusted()
        made = self._made(data)
        self._known[namespace] = (data, made)
        return made

    def forget(self, namespace: str) -> None:
        """Let go of what was trusted in a namespace that is gone."""
        self._known.pop(namespace, None)

    def _made(self, data: str) -> Trusted:
        try:
            pem = base64.b64decode(data).decode()
            return Trusted(ssl.create_default_context(cadata=pem))
        except (ssl.SSLError, ValueError) as error:
            message = (
                f"ca.crt of Secret {self._secret} is no certificate in PEM ({error}): nobody who "
                "trusts it can ask the workers, the operator included"
            )
            return Trusted(problem=Refusal("BadCertificateAuthority", message))
