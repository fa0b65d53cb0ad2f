"""A certificate authority of a test's own, by the openssl program."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """Signs certificates for the loopback."""

    def __init__(self, directory: Path, name: str = "test-ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.ca, self._key = directory / f"{name}.crt", directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", self._key),
            *("-out", self.ca, "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def sign(self, name: str, hosts: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        """Make a certificate for servers and clients alike; a name again replaces its files."""
        cert, key = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        request, extra = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
        )
        extra.write_text(f"subjectAltName={hosts}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key),
            *("-CAcreateserial", "-days", "2", "-out", cert, "-extfile", extra),
        )
        return Pair(cert, key)
