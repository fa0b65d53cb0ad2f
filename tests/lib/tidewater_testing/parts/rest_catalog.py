"""Iceberg's own REST catalog server: the reference for what a catalog must refuse."""

import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tidewater_testing.parts.fetch import rest_catalog_jars
from tidewater_testing.parts.java import find_java
from tidewater_testing.process import ManagedProcess, free_ports

START_TIMEOUT_S = 60.0


class RestCatalog:
    """The server on a free port, with a file warehouse below `directory`; survives `restart`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.warehouse = f"file://{directory}/warehouse"
        self.process = ManagedProcess(
            [
                find_java(),
                "-Xmx256m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",  # a short life: start time matters, peak speed does not
                f"-Djava.io.tmpdir={directory}",
                "-cp",
                f"{rest_catalog_jars()}/*",
                "org.apache.iceberg.rest.RESTCatalogServer",
            ],
            log_file=directory / "rest-catalog.log",
            environment={
                "CATALOG_REST_PORT": str(self.port),
                "CATALOG_WAREHOUSE": self.warehouse,
                "CATALOG_URI": f"jdbc:sqlite:{directory}/rest-catalog.db?busy_timeout=20000",
            },
        )

    @property
    def properties(self) -> dict[str, str]:
        """The catalog properties by which pyiceberg opens it."""
        return {"type": "rest", "uri": self.uri, "warehouse": self.warehouse}

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        self.process.start()
        self.process.wait_ready(self._answers, START_TIMEOUT_S, "the REST catalog server")
        return self

    def restart(self) -> None:
        """Kill the server with -9 and start it again on the same port and database."""
        self.process.kill()
        self.start()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/v1/config", timeout=5) as answer:
                return int(answer.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
