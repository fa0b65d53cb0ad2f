"""A worker on Azure's blob storage, in both forms of its locations: `make test-azure`.

Not found by `make test`, since the only emulator there is, azurite, needs Node.
"""

from pathlib import Path

import pytest

from tidewater_testing.parts.azurite import ACCOUNT, CONTAINER, Azurite
from tidewater_testing.stores import live_and_go

LAKE_IO = "tidewater_worker.table.lake_io.LakeFileIO"

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("root", "reader"),
    [
        (f"abfss://{CONTAINER}@{ACCOUNT}.dfs.core.windows.net", LAKE_IO),
        (f"abfs://{CONTAINER}", "pyiceberg.io.pyarrow.PyArrowFileIO"),
    ],
)
async def test_a_topic_lives_and_goes(tmp_path: Path, root: str, reader: str) -> None:
    """What pyiceberg brings knows the second form alone: for the first, others take our FileIO."""
    with Azurite(tmp_path / "azurite") as azure:
        catalog = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"{root}/warehouse",
            **azure.properties,
        }
        await live_and_go(
            tmp_path / "w",
            catalog,
            "shop/orders",
            lambda: azure.files("warehouse/shop/orders"),
            read_by={**catalog, "py-io-impl": reader},
        )
