"""Following a partition over Flight ends with the permission, also amid a long history."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tidewater_core.errors import Forbidden
from tidewater_worker.flight.server import FlightServer

SCHEMA = pa.schema([("tw_offset", pa.int64())])
ROWS = 2_000


class Guard:
    """Allows until it is told not to."""

    recheck_s = 0.0

    def __init__(self) -> None:
        self.is_allowed = True

    async def check(self, *_: object) -> None:
        if not self.is_allowed:
            raise Forbidden("Forbidden", "no more")


class Server(FlightServer):
    """Has one partition with a history, and nothing behind it."""

    async def _follow(self, *_: object) -> Any:
        async def batches(_rows: int) -> AsyncIterator[pa.RecordBatch]:
            # As large as those of the table: none are joined.
            for at in range(ROWS):
                yield pa.record_batch([pa.array(range(at * 5_000, (at + 1) * 5_000))], SCHEMA)

        async def wait_past(_: float) -> bool:
            return True

        return SimpleNamespace(
            schema=SCHEMA, offset=0, end=0, lost=lambda *_: [], batches=batches,
            wait_past=wait_past,
        )  # fmt: skip


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(asyncio.sleep(0.05))  # the reader lets go
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.mark.timeout(60)
def test_who_may_no_more_is_cut_off_amid_history(loop: asyncio.AbstractEventLoop) -> None:
    guard: Any = Guard()
    node: Any = SimpleNamespace(
        settings=SimpleNamespace(listen_host="127.0.0.1"), topic=lambda *_: None
    )
    server = Server(node, None, loop, 0, guard)  # type: ignore[arg-type]
    with flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as client:
        to = flight.FlightDescriptor.for_command(b'{"topic":"shop/orders","partition":0}')
        writer, reader = client.do_exchange(to)
        count = 0

        def read_all() -> None:
            nonlocal count
            while count < ROWS:
                count += reader.read_chunk().data is not None
                guard.is_allowed = False

        with pytest.raises(flight.FlightUnauthorizedError):
            read_all()
        with pytest.raises(flight.FlightUnauthorizedError):
            writer.close()
    assert count < ROWS
    assert server.stop()
