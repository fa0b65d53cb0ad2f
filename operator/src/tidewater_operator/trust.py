"""Whose certificates we trust when we ask workers: the CA of their namespace's TLS Secret."""

import base64
import logging
import ssl

from tidewater_core.errors import TidewaterError
from tidewater_operator.cluster.api import SECRET, Api

log = logging.getLogger(__name__)


class Trust:
    """Keeps a context per namespace, made anew when the CA is."""

    def __init__(self, api: Api, secret: str) -> None:
        self._api, self._secret = api, secret
        self._known: dict[str, tuple[str, ssl.SSLContext]] = {}

    async def of(self, namespace: str) -> ssl.SSLContext | None:
        """Return what to trust; None without TLS, or if nothing can be read."""
        if not self._secret:
            return None
        try:
            found = await self._api.get(SECRET, namespace, self._secret)
        except TidewaterError as error:
            log.debug("the CA of %s cannot be read: %s", namespace, error)
            return None
        data = ((found or {}).get("data") or {}).get("ca.crt", "")
        known = self._known.get(namespace)
        if known is not None and known[0] == data:
            return known[1]
        if not data:
            return None
        context = ssl.create_default_context(cadata=base64.b64decode(data).decode())
        self._known[namespace] = (data, context)
        return context
