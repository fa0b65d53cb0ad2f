"""A stand-in of Azure's blob storage: `azurite`, an npm package, of which PyPI has no copy.

It is not part of `make test`: that needs no Node. `make test-azure` fetches and runs it. It knows
no hierarchical namespace (what Azure calls Data Lake Storage Gen2); pyarrow notices that and does
without.
"""

import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from pyarrow.fs import AzureFileSystem, FileSelector, FileType

from tidewater_testing.process import ManagedProcess, free_ports

START_TIMEOUT_S = 60.0
CONTAINER = "lake"
# azurite's own, which its documentation gives to everybody.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Azurite:
    """The emulator on a free port of the loopback with one container, `lake`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self._authority = f"127.0.0.1:{port}"
        node = shutil.which("node")
        program = os.environ.get("TIDEWATER_AZURITE")
        assert node, "Node is needed (Debian: apt-get install nodejs npm)"
        assert program, "run `make test-azure`, which fetches azurite"
        self.process = ManagedProcess(
            [
                node,
                program,
                *("--location", str(directory / "data")),
                *("--blobPort", str(port), "--skipApiVersionCheck", "--disableTelemetry"),
            ],
            log_file=directory / "azurite.log",
            directory=directory,
        )
        self._store = AzureFileSystem(
            account_name=ACCOUNT,
            account_key=KEY,
            blob_storage_authority=self._authority,
            dfs_storage_authority=self._authority,
            blob_storage_scheme="http",
            dfs_storage_scheme="http",
        )

    @property
    def properties(self) -> dict[str, str]:
        """The properties of a store here; a catalog's and a warehouse come to them."""
        return {
            "adls.account-name": ACCOUNT,
            "adls.account-key": KEY,
            "adls.blob-storage-authority": self._authority,
            "adls.dfs-storage-authority": self._authority,
            "adls.blob-storage-scheme": "http",
            "adls.dfs-storage-scheme": "http",
        }

    def files(self, folder: str) -> list[str]:
        """List the blobs of a folder of the container, without those that stand for folders."""
        selector = FileSelector(f"{CONTAINER}/{folder}", allow_not_found=True, recursive=True)
        found = self._store.get_file_info(selector)
        return [info.path for info in found if info.type is FileType.File]

    def start(self) -> Self:
        """Start the emulator and wait until it has its container."""
        self.process.start()
        self.process.wait_ready(self._has_container, START_TIMEOUT_S, "azurite")
        return self

    def _has_container(self) -> bool:
        try:
            self._store.create_dir(CONTAINER)
        except OSError:
            return False
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
