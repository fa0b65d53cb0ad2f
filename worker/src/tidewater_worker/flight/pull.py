"""Batches from the event loop's readers for a Flight thread, one step ahead and no further."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Final

import pyarrow as pa

STEP_BYTES: Final = 4 * 1024 * 1024
STEP_BATCHES: Final = 1024
JOIN_BELOW_ROWS: Final = 4096
"""Batches that are smaller on average are joined: a batch has a cost of its own."""


class Pull:
    """An asynchronous stream of batches, taken from another thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, batches: AsyncIterator[pa.RecordBatch]
    ) -> None:
        self._loop = loop
        self._batches = batches
        self._step: Future[list[pa.RecordBatch]] | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield until the stream ends; what is left is let go of at the end, whatever ends it."""
        try:
            self._step = self._ask(self._next_step())
            while step := self._step.result():
                self._step = self._ask(self._next_step())
                yield from joined(step)
        finally:
            self.close()

    def _ask(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _next_step(self) -> list[pa.RecordBatch]:
        step: list[pa.RecordBatch] = []
        size = 0
        async for batch in self._batches:
            step.append(batch)
            size += batch.nbytes
            if size >= STEP_BYTES or len(step) >= STEP_BATCHES:
                break
        return step

    def close(self) -> None:
        """Stop reading."""
        step, self._step = self._step, None
        if step is not None and not self._loop.is_closed():
            self._ask(self._let_go(step))

    async def _let_go(self, step: Future[list[pa.RecordBatch]]) -> None:
        if not step.done():
            step.cancel()
            await asyncio.sleep(0)
        await self._batches.aclose()  # type: ignore[attr-defined]


def joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Join small batches of a step."""
    rows = sum(batch.num_rows for batch in batches)
    if len(batches) == 1 or rows >= JOIN_BELOW_ROWS * len(batches):
        return batches
    return [pa.concat_batches(batches)]
