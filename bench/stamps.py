"""Messages that carry the moment at which they were sent, for processes of one machine.

`perf_counter` is the kernel's monotonic clock, which all processes share.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

DIGITS = 20


def stamp(size: int) -> bytes:
    """Return a message of `size` bytes that says when it was made."""
    return (b"%0*d" % (DIGITS, time.perf_counter_ns())).ljust(size, b".")


def age_us(message: bytes) -> float:
    """Return how long ago a message was made."""
    return (time.perf_counter_ns() - int(message[:DIGITS])) / 1000


async def paced(
    send: Callable[[bytes], Awaitable[object]], rate: float, seconds: float, size: int
) -> dict[str, Any]:
    """Send at a steady rate, whatever the answers do; wait for all of them at the end."""
    count = int(rate * seconds)
    began = time.perf_counter()
    late_s = 0.0
    under_way: set[asyncio.Task[object]] = set()

    async def one() -> object:
        return await send(stamp(size))

    for number in range(count):
        wait_s = began + number / rate - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        else:
            late_s = max(late_s, -wait_s)
        task = asyncio.ensure_future(one())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    return {"count": count, "elapsed_s": time.perf_counter() - began, "late_s": late_s}
