"""A stand-in of Google Cloud Storage: the PyPI package `gcp-storage-emulator`.

It is not GCS: it checks no token. What is tested with it is that the table's files go there and
come back by the settings that a user gives.
"""

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tidewater_testing.process import ManagedProcess, free_ports

START_TIMEOUT_S = 60.0
BUCKET = "lake"
YEAR_2100_MS = 4_102_444_800_000


class Gcs:
    """The emulator on a free port of the loopback with one bucket, `gs://lake`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{port}"
        self.process = ManagedProcess(
            [
                str(Path(sys.executable).with_name("gcp-storage-emulator")),
                *("--data-dir", str(directory / "data")),
                *("start", "--host", "127.0.0.1", "--port", str(port)),
                *("--default-bucket", BUCKET),
            ],
            log_file=directory / "gcs.log",
            directory=directory,
        )

    @property
    def properties(self) -> dict[str, str]:
        """The properties of a warehouse here; a catalog's come to them."""
        return {
            "warehouse": f"gs://{BUCKET}/warehouse",
            "gcs.service.host": self.uri,
            "gcs.oauth2.token": "any",
            "gcs.oauth2.token-expires-at": str(YEAR_2100_MS),
        }

    def files(self, prefix: str) -> list[str]:
        """List the objects of the bucket whose names begin so; the emulator gives all at once."""
        query = urllib.parse.urlencode({"prefix": prefix})
        with urllib.request.urlopen(f"{self.uri}/storage/v1/b/{BUCKET}/o?{query}") as answer:
            return [item["name"] for item in json.load(answer).get("items", ())]

    def start(self) -> Self:
        """Start the emulator and wait until it has its bucket."""
        self.process.start()
        self.process.wait_ready(self._has_bucket, START_TIMEOUT_S, "the stand-in of GCS")
        return self

    def _has_bucket(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/storage/v1/b/{BUCKET}", timeout=5) as answer:
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
