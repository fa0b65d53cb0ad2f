"""TLS from files that are replaced while the worker runs.

A Secret's files change by the swap of a symbolic link, a certificate and its key at once; other
tools write one after the other. So the bytes are compared every few seconds, and a pair that does
not fit together is left alone until it does. New connections get the new certificate; those that
are open stay as they are.
"""

import asyncio
import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tidewater_core.errors import Invalid
from tidewater_core.security import TlsSettings
from tidewater_worker.auth.reviews import trusting

POLL_S: Final = 3.0
log = logging.getLogger(__name__)


class Material(NamedTuple):
    """What the files hold."""

    cert: bytes
    key: bytes
    ca: bytes | None = None
    client_ca: bytes | None = None


def read(settings: TlsSettings) -> Material:
    """Read the files."""
    return Material(
        settings.cert.read_bytes(),
        settings.key.read_bytes(),
        _optional(settings.ca),
        _optional(settings.client_ca),
    )


def _optional(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Give bytes a path, which OpenSSL wants, without putting a key on a disk."""
    in_memory = hasattr(os, "memfd_create")
    opened: Any = (
        os.fdopen(os.memfd_create("tidewater-tls"), "w+b")
        if in_memory
        else tempfile.TemporaryFile()  # noqa: SIM115
    )
    with opened as file:
        file.write(data)
        file.flush()
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _load_pair(context: ssl.SSLContext, material: Material) -> None:
    with _as_file(material.cert) as cert, _as_file(material.key) as key:
        context.load_cert_chain(cert, key, password=str)  # a locked key fails, and asks nobody


def server_context(material: Material) -> ssl.SSLContext:
    """Return the settings of the listening side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, material)
    if material.client_ca is not None:
        context.load_verify_locations(cadata=material.client_ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(material: Material) -> ssl.SSLContext:
    """Return the settings for calls to other workers."""
    context = trusting(None if material.ca is None else material.ca.decode("ascii"))
    if material.client_ca is not None:
        _load_pair(context, material)
    return context


class _Current(ssl.SSLContext):
    """A server's settings that can be exchanged: each connection takes those of its moment."""

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection."""
        return self.current.wrap_bio(*args, **kwargs)


class Tls:
    """The worker's certificates."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self.server: ssl.SSLContext = _Current(ssl.PROTOCOL_TLS_SERVER)
        """For the listener, once and for all."""
        self.changed: list[Callable[[Material], None]] = []
        """Called with new files' contents; again the next time if that fails."""
        self._to_tell: list[Callable[[Material], None]] = []
        try:
            self._use(read(settings))
        except (OSError, ValueError) as error:
            raise Invalid("InvalidTls", f"the files of the setting tls: {error}") from error

    def client(self) -> ssl.SSLContext:
        """Return the settings for calls to other workers."""
        return self._client

    def _use(self, material: Material) -> None:
        server, client = server_context(material), client_context(material)
        assert isinstance(self.server, _Current)
        self.server.current, self._client, self.material = server, client, material

    def look(self) -> bool:
        """Take new contents of the files, if there are; tell whether there were."""
        try:
            material = read(self._settings)
            is_new = material != self.material
            if is_new:
                self._use(material)
                self._to_tell = list(self.changed)
                log.info("new TLS files are in use")
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            log.warning("the TLS files changed and cannot be used (yet): %s", error)
            return False
        for listener in list(self._to_tell):
            try:
                listener(material)
                self._to_tell.remove(listener)
            except Exception:
                log.exception("somebody cannot use the new TLS files (yet)")
        return is_new

    async def watch(self) -> None:
        """Look every few seconds."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.look)
