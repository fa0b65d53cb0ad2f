"""What the two ends of the local socket do about an other end that is slow, stopped or gone."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tidewater_testing.process import wait_until
from tidewater_worker.link import client, wire
from tidewater_worker.link.client import TableLink
from tidewater_worker.link.server import _Connection, _Offered

BATCH = pa.RecordBatch.from_pydict({"tw_offset": [1]})


class Engine:
    """Reads that wait until they are let go on."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.begun: list[str] = []
        self.open = 0
        self.lingering: Callable[[], None] = lambda: None

    def history(self, topic: str, *_: Any) -> Iterator[pa.RecordBatch]:
        self.begun.append(topic)
        self.lingering()
        return self._rows()

    def _rows(self) -> Iterator[pa.RecordBatch]:
        self.open += 1
        try:
            while True:
                yield BATCH
                yield pa.RecordBatch.from_pydict({"tw_offset": [0] * 1_000_000})
        finally:
            self.open -= 1

    def bounds(self, topic: str) -> dict[int, int]:
        self.begun.append(topic)
        self.going.wait(10)
        return {}


class Wire:
    """A connection of the table process, with one thread for calls, and the edge's end of it."""

    def __init__(self, engine: Engine, threads: int) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self.pool = ThreadPoolExecutor(threads)
        made: Any = engine
        self.connection = _Connection(theirs, made, self.pool, _Offered())
        self.thread = threading.Thread(target=self.connection.run_to_end, daemon=True)
        self.thread.start()
        self.stream = ours.makefile("rb")

    def say(self, **message: Any) -> None:
        self._socket.sendall(wire.pack_json(message))

    def history(self, number: int, topic: str) -> None:
        self.say(
            op="history", id=number, topic=topic, partition=0, start=0, end=9, max_rows=9
        )  # fmt: skip

    def hear(self) -> bytes:
        length, _ = wire.unpack_head(self.stream.read(wire.HEAD_BYTES))
        return self.stream.read(length)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)
        self.connection.close()
        self.pool.shutdown()
        self.stream.close()
        self._socket.close()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_what_nobody_waits_for_any_more_is_not_begun(engine: Engine) -> None:
    """G6: calls that were given up would keep those behind them waiting once it goes on again."""
    end = Wire(engine, 1)
    end.say(op="bounds", id=1, topic="slow")
    for number in range(2, 50):
        end.history(number, "given-up")
        end.say(op="cancel", id=number)
    end.say(op="bounds", id=50, topic="given-up")
    end.say(op="cancel", id=50)
    end.say(op="bounds", id=51, topic="wanted")
    wait_until(lambda: engine.begun == ["slow"], 10, "the first call began")
    end.say(op="ping", id=52)  # answered on the way: all before it has been heard
    assert msgspec.json.decode(end.hear())["id"] == 52
    engine.going.set()
    assert [msgspec.json.decode(end.hear())["id"] for _ in range(2)] == [1, 51]
    assert engine.begun == ["slow", "wanted"]
    end.close()


def test_a_read_that_is_given_up_as_it_begins_is_closed(engine: Engine) -> None:
    """It pins a snapshot, and has threads and memory of its own."""
    end = Wire(engine, 2)

    def lingering() -> None:
        end.say(op="cancel", id=1)
        end.say(op="bounds", id=2, topic="behind it")
        wait_until(lambda: "behind it" in engine.begun, 10, "the cancel was heard")

    engine.lingering, engine.open = lingering, 0
    engine.going.set()
    end.history(1, "given up")
    heard = [end.hear()]
    wait_until(lambda: len(engine.begun) == 2 and end.pool._work_queue.empty(), 10, "done")
    end.say(op="ping", id=3)
    while not heard[-1].startswith(b"{") or msgspec.json.decode(heard[-1])["id"] != 3:
        heard.append(end.hear())
    wait_until(lambda: engine.open == 0, 5, "the read is closed")
    end.close()


def test_an_edge_that_goes_leaves_no_read_open(engine: Engine) -> None:
    end = Wire(engine, 1)
    end.history(1, "orders")
    end.hear()
    assert engine.open == 1
    end.close()
    wait_until(lambda: engine.open == 0, 5, "the read is closed")


async def test_what_the_table_process_does_not_take_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6: one that is stopped would else fill the edge's memory with what is durable."""
    bound = 4 * 1024 * 1024
    monkeypatch.setattr(client, "UNSENT_BYTES_MAX", bound)
    connected: list[asyncio.StreamWriter] = []
    over = asyncio.Event()

    async def take_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        await over.wait()

    path = tmp_path / "table.sock"
    server = await asyncio.start_unix_server(take_nothing, path)
    link = TableLink(path, list, lambda _: None)
    link.start()
    unsent = 0
    ends = {f"topic-{number}": {0: number} for number in range(10_000)}
    async with asyncio.timeout(20):
        while len(connected) < 3:
            link.durable(ends)
            writer = link._writer
            if writer is not None:
                unsent = max(unsent, writer.transport.get_write_buffer_size())
            await asyncio.sleep(0)
    assert bound / 2 < unsent <= bound, f"G6 Bounded: {unsent} bytes wait"
    await link.close()
    over.set()
    for writer in connected:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    server.close()
    await server.wait_closed()


async def test_a_call_that_is_given_up_is_taken_back(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                length, _ = wire.unpack_head(await reader.readexactly(wire.HEAD_BYTES))
                heard.append(msgspec.json.decode(await reader.readexactly(length)))
        except asyncio.IncompleteReadError:
            writer.close()
            await writer.wait_closed()
            gone.set()

    path = tmp_path / "table.sock"
    server = await asyncio.start_unix_server(listen, path)
    link = TableLink(path, list, lambda _: None)
    link.start()
    async with asyncio.timeout(20):
        while not link.is_connected:
            await asyncio.sleep(0.01)
        call = asyncio.create_task(link.bounds("shop/orders"))
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        while len(heard) < 3:
            await asyncio.sleep(0.01)
    assert [message["op"] for message in heard] == ["assign", "bounds", "cancel"]
    assert heard[1]["id"] == heard[2]["id"]
    await link.close()
    await gone.wait()
    server.close()
    await server.wait_closed()


def test_a_message_that_cannot_be_taken_ends_no_connection(engine: Engine) -> None:
    """G7: the table process was deaf from then on, and looked as if it were connected."""
    end = Wire(engine, 1)
    end._socket.settimeout(10)
    end.say(op="durable", ends={"shop/orders": "nonsense"})
    end.say(op="assign", topics="nonsense")
    end.say(op="flush", id=1, topic="shop/orders", upto={}, timeout_s="nonsense")
    end.say(op="ping", id=2)
    refused, pong = (msgspec.json.decode(end.hear()) for _ in range(2))
    assert (refused["id"], refused["error"]["reason"]) == (1, "TableProcessError")
    assert pong == {"id": 2, "result": None}
    end.close()
