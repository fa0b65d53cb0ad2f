"""Consumers of the Python client among the others: sockets, prefetch, batched acks."""

import asyncio
import random
import time

from tidewater import AsyncClient, AsyncConsumer, ConsumerOptions
from tidewater.errors import PASSING
from tidewater_testing.chaos.history import Ack, Delivery, Story

TAKE_MAX = 20
WAIT_S = 0.5


class ClientConsumer:
    """Takes messages, acknowledges most of them, gives some back."""

    def __init__(
        self, story: Story, topic: str, subscription: str, address: str, number: int, seed: int
    ) -> None:
        self._draw = random.Random(f"{seed}/{subscription}/client/{number}")
        self._story, self._topic, self._subscription = story, topic, subscription
        self._url, self.name = f"http://{address}", f"client{number}"
        self.is_steady = False
        """From now on everything is acknowledged."""

    async def run(self, over: asyncio.Event) -> None:
        """Consume until it is over."""
        options = ConsumerOptions(name=self.name, prefetch=50)
        async with AsyncClient(self._url) as client:
            while not over.is_set():
                consumer = client.consumer(self._topic, self._subscription, options)
                try:
                    await consumer.__aenter__()
                except PASSING:  # its worker is away just when it comes
                    await asyncio.sleep(WAIT_S)
                    continue
                try:
                    while not over.is_set():
                        await self._take(consumer)
                finally:
                    await consumer.close()

    async def _take(self, consumer: AsyncConsumer) -> None:
        for message in await consumer.receive_many(TAKE_MAX, WAIT_S):
            place = (message.partition, message.offset)
            key, value = (message.key or b"").decode(), bytes(message.value).decode()
            # When it was fetched only the client knows: a delivery after its ack is not judged.
            self._story.deliveries.append(Delivery(place, key, value, 0.0, self.name))
            if not self.is_steady and self._draw.random() < 0.05:
                message.nack()
                continue
            message.ack()
            self._story.acks.append(Ack(place, time.monotonic()))
