"""A blocking consumer of a subscription: an engine in a thread, and methods that wait for it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self, cast

from tidewater.background import LoopThread
from tidewater.consuming import ConsumerBase
from tidewater.deliveries import ArrowDelivery, Delivered, Delivery
from tidewater.leases import Lease
from tidewater.origin import Origin
from tidewater.pulling import ConsumerOptions, Pulling
from tidewater_core.clock import Clock, IdSource
from tidewater_core.errors import Invalid, TidewaterError
from tidewater_core.names import TopicName

BATCH: Final = 1_000
"""Messages of a batch, unless told."""
log = logging.getLogger("tidewater.consumer")


class Consumer(ConsumerBase):
    """Takes messages of a subscription; other consumers of it share the work.

    with client.consumer("shop/orders", "billing") as consumer:
        for message in consumer:
            bill(message.value)
            message.ack()

    Threads may share it. Messages that are being worked on are extended by a thread of its own,
    however long the program takes. Those that are not acknowledged when it closes go to others at
    once.
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
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        """See that the subscription is there."""
        self._started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    # ---- receiving

    def receive(self, timeout_s: float | None = None) -> Delivery | None:
        """Return the next message; None: none came in time, or the consumer was closed."""
        found = self._take(1, timeout_s, arrow=False)
        return cast("Delivery", found[0]) if found else None

    def receive_many(self, count: int = BATCH, timeout_s: float | None = None) -> list[Delivery]:
        """Return the messages that are there, up to `count`; wait for the first one."""
        return cast("list[Delivery]", self._take(count, timeout_s, arrow=False))

    def receive_arrow(self, timeout_s: float | None = None) -> ArrowDelivery | None:
        """Return the next messages as one Arrow batch."""
        found = self._take(1, timeout_s, arrow=True)
        return cast("ArrowDelivery", found[0]) if found else None

    def __iter__(self) -> Iterator[Delivery]:
        """Iterate over messages until the consumer is closed."""
        while (message := self.receive()) is not None:
            yield message
            if self._options.auto_ack:
                message.ack()

    def batches(self, count: int = BATCH) -> Iterator[list[Delivery]]:
        """Iterate over lists of messages: what is there, up to `count`."""
        while messages := self.receive_many(count):
            yield messages
            if self._options.auto_ack:
                self.ack(*messages)

    def arrow(self) -> Iterator[ArrowDelivery]:
        """Iterate over Arrow batches."""
        while (batch := self.receive_arrow()) is not None:
            yield batch
            if self._options.auto_ack:
                batch.ack()

    def run(
        self,
        handler: Callable[[Delivery], object],
        *,
        threads: int = 1,
        nack_delay_s: float | None = None,
    ) -> None:
        """Give each message to `handler`: acknowledged when it returns, given back if it raises.

        Runs until `stop` is called (from a handler, another thread or a signal), or the program is
        interrupted; the handlers under way are waited for.
        """
        failed: list[TidewaterError] = []

        def work() -> None:
            try:
                while (message := self.receive()) is not None:
                    _handle(handler, message, nack_delay_s)
            except TidewaterError as error:
                failed.append(error)
                self.stop()

        workers = [threading.Thread(target=work, name=f"consumer-{n}") for n in range(threads)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        finally:
            self.stop()
            for worker in workers:
                worker.join()
        if failed:
            raise failed[0]

    def _take(self, count: int, timeout_s: float | None, *, arrow: bool) -> list[Delivered]:
        if self.is_closed:
            return []
        engine = self._started(arrow=arrow)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            engine.waiting += 1
            try:
                while True:
                    found = engine.take(count)
                    if found or self.is_closed:
                        return found
                    if engine.failed is not None:
                        raise engine.failed
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return []
                    self._changed.wait(left_s)
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

    def extend(self, *messages: Delivered, deadline_s: float | None = None) -> None:
        """Hold messages longer than the consumer does by itself."""
        engine, thread = self._running()
        leases = tuple(lease for message in messages for lease in message.leases)
        thread.call(engine.extend(leases, deadline_s))

    def flush(self) -> None:
        """Wait until the server has stored every ack given so far."""
        engine, thread = self._running()
        thread.call(engine.settling.flush())
        if engine.settling.failed is not None:
            raise engine.settling.failed

    def _settle(self, verb: str, leases: tuple[Lease, ...], delay_s: float | None) -> None:
        engine, _ = self._running()
        engine.settle(verb, leases, delay_s)

    def _running(self) -> tuple[Pulling, LoopThread]:
        engine, thread = self._engine, self._thread
        if engine is None or thread is None:
            raise Invalid("Closed", "the consumer is closed, or has not begun")
        return engine, thread

    # ---- life

    def stop(self) -> None:
        """Let iterations and `run` end after what they are at; safe to call from a signal."""
        self._closed = True
        engine, thread = self._engine, self._thread
        if engine is not None and thread is not None:
            # Not the lock: a signal may have come while this thread holds it.
            thread.loop.call_soon_threadsafe(self._notify)

    def close(self, drain_s: float = 0.0) -> None:
        """Stop, store the acks, and give back the rest at once.

        `drain_s`: how long to wait for messages that other threads are working on.
        """
        self.stop()
        with self._starting:
            thread = self._thread
            if thread is None:
                return
            try:
                if self._engine is not None:
                    # Other threads go on settling meanwhile.
                    thread.call(self._engine.close(drain_s))
            finally:
                self._thread = None
                thread.close()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _started(self, *, arrow: bool | None = None) -> Pulling:
        with self._starting:
            if self._closed:
                raise Invalid("Closed", "the consumer is closed")
            if self._engine is None:
                thread = LoopThread("tidewater-consumer")
                try:
                    self._engine = thread.call(self._start())
                except BaseException:
                    thread.close()
                    raise
                self._thread = thread
            if arrow is not None and self._thread is not None:
                self._begin(self._engine, self._thread, arrow=arrow)
            return self._engine

    def _begin(self, engine: Pulling, thread: LoopThread, *, arrow: bool) -> None:
        if engine.is_running(arrow=arrow):
            return

        async def begin() -> None:
            engine.begin(arrow=arrow)

        thread.call(begin())

    async def _start(self) -> Pulling:
        engine = Pulling(
            self._origin, self._topic, self._subscription, self._options, self, self._notify,
            clock=self._clock, ids=self._ids,
        )  # fmt: skip
        await engine.start()
        return engine


def _handle(
    handler: Callable[[Delivery], object], message: Delivery, nack_delay_s: float | None
) -> None:
    try:
        handler(message)
    except Exception:
        log.exception("the handler failed for %r; it is given back", message)
        message.nack(nack_delay_s)
    else:
        message.ack()
