"""AWS Glue as the catalog.

pyiceberg checks our requirements against the metadata that the table's Glue entry names, writes the
new metadata, and updates the entry with the `VersionId` it has read: Glue refuses an entry that
has changed in between, so a commit lands on the very state that was checked, or not at all.

What is ours is the client. pyiceberg's waits a minute for each answer and tries again ten times: a
Glue that hangs would hold the table process for minutes, and a commit whose answer was lost would
be sent again and come back as refused. Imported only where Glue is configured: it costs memory.
"""

from typing import Any

import boto3
from botocore.config import Config
from pyiceberg.catalog.glue import GlueCatalog, _register_glue_catalog_id_with_glue_client

from tidewater_worker.table.lean import LeanCatalog
from tidewater_worker.table.patience import connect_timeout_s, read_timeout_s


class LeanGlueCatalog(LeanCatalog, GlueCatalog):
    """GlueCatalog with cheap commits."""


def open_glue(name: str, properties: dict[str, str]) -> GlueCatalog:
    """Open a Glue catalog; credentials that are not given are found as AWS's tools find them."""
    client = _client(properties)
    if catalog_id := properties.get("glue.id"):
        _register_glue_catalog_id_with_glue_client(client, catalog_id)
    return LeanGlueCatalog(name, client, **properties)


def _client(properties: dict[str, str]) -> Any:
    def given(key: str) -> str | None:
        return properties.get(f"glue.{key}") or properties.get(f"client.{key}")

    session = boto3.Session(
        profile_name=given("profile-name"),
        region_name=given("region"),
        aws_access_key_id=given("access-key-id"),
        aws_secret_access_key=given("secret-access-key"),
        aws_session_token=given("session-token"),
    )
    return session.client(
        "glue",
        endpoint_url=properties.get("glue.endpoint"),
        config=Config(
            connect_timeout=connect_timeout_s(properties),
            read_timeout=read_timeout_s(properties),
            # Who asks tries again, after having read back what became of a commit.
            retries={"total_max_attempts": 1},
        ),
    )
