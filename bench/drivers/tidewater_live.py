"""Tidewater's own Python client as a producer at a steady pace and as a consumer that follows."""

import asyncio
import sys
import time
from typing import Any

import uvloop

from bench import driver, stamps
from tidewater import AsyncClient, ConsumerOptions

QUIET_S = 5.0
"""A consumer that has heard nothing for this long has all that will come."""


class Live:
    """The orders of a live client; one process is told to produce, another to consume."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def ready(self) -> dict[str, Any]:
        """Answer as soon as orders can be taken."""
        return {}

    def produce(self, topic: str, rate: float, seconds: float, size: int) -> dict[str, Any]:
        """Send single messages when they are due, whether or not earlier ones were answered."""

        async def run() -> dict[str, Any]:
            async with AsyncClient(self._url) as client, client.producer(topic) as producer:
                return await stamps.paced(producer.send, rate, seconds, size)

        return self._runner.run(run())

    def consume(self, topic: str, subscription: str, count: int) -> dict[str, Any]:
        """Take and acknowledge messages; note how old each was when the program had it."""

        async def run() -> dict[str, Any]:
            samples: list[float] = []
            async with AsyncClient(self._url) as client:
                options = ConsumerOptions(auto_ack=True)
                async with client.consumer(topic, subscription, options) as consumer:
                    while len(samples) < count:
                        message = await consumer.receive(QUIET_S if samples else 30.0)
                        if message is None:
                            break
                        samples.append(stamps.age_us(message.value))
                        message.ack()
                    await consumer.flush()
                    return {"us": samples, "acked": consumer.tally.acked}

        return self._runner.run(run())

    def follow(self, topic: str, count: int) -> dict[str, Any]:
        """Read the log's end without a subscription: one long poll after the other."""

        async def run() -> dict[str, Any]:
            samples: list[float] = []
            async with AsyncClient(self._url) as client:
                reader = client.reader(topic)
                at = (await reader.page(0, 0, limit=1)).end_offset
                quiet_since = time.perf_counter()
                while len(samples) < count and time.perf_counter() - quiet_since < 30:
                    page = await reader.page(0, at, wait_ms=1000)
                    samples += [stamps.age_us(message.value) for message in page.messages]
                    if page.messages:
                        quiet_since = time.perf_counter()
                    at = page.next_offset
            return {"us": samples}

        return self._runner.run(run())


def main(url: str) -> None:
    """Serve."""
    live = Live(url)
    driver.serve({name: getattr(live, name) for name in ("ready", "produce", "consume", "follow")})


if __name__ == "__main__":
    main(sys.argv[1])
