"""What the tests of the table side share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from table_bench import Bench
from tidewater_core.crd.topic import TopicSpec


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.catalog.close()


@pytest.fixture
def fields() -> Callable[..., TopicSpec]:
    """Return a maker of typed topics."""

    def make(partition_by: list[str] | None = None, **columns: str) -> TopicSpec:
        listed = [
            {"name": name, "type": kind.removesuffix("!"), "required": kind.endswith("!")}
            for name, kind in columns.items()
        ]
        table = {} if partition_by is None else {"partitionBy": partition_by}
        return TopicSpec.model_validate({"schema": {"fields": listed}, "table": table})

    return make
