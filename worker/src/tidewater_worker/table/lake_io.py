"""A FileIO for object stores: pyiceberg's, made right for Azure's and Google's.

    abfss://container@account.dfs.core.windows.net/path

is how Spark, Trino and catalogs write a location on Azure. pyiceberg takes everything before the
path for the name of a container, and knows only `abfss://container/path`; here both are the same.

Google's client repeats a failed request for minutes before it says a word; here it gives up when
other requests do, so that the worker's state can tell what is wrong.
"""

from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlparse

from pyarrow.fs import FileSystem, GcsFileSystem
from pyiceberg.io import ADLS_ACCOUNT_NAME
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT, Properties

from tidewater_worker.table.patience import read_timeout_s

AZURE_SCHEMES: Final = frozenset({"abfs", "abfss", "wasb", "wasbs"})


class LakeFileIO(PyArrowFileIO):
    """PyArrowFileIO for `s3://`, `gs://` and both forms of `abfss://`."""

    @staticmethod
    def parse_location(location: str, properties: Properties = EMPTY_DICT) -> tuple[str, str, str]:
        """Return scheme, authority, and the path that begins with the bucket or container."""
        scheme, authority, path = PyArrowFileIO.parse_location(location, properties)
        container, at, _ = authority.partition("@")
        if scheme in AZURE_SCHEMES and at:
            path = f"{container}{urlparse(location).path}"
        return scheme, authority, path

    def _initialize_fs(self, scheme: str, netloc: str | None = None) -> FileSystem:
        """Open the store; an Azure location names its account, if the settings do not."""
        account = account_of(netloc or "")
        if scheme not in AZURE_SCHEMES or not account or ADLS_ACCOUNT_NAME in self.properties:
            return super()._initialize_fs(scheme, netloc)
        named: dict[str, Any] = {**self.properties, ADLS_ACCOUNT_NAME: account}
        return PyArrowFileIO(named)._initialize_fs(scheme, netloc)

    def _initialize_gcs_fs(self) -> FileSystem:
        made = super()._initialize_gcs_fs()
        # What it would be pickled by is all that pyiceberg has set; what is not set is empty there.
        options: dict[str, Any] = made.__reduce__()[1][0]
        limit = timedelta(seconds=read_timeout_s(self.properties))
        given = {key: value for key, value in options.items() if value}
        return GcsFileSystem(**{**given, "retry_time_limit": limit})


def account_of(authority: str) -> str:
    """Return the storage account in an Azure location's authority; empty if it names none."""
    _, _, host = authority.partition("@")
    return host.partition(".")[0]
