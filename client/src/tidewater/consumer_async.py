"""A consumer of a subscription for asyncio programs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final, Self, cast

from tidewater.consuming import ConsumerBase
from tidewater.deliveries import ArrowDelivery, Delivered, Delivery
from tidewater.leases import Lease
from tidewater.origin import Origin
from tidewater.pulling import ConsumerOptions, Pulling
from tidewater_core.clock import Clock, IdSource
from tidewater_core.names import TopicName

BATCH: Final = 1_000
"""Messages of a batch, unless told."""
log = logging.getLogger("tidewater.consumer")


class AsyncConsumer(ConsumerBase):
    """Takes messages of a subscription; other consumers of it share the work.

    async with client.consumer("shop/orders", "billing") as consumer:
        async for message in consumer:
            await bill(message.value)
            message.ack()

    Messages that are not acknowledged when it closes go to others at once.
    """

    def __init__(
        self,
        origin: Origin,
        topic: TopicName | str,
        subscription: str,
        options: ConsumerOptions | None = None,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Make a consumer; it speaks to the server when it is entered or first asked."""
        super().__init__(origin, topic, subscription, options, clock=clock, ids=ids)
        self._starting: asyncio.Task[Pulling] | None = None
        self._ready = asyncio.Event()

    async def __aenter__(self) -> Self:
        """See that the subscription is there."""
        await self._started()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        await self.close()

    # ---- receiving

    async def receive(self, timeout_s: float | None = None) -> Delivery | None:
        """Return the next message; None: none came in time, or the consumer was closed."""
        found = await self._take(1, timeout_s, arrow=False)
        return cast("Delivery", found[0]) if found else None

    async def receive_many(
        self, count: int = BATCH, timeout_s: float | None = None
    ) -> list[Delivery]:
        """Return the messages that are there, up to `count`; wait for the first one."""
        return cast("list[Delivery]", await self._take(count, timeout_s, arrow=False))

    async def receive_arrow(self, timeout_s: float | None = None) -> ArrowDelivery | None:
        """Return the next messages as one Arrow batch."""
        found = await self._take(1, timeout_s, arrow=True)
        return cast("ArrowDelivery", found[0]) if found else None

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Iterate over messages until the consumer is closed."""
        while (message := await self.receive()) is not None:
            yield message
            if self._options.auto_ack:
                message.ack()

    async def batches(self, count: int = BATCH) -> AsyncIterator[list[Delivery]]:
        """Iterate over lists of messages: what is there, up to `count`."""
        while messages := await self.receive_many(count):
            yield messages
            if self._options.auto_ack:
                self.ack(*messages)

    async def arrow(self) -> AsyncIterator[ArrowDelivery]:
        """Iterate over Arrow batches."""
        while (batch := await self.receive_arrow()) is not None:
            yield batch
            if self._options.auto_ack:
                batch.ack()

    async def run(
        self,
        handler: Callable[[Delivery], Awaitable[object]],
        *,
        concurrency: int = 1,
        nack_delay_s: float | None = None,
    ) -> None:
        """Give each message to `handler`: acknowledged when it returns, given back if it raises.

        Runs until the consumer is closed (from elsewhere) and the handlers under way are done.
        """

        async def work() -> None:
            while (message := await self.receive()) is not None:
                try:
                    await handler(message)
                except Exception:
                    log.exception("the handler failed for %r; it is given back", message)
                    message.nack(nack_delay_s)
                else:
                    message.ack()

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def _take(self, count: int, timeout_s: float | None, *, arrow: bool) -> list[Delivered]:
        if self._closed:
            return []
        engine = await self._started()
        engine.begin(arrow=arrow)
        engine.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._ready.clear()
                    found = engine.take(count)
                    if found:
                        return found
                    if self.is_closed:
                        return []
                    if engine.failed is not None:
                        raise engine.failed
                    await self._ready.wait()
        except TimeoutError:
            return []
        finally:
            engine.waiting -= 1

    # ---- settling

    def ack(self, *messages: Delivered) -> None:
        """Say that messages are done; the server hears of it within `ack_wait_s`."""
        for message in messages:
            message.ack()

    def nack(self, *messages: Delivered, delay_s: float | None = None) -> None:
        """Give messages back."""
        for message in messages:
            message.nack(delay_s)

    async def extend(self, *messages: Delivered, deadline_s: float | None = None) -> None:
        """Hold messages longer; what is at work is extended by itself as long as the loop runs."""
        engine = await self._started()
        leases = tuple(lease for message in messages for lease in message.leases)
        await engine.extend(leases, deadline_s)

    async def flush(self) -> None:
        """Wait until the server has stored every ack given so far."""
        engine = await self._started()
        await engine.settling.flush()
        if engine.settling.failed is not None:
            raise engine.settling.failed

    def _settle(self, verb: str, leases: tuple[Lease, ...], delay_s: float | None) -> None:
        assert self._engine is not None, "messages come from an engine"
        self._engine.settle(verb, leases, delay_s)

    # ---- life

    def stop(self) -> None:
        """Let iterations and `run` end after what they are at; then close it."""
        self._closed = True
        self._ready.set()

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop, store the acks, and give back the rest at once.

        `drain_s`: how long to wait for messages that other tasks are working on.
        """
        self.stop()
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._engine is not None:
            await self._engine.close(drain_s)

    async def _started(self) -> Pulling:
        if self._engine is not None:
            return self._engine
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        try:
            return await asyncio.shield(self._starting)
        finally:
            if self._starting is not None and self._starting.done():
                self._starting = None

    async def _start(self) -> Pulling:
        engine = Pulling(
            self._origin, self._topic, self._subscription, self._options, self, self._ready.set,
            clock=self._clock, ids=self._ids,
        )  # fmt: skip
        await engine.start()
        self._engine = engine
        return engine
