"""Tidewater's own Python client as a producer."""

import asyncio
import sys
import threading
import time
from typing import Any

import uvloop

from bench import driver, payload
from tidewater import AsyncProducer, Client
from tidewater.origin import parse_url

BODIES = 64
"""Different batches that bulk producers send in turn."""


class Producers:
    """The orders of a producer process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = Client(url, timeout_s=120)
        self._bodies: dict[str, list[bytes]] = {}
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def latency(self, topic: str, size: int, count: int) -> dict[str, Any]:
        """Time single messages over the blocking client, one in flight."""
        producer = self._client.producer(topic)
        messages = payload.messages(count + 20, size)
        for message in messages[:20]:
            producer.send(message)
        samples = []
        began_cpu = time.process_time()
        for message in messages[20:]:
            began = time.perf_counter()
            producer.send(message)
            samples.append((time.perf_counter() - began) * 1e6)
        return {"us": samples, "us_cpu": (time.process_time() - began_cpu) / count * 1e6}

    def latency_for(self, topic: str, size: int, seconds: float) -> dict[str, Any]:
        """Time single messages, one in flight, for some time."""
        producer = self._client.producer(topic)
        messages = payload.messages(1000, size)
        samples: list[float] = []
        deadline = time.perf_counter() + seconds
        while (began := time.perf_counter()) < deadline:
            producer.send(messages[len(samples) % 1000])
            samples.append((time.perf_counter() - began) * 1e6)
        return {"us": samples}

    def latency_async(self, topic: str, size: int, count: int) -> dict[str, Any]:
        """Time single messages over the asyncio client, one in flight."""

        async def run() -> list[float]:
            producer = AsyncProducer(parse_url(self._url), topic)
            messages = payload.messages(count + 20, size)
            for message in messages[:20]:
                await producer.send(message)
            samples = []
            for message in messages[20:]:
                began = time.perf_counter()
                await producer.send(message)
                samples.append((time.perf_counter() - began) * 1e6)
            await producer.close()
            return samples

        return {"us": self._runner.run(run())}

    def in_flight(
        self, topic: str, size: int, connections: int, depth: int, seconds: float
    ) -> dict[str, Any]:
        """Keep `depth` single messages in flight on each connection."""

        async def run() -> tuple[list[float], float]:
            origin = parse_url(self._url)
            producers = [AsyncProducer(origin, topic) for _ in range(connections)]
            messages = payload.messages(1000, size)
            await asyncio.gather(*(p.send(messages[0]) for p in producers))
            samples: list[float] = []
            began = time.perf_counter()
            deadline = began + seconds

            async def worker(producer: AsyncProducer) -> None:
                while (start := time.perf_counter()) < deadline:
                    await producer.send(messages[len(samples) % 1000])
                    samples.append((time.perf_counter() - start) * 1e6)

            await asyncio.gather(*(worker(p) for p in producers for _ in range(depth)))
            elapsed_s = time.perf_counter() - began
            for producer in producers:
                await producer.close()
            return samples, elapsed_s

        samples, elapsed_s = self._runner.run(run())
        return {"us": samples, "count": len(samples), "elapsed_s": elapsed_s}

    def prepare(self, kind: str, rows: int, size: int) -> dict[str, Any]:
        """Encode the batches that `bulk` and `paced` send."""
        self._bodies[kind] = payload.bodies(kind, BODIES, rows, size)
        return {"body_bytes": len(self._bodies[kind][0])}

    def bulk(
        self,
        topic: str,
        kind: str,
        connections: int,
        depth: int,
        seconds: float = 1e9,
        batches: int = 1 << 60,
    ) -> dict[str, Any]:
        """Send prepared batches as fast as they are acknowledged, `depth` on each connection."""
        bodies = self._bodies[kind]
        samples: list[float] = []
        rows = sent = 0

        async def run() -> float:
            origin = parse_url(self._url)
            producers = [AsyncProducer(origin, topic) for _ in range(connections)]
            began = time.perf_counter()
            deadline = began + seconds

            async def worker(producer: AsyncProducer) -> None:
                nonlocal rows, sent
                while sent < batches and (start := time.perf_counter()) < deadline:
                    sent += 1
                    produced = await producer.send_body(bodies[sent % BODIES], kind)
                    samples.append((time.perf_counter() - start) * 1e6)
                    rows += sum(ack.count for ack in produced.acks)

            await asyncio.gather(*(worker(p) for p in producers for _ in range(depth)))
            elapsed_s = time.perf_counter() - began
            for producer in producers:
                await producer.close()
            return elapsed_s

        wall = time.time()
        elapsed_s = self._runner.run(run())
        return {
            "rows": rows,
            "us": samples,
            "elapsed_s": elapsed_s,
            "began_at": wall,
            "ended_at": wall + elapsed_s,
        }

    def paced(
        self, topic: str, kind: str, rows: int, rate: float, seconds: float, threads: int = 2
    ) -> dict[str, Any]:
        """Send prepared batches at a steady rate and note when each was acknowledged."""
        bodies = self._bodies[kind]
        acks: list[tuple[float, int, int]] = []
        gap_s = rows / rate
        began = time.perf_counter()
        count = int(seconds / gap_s)
        late_s = [0.0] * threads

        def run(number: int) -> None:
            with Client(self._url, timeout_s=120) as client:
                producer = client.producer(topic)
                for i in range(number, count, threads):
                    due = began + i * gap_s
                    wait_s = due - time.perf_counter()
                    if wait_s > 0:
                        time.sleep(wait_s)
                    else:
                        late_s[number] = max(late_s[number], -wait_s)
                    for ack in producer.send_body(bodies[i % BODIES], kind).acks:
                        acks.append((time.time(), ack.partition, ack.offset + ack.count))

        workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return {
            "acks": acks,
            "rows": count * rows,
            "elapsed_s": time.perf_counter() - began,
            "late_s": max(late_s),
        }

    def commit_each(self, topic: str, count: int) -> dict[str, Any]:
        """Send a message and flush, again and again: each is one commit."""
        producer = self._client.producer(topic)
        samples = []
        for message in payload.messages(count, 100):
            producer.send(message)
            began = time.perf_counter()
            self._client.admin.flush(topic)
            samples.append((time.perf_counter() - began) * 1e3)
        return {"ms": samples}


def main(url: str) -> None:
    """Serve."""
    producers = Producers(url)
    names = ("latency", "latency_for", "latency_async", "in_flight", "prepare", "bulk", "paced")
    driver.serve({name: getattr(producers, name) for name in (*names, "commit_each")})


if __name__ == "__main__":
    main(sys.argv[1])
