"""How the operator shows etcd who it is: by a Secret, which may be renewed while it runs."""

import base64
import binascii
import logging
from pathlib import Path
from typing import Final

from tidewater_coordination.etcd.login import Login
from tidewater_core.errors import Invalid, TidewaterError
from tidewater_operator.cluster.api import SECRET, Api

_FILES: Final = (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))
log = logging.getLogger(__name__)


class EtcdSecret:
    """Reads the Secret and keeps files of it, which connections to etcd are made with."""

    def __init__(self, api: Api, namespace: str, name: str, folder: Path) -> None:
        self._api, self._namespace, self._name, self._folder = api, namespace, name, folder
        self._known: Login | None = None

    async def login(self) -> Login:
        """Return the login as the Secret is now; files that differ are replaced."""
        if not self._name:
            return Login()
        where = f"the Secret {self._namespace}/{self._name}"
        found = await self._api.get(SECRET, self._namespace, self._name)
        if found is None:
            raise Invalid("SecretNotFound", f"{where} is not there")
        try:
            data = {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()}
            user, password = (data.get(key, b"").decode() for key in ("username", "password"))
        except (binascii.Error, UnicodeDecodeError) as error:
            raise Invalid("BadSecret", f"{where}: {error}") from error
        if bool(data.get("tls.crt")) != bool(data.get("tls.key")):
            raise Invalid("BadSecret", f"{where} has one of tls.crt and tls.key without the other")
        paths = {field: self._file(key, data[key]) for field, key in _FILES if key in data}
        self._known = Login(**paths, user=user, password=password)
        return self._known

    async def renewed(self) -> Login:
        """Return the login, the last one that is known if the Secret cannot be read."""
        try:
            return await self.login()
        except TidewaterError as error:
            if self._known is None:
                raise
            log.warning("etcd is asked as before: %s", error)
            return self._known

    def _file(self, key: str, content: bytes) -> str:
        """Write a file unless it is there as it is: its time tells connections of a change."""
        path = self._folder / key
        if not path.is_file() or path.read_bytes() != content:
            new = path.with_suffix(".new")
            new.touch(mode=0o600)
            new.write_bytes(content)
            new.replace(path)
        return str(path)
