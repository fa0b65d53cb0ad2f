"""What becomes of a stream's other batches when one is refused."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tidewater_core.errors import Retryable
from tidewater_worker.api.produce import Answer
from tidewater_worker.flight.put import PutStream
from tidewater_worker.flight.tickets import Put
from tidewater_worker.log.producers import Stored

ROWS = pa.record_batch({"value": [b"x"]})


class Worker:
    """Takes batches and answers them later."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def decoder(self, _topic: object) -> Any:
        return SimpleNamespace(batch=lambda data: data)

    def submit(self, *given: Any, nbytes: int) -> None:
        self.taken.append(given[5])

    def answer(self, number: int, result: Stored | Retryable) -> None:
        answer = Answer(1, self.taken[number])
        answer.one(number, result)


@pytest.mark.timeout(30)
async def test_each_batch_has_its_own_answer() -> None:
    topic = SimpleNamespace(counters={"errors": 0, "messages": 0})
    node: Any = SimpleNamespace(
        topic=lambda *_: topic,
        admit=lambda: None,
        inflight_bytes=0,
        clock=SimpleNamespace(monotonic=lambda: 0.0),
    )
    worker: Any = Worker()
    said: list[dict[str, Any]] = []
    may_go_on = asyncio.Event()
    loop = asyncio.get_running_loop()
    left = 3

    def read_chunk() -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise StopIteration
        if left == 0:  # the last one comes after the refusal
            asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result()
        return SimpleNamespace(data=ROWS, app_metadata=None)

    reader = SimpleNamespace(read_chunk=read_chunk)
    writer = SimpleNamespace(write=lambda data: said.append(msgspec.json.decode(data)))
    stream = PutStream(node, worker, loop, Put(topic="shop/orders"))
    running = asyncio.create_task(asyncio.to_thread(stream.run, reader, writer))
    while len(worker.taken) < 2:
        await asyncio.sleep(0.001)
    worker.answer(0, Retryable("LogWriteFailed", "the disk of partition 0"))
    worker.answer(1, Stored(7, 1))
    may_go_on.set()
    with pytest.raises(Retryable, match="LogWriteFailed"):
        await running
    assert len(worker.taken) == 2, "what comes after the refusal is not stored"
    assert [(one["batch"], "acks" in one) for one in said] == [(0, False), (1, True)]
    assert node.inflight_bytes == 0
