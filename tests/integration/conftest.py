"""One embedded worker for all API tests, with the topics that they use."""

from collections.abc import Iterator

import pytest

from tidewater_core.settings import Limits
from tidewater_core.units import ByteSize
from tidewater_testing.parts.worker import Worker, topic_manifest

TYPED_SCHEMA = {
    "fields": [
        {"name": "id", "type": "long", "required": True},
        {"name": "name", "type": "string"},
        {"name": "amount", "type": "decimal(10,2)"},
        {"name": "ratio", "type": "double"},
        {"name": "day", "type": "date"},
        {"name": "at", "type": "timestamptz"},
        {"name": "ok", "type": "boolean"},
        {"name": "tags", "type": "list<string>"},
        {"name": "scores", "type": "map<string,long>"},
        {"name": "uid", "type": "uuid"},
        {"name": "small", "type": "int"},
        {"name": "raw", "type": "binary"},
    ]
}


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker with a raw topic of three partitions, one of one, and a typed one."""
    manifests = [
        topic_manifest("shop/orders", {"partitions": 3}),
        topic_manifest("shop/single", {"partitions": 1}),
        topic_manifest("shop/typed", {"partitions": 1, "schema": TYPED_SCHEMA}),
    ]
    limits = Limits(
        request_bytes_max=ByteSize("2Mi"),
        message_bytes_max=ByteSize("1Mi"),
        batch_rows_max=5_000,
    )
    directory = tmp_path_factory.mktemp("worker")
    with Worker(directory, manifests, limits=limits) as part:
        yield part
