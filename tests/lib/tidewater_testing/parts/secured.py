"""A worker with TLS and authentication, and a plain way to ask it as somebody."""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyarrow import flight

from tidewater_core.security import AuthSettings, TlsSettings
from tidewater_testing.parts.worker import Worker
from tidewater_testing.process import free_ports
from tidewater_testing.web import Answer


@dataclass
class SecuredWorker(Worker):
    """A worker that asks who one is, or speaks TLS, or both; with Flight."""

    auth: AuthSettings | None = None
    tls: TlsSettings | None = None

    def __post_init__(self) -> None:
        """Write the settings."""
        super().__post_init__()
        (port,) = free_ports(1)
        self.settings = replace(
            self.settings, auth=self.auth or AuthSettings(), tls=self.tls, flight_port=port
        )
        (self.directory / "settings.json").write_text(self.settings.to_json())

    def ask(
        self,
        method: str,
        path: str,
        token: str | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request as the holder of a token."""
        every = dict(headers or {})
        if token is not None:
            every["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            every.setdefault("Content-Type", "application/json")
        connection = self.connection()
        try:
            connection.request(method, path, data, every)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read())
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        """Open a connection."""
        if self.tls is None:
            return http.client.HTTPConnection(self.address, timeout=60)
        return http.client.HTTPSConnection(self.address, timeout=60, context=self.trust())

    def trust(self) -> ssl.SSLContext:
        """Return what a client checks the worker's certificate with."""
        assert self.tls is not None
        return ssl.create_default_context(cafile=str(self.tls.ca))

    def fly(self) -> flight.FlightClient:
        """Connect with Flight."""
        where = f"127.0.0.1:{self.settings.flight_port}"
        if self.tls is None:
            return flight.connect(f"grpc://{where}")
        assert self.tls.ca is not None
        return flight.connect(f"grpc+tls://{where}", tls_root_certs=self.tls.ca.read_bytes())

    def _ready(self) -> bool:
        try:
            return self.ask("GET", "/readyz").status == 200
        except OSError:
            return False
