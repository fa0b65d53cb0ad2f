"""What a client shows and what it trusts: bearer tokens that may rotate, and a CA for TLS."""

import os
import ssl
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from tidewater_core.clock import Clock, SystemClock
from tidewater_core.errors import Invalid

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""Where a pod finds its service account's token; Kubernetes writes a new one before it ends."""
LOOK_AGAIN_S: Final = 1.0
"""How often the file of a token is looked at."""
TOKEN_BYTES_MAX: Final = 64 * 1024

Token = str | Path | Callable[[], str]
"""A token itself, the file that holds it, or a function that returns it."""


class TokenFile:
    """The token in a file, read again when the file changes."""

    def __init__(self, path: Path | str, clock: Clock | None = None) -> None:
        """Remember the file; it is read at the first use."""
        self._path = Path(path)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._token = ""
        self._seen: tuple[int, int, int] | None = None
        self._look_at = 0.0

    def __call__(self) -> str:
        """Return the token as the file has it now, or had it a second ago."""
        if self._seen is not None and self._clock.monotonic() < self._look_at:
            return self._token
        with self._lock:
            try:
                self._read()
            except OSError as error:
                # A file that is being replaced: the token in hand is still good.
                if self._seen is None:
                    raise Invalid("BadTokenFile", f"cannot read {self._path}: {error}") from error
            self._look_at = self._clock.monotonic() + LOOK_AGAIN_S
            return self._token

    def _read(self) -> None:
        found = os.stat(self._path)
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen == self._seen:
            return
        if found.st_size > TOKEN_BYTES_MAX:
            raise Invalid("BadTokenFile", f"{self._path} is too large for a token")
        token = self._path.read_text(encoding="utf-8").strip()
        if not token:
            if self._seen is not None:
                return  # between truncating and writing: the next look finds it
            raise Invalid("BadTokenFile", f"{self._path} is empty")
        self._token, self._seen = token, seen


def token_source(token: Token | None) -> str | Callable[[], str] | None:
    """Return the token, or what to call for it."""
    return TokenFile(token) if isinstance(token, Path) else token


def tls_context(ca: str | None) -> ssl.SSLContext:
    """Return how to check a server: by this CA, or by those that the machine trusts."""
    changed_ns = 0
    if ca is not None:
        try:
            changed_ns = os.stat(ca).st_mtime_ns
        except OSError as error:
            raise Invalid("BadCa", f"cannot read {ca}: {error}") from error
    return _context(ca, changed_ns)


@lru_cache(maxsize=16)
def _context(ca: str | None, _changed_ns: int) -> ssl.SSLContext:
    """Read the CA once per version of its file: that takes longer than a request."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise Invalid("BadCa", f"{ca} holds no CA certificates: {error}") from error
