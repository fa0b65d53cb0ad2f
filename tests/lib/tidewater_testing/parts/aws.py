"""A stand-in of AWS: Glue and S3 by `moto`, with the version check that `aws_server` adds."""

import sys
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
REGION = "eu-central-1"
BUCKET = "lake"
SERVER = Path(__file__).with_name("aws_server.py")


class Aws:
    """Glue and S3 on a free port of the loopback with one bucket, `s3://lake`; in memory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{port}"
        self.process = ManagedProcess(
            [sys.executable, str(SERVER), str(port)], log_file=directory / "aws.log"
        )

    @property
    def properties(self) -> dict[str, str]:
        """The catalog properties by which pyiceberg opens it."""
        return {
            "type": "glue",
            "warehouse": f"s3://{BUCKET}",
            "glue.endpoint": self.uri,
            "glue.region": REGION,
            "glue.access-key-id": ACCESS_KEY,
            "glue.secret-access-key": SECRET_KEY,
            "s3.endpoint": self.uri,
            "s3.region": REGION,
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
        }

    def client(self, service: str) -> Any:
        """Return a boto3 client of this server, `s3` or `glue`."""
        return boto3.client(
            service,
            endpoint_url=self.uri,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=botocore.config.Config(
                connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1}
            ),
        )

    def files(self, prefix: str) -> list[str]:
        """List the objects of the bucket whose names begin so.

        Not the empty ones that pyarrow makes in place of folders whenever it deletes a file.
        """
        s3 = self.client("s3")
        try:
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
            keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
            return [key for key in keys if not key.endswith("/")]
        finally:
            s3.close()

    def start(self) -> Self:
        """Start the server and wait until it has its bucket."""
        self.process.start()
        self.process.wait_ready(self._has_bucket, START_TIMEOUT_S, "the stand-in of AWS")
        return self

    def _has_bucket(self) -> bool:
        s3 = self.client("s3")
        try:
            s3.create_bucket(
                Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION}
            )
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            return False
        finally:
            s3.close()
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
