"""NATS JetStream's own Python client (nats-py) as a producer."""

import asyncio
import sys
import time
from typing import Any

import nats
import uvloop
from nats.aio.client import Client as Connection
from nats.js.api import StorageType, StreamConfig

from bench import driver, payload

PENDING_MAX = 4000
"""Publishes without an ack: nats-py's own default bound for asynchronous publishing."""
TIMEOUT_S = 60.0


class Producers:
    """The orders of a producer process."""

    def __init__(self, url: str) -> None:
        self._url = url
        # The same event loop as for the other asyncio client.
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._main = self._runner.run(self._connect())
        self._runner.run(self._add_stream())

    async def _connect(self) -> Connection:
        for attempt in range(100):
            try:
                return await nats.connect(self._url, allow_reconnect=False)
            except (OSError, nats.errors.Error):
                if attempt == 99:
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError

    async def _add_stream(self) -> None:
        await self._main.jetstream().add_stream(
            StreamConfig(name="bench", subjects=["bench.>"], storage=StorageType.FILE)
        )

    def latency(self, size: int, count: int) -> dict[str, Any]:
        """Time single messages, one in flight."""

        async def run() -> list[float]:
            stream = self._main.jetstream(timeout=TIMEOUT_S)
            messages = payload.messages(count + 20, size)
            for message in messages[:20]:
                await stream.publish("bench.ack", message)
            samples = []
            for message in messages[20:]:
                began = time.perf_counter()
                await stream.publish("bench.ack", message)
                samples.append((time.perf_counter() - began) * 1e6)
            return samples

        return {"us": self._runner.run(run())}

    def in_flight(self, size: int, connections: int, depth: int, seconds: float) -> dict[str, Any]:
        """Keep `depth` single messages in flight on each connection."""

        async def run() -> tuple[list[float], float]:
            opened = [await self._connect() for _ in range(connections)]
            streams = [connection.jetstream(timeout=TIMEOUT_S) for connection in opened]
            messages = payload.messages(1000, size)
            samples: list[float] = []
            began = time.perf_counter()
            deadline = began + seconds

            async def worker(number: int) -> None:
                while (start := time.perf_counter()) < deadline:
                    message = messages[len(samples) % 1000]
                    await streams[number].publish("bench.many", message)
                    samples.append((time.perf_counter() - start) * 1e6)

            await asyncio.gather(*(worker(n) for n in range(connections) for _ in range(depth)))
            elapsed_s = time.perf_counter() - began
            for connection in opened:
                await connection.close()
            return samples, elapsed_s

        samples, elapsed_s = self._runner.run(run())
        return {"us": samples, "count": len(samples), "elapsed_s": elapsed_s}

    def bulk(self, size: int, seconds: float) -> dict[str, Any]:
        """Publish asynchronously, with as many acks outstanding as the client allows."""

        async def run() -> tuple[int, float]:
            stream = self._main.jetstream(timeout=TIMEOUT_S, publish_async_max_pending=PENDING_MAX)
            messages = payload.messages(1000, size)
            began = time.perf_counter()
            deadline = began + seconds
            count = 0
            acks = []
            while time.perf_counter() < deadline:
                for message in messages[:100]:
                    acks.append(await stream.publish_async("bench.bulk", message))
                count += 100
                if len(acks) >= 2 * PENDING_MAX:
                    await asyncio.gather(*acks[:PENDING_MAX])
                    del acks[:PENDING_MAX]
            await asyncio.gather(*acks)
            return count, time.perf_counter() - began

        count, elapsed_s = self._runner.run(run())
        return {"rows": count, "elapsed_s": elapsed_s}


def main(url: str) -> None:
    """Serve."""
    producers = Producers(url)
    driver.serve({name: getattr(producers, name) for name in ("latency", "in_flight", "bulk")})


if __name__ == "__main__":
    main(sys.argv[1])
