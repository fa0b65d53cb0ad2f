"""NATS JetStream's own Python client as a producer at a steady pace and as a consumer."""

import asyncio
import sys
from typing import Any

import nats
import uvloop
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig

from bench import driver, stamps

QUIET_S = 5.0
TIMEOUT_S = 60.0
STREAM = "live"


class Live:
    """The orders of a live client; one process is told to produce, another to consume."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._main = self._runner.run(_connect(url))
        self._runner.run(self._add_stream())

    async def _add_stream(self) -> None:
        await self._main.jetstream().add_stream(
            StreamConfig(name=STREAM, subjects=[f"{STREAM}.>"], storage=StorageType.FILE)
        )

    def ready(self) -> dict[str, Any]:
        """Answer as soon as orders can be taken."""
        return {}

    def produce(self, rate: float, seconds: float, size: int) -> dict[str, Any]:
        """Publish single messages when they are due, whether or not earlier ones were answered."""

        async def run() -> dict[str, Any]:
            stream = self._main.jetstream(timeout=TIMEOUT_S)

            async def send(message: bytes) -> object:
                return await stream.publish(f"{STREAM}.all", message)

            return await stamps.paced(send, rate, seconds, size)

        return self._runner.run(run())

    def consume(self, count: int) -> dict[str, Any]:
        """Take and acknowledge what is pushed; note how old each message was."""

        async def run() -> dict[str, Any]:
            samples: list[float] = []
            changed = asyncio.Event()

            async def take(message: Msg) -> None:
                samples.append(stamps.age_us(message.data))
                await message.ack()
                changed.set()

            config = ConsumerConfig(
                ack_policy=AckPolicy.EXPLICIT, deliver_policy=DeliverPolicy.NEW, ack_wait=30
            )
            subscription = await self._main.jetstream().subscribe(
                f"{STREAM}.all", cb=take, manual_ack=True, config=config
            )
            while len(samples) < count:
                changed.clear()
                try:
                    await asyncio.wait_for(changed.wait(), QUIET_S if samples else 30.0)
                except TimeoutError:
                    break
            await self._main.flush()
            await subscription.unsubscribe()
            return {"us": samples}

        return self._runner.run(run())


async def _connect(url: str) -> Connection:
    for attempt in range(100):
        try:
            return await nats.connect(url, allow_reconnect=False)
        except (OSError, nats.errors.Error):
            if attempt == 99:
                raise
            await asyncio.sleep(0.1)
    raise AssertionError


def main(url: str) -> None:
    """Serve."""
    live = Live(url)
    driver.serve({name: getattr(live, name) for name in ("ready", "produce", "consume")})


if __name__ == "__main__":
    main(sys.argv[1])
