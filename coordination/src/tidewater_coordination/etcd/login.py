"""How we show etcd who we are, and know that it is etcd: certificates, a user with a password."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tidewater_core.errors import Invalid


class Certificates(NamedTuple):
    """What the files hold; None for one that is not named."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None


@dataclass(frozen=True, kw_only=True)
class Login:
    """Paths of PEM files, and a user. All of it may be empty."""

    ca: str = ""
    """Who signed the servers' certificates; empty: the system's roots."""
    cert: str = ""
    """Our own certificate, for servers that ask for one, with its `key`."""
    key: str = ""
    user: str = ""
    """For servers with authentication turned on."""
    password: str = field(default="", repr=False)

    def certificates(self) -> Certificates:
        """Read the files; raise Invalid for a certificate without its key.

        The library ends the whole process for one without the other.
        """
        ca, key, cert = (
            Path(path).read_bytes() if path else None for path in (self.ca, self.key, self.cert)
        )
        if bool(key) != bool(cert):
            missing, there = ("key", "certificate") if cert else ("certificate", "key")
            message = f"etcd's {there} for us comes without its {missing}, or that is empty"
            raise Invalid("InvalidSettings", message)
        return Certificates(ca, key, cert)

    def stamp(self) -> tuple[int, ...]:
        """Return what changes when a file is replaced, as a renewed Secret does."""
        found = []
        for path in (self.ca, self.cert, self.key):
            with suppress(OSError):
                found.append(Path(path).stat().st_mtime_ns if path else 0)
        return tuple(found)
