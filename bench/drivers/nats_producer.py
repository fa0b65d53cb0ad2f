"""NATS JetStream's own Python client (nats-py) as a producer."""

import asyncio
import json
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
            StreamConfig(
                name="bench", subjects=["bench.>"], storage=StorageType.FILE, allow_atomic=True
            )
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

    def bulk_atomic(self, size: int, rows: int, writers: int, seconds: float) -> dict[str, Any]:
        """Publish atomic batches: one ack, and one sync, for `rows` messages."""

        async def run() -> tuple[int, float]:
            messages = payload.messages(rows, size)
            began = time.perf_counter()
            deadline = began + seconds
            count = 0

            async def writer(number: int) -> None:
                nonlocal count
                sent = 0
                while time.perf_counter() < deadline:
                    sent += 1
                    await self._atomic(f"{number}-{began}-{sent}", messages)
                    count += rows

            await asyncio.gather(*(writer(number) for number in range(writers)))
            return count, time.perf_counter() - began

        count, elapsed_s = self._runner.run(run())
        return {"rows": count, "elapsed_s": elapsed_s}

    async def _atomic(self, batch: str, messages: list[bytes]) -> None:
        headers = {"Nats-Batch-Id": batch}
        for number, message in enumerate(messages[:-1], 1):
            headers["Nats-Batch-Sequence"] = str(number)
            await self._main.publish("bench.bulk", message, headers=headers)
        headers |= {"Nats-Batch-Sequence": str(len(messages)), "Nats-Batch-Commit": "1"}
        answer = await self._main.request(
            "bench.bulk", messages[-1], timeout=TIMEOUT_S, headers=headers
        )
        ack = json.loads(answer.data)
        if ack.get("count") != len(messages):
            raise AssertionError(f"the batch was not stored: {ack}")


def main(url: str) -> None:
    """Serve."""
    producers = Producers(url)
    driver.serve(
        {name: getattr(producers, name) for name in ("latency", "in_flight", "bulk", "bulk_atomic")}
    )


if __name__ == "__main__":
    main(sys.argv[1])
