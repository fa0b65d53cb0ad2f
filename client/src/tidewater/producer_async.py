"""The asyncio producer: many batches in flight, each stored once however often it is sent."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tidewater import wire
from tidewater.batching import Batches, BatchOptions
from tidewater.http1 import Response
from tidewater.origin import Origin
from tidewater.producing import MOVED, AckLevel, Batch, Keys, Requests, encode_one
from tidewater.retry import RetryPolicy
from tidewater.routing import CONNECT_S, Routes
from tidewater.tables import batches_of, has_keys
from tidewater.transport import TIMEOUT_S
from tidewater.transport_async import AsyncTransport, PipelinedConnection, connect
from tidewater.wire import Ack, Message, Produced
from tidewater_core.clock import IdSource, SystemIds
from tidewater_core.errors import Invalid, Retryable, TidewaterError
from tidewater_core.names import TopicName

if TYPE_CHECKING:
    import pyarrow as pa

    from tidewater.tables import ArrowData

IN_FLIGHT_MAX: Final = 64
"""Batches of an async producer without an answer. A server knows a producer's last 256 batches
again; a re-send must fall among them."""


class AsyncProducer:
    """An asyncio producer with a connection per worker and many batches in flight.

    Batches of tasks that run at once are stored in the order of their sends, except that one
    which had to be sent again may land behind later ones; await each send where that matters.
    """

    def __init__(
        self,
        origin: Origin,
        topic: TopicName | str,
        *,
        ack: AckLevel = "log",
        partition: int | None = None,
        idempotent: bool = True,
        retry: RetryPolicy | None = None,
        ids: IdSource | None = None,
        timeout_s: float = TIMEOUT_S,
        in_flight_max: int = IN_FLIGHT_MAX,
        direct: bool = False,
        batching: BatchOptions | None = None,
    ) -> None:
        """Make a producer for one topic; it connects at the first send.

        `direct` sends messages straight to the owner of their partition where it can be reached.
        """
        self._ids = ids or SystemIds()
        self._topic = topic if isinstance(topic, TopicName) else TopicName.parse(topic)
        self._retry = retry or RetryPolicy()
        self._repeatable = idempotent
        self._timeout_s = timeout_s
        self._requests = Requests(
            self._topic,
            ack=ack,
            partition=partition,
            idempotent=idempotent,
            ids=self._ids,
        )
        self._routes = Routes(origin, direct=direct)
        self._slots = asyncio.Semaphore(in_flight_max)
        self._in_flight = 0
        self._quiet = asyncio.Event()
        self._lanes: dict[Origin, _Lane] = {}
        self._learning: asyncio.Task[None] | None = None
        self._holding = 0
        self._steady = asyncio.Event()
        self._steady.set()
        # Drawn once: batches that failed together wake up in the order in which they were sent.
        self._jitter = self._ids.jitter()
        self._batching = batching or BatchOptions()
        self._batches: Batches | None = None

    async def __aenter__(self) -> Self:
        """Return the producer itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what was posted, and close the connections."""
        await self.close()

    async def send(
        self,
        value: Any,
        key: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Ack:
        """Send one message and return where it is stored."""
        return (await self._send(*encode_one(value, key, headers), (key,))).acks[0]

    async def send_many(self, messages: Iterable[Message]) -> Produced:
        """Send a batch as JSON."""
        listed = list(messages)
        return await self._send(wire.encode_json(listed), wire.JSON, [m.key for m in listed])

    async def send_arrow(self, data: "pa.RecordBatch | pa.Table") -> Produced:
        """Send the rows of a batch or a table in one request; its columns are the topic's."""
        keys = None if has_keys(data) else (None,)
        return await self._send(wire.arrow_body(data), wire.ARROW, keys)

    async def send_table(self, data: "ArrowData") -> Produced:
        """Send all rows of a table, a DataFrame or a stream, in as many requests as it takes."""
        return await self.send_batches((data,))

    async def send_batches(self, batches: "Iterable[ArrowData]") -> Produced:
        """Send tables, DataFrames or batches one after the other; each request is whole."""
        acks: list[Ack] = []
        snapshot_id = None
        for data in batches:
            for batch in batches_of(data):
                produced = await self.send_arrow(batch)
                acks += produced.acks
                snapshot_id = produced.snapshot_id
        return Produced(acks, snapshot_id)

    async def send_body(self, body: bytes, content_type: str, keys: Keys | None = None) -> Produced:
        """Send a batch that is already encoded; `keys`: those of its messages, if known."""
        return await self._send(body, content_type, keys)

    async def _send(self, body: bytes, content_type: str, keys: Keys | None) -> Produced:
        async with self._slots:
            if self._routes.should_ask and self._learning is None:
                self._learning = asyncio.ensure_future(self._learn())
            while not self._steady.is_set():
                await self._steady.wait()
            batch = self._requests.batch(body, content_type, keys)
            self._in_flight += 1
            try:
                origin = self._origin_of(batch)
                try:
                    return await self._exchange(origin, batch)
                except TidewaterError as error:
                    return await self._send_again(origin, batch, error)
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._quiet.set()

    def _origin_of(self, batch: Batch) -> Origin:
        return self._routes.origin_of(self._requests.partition_of(self._routes, batch))

    async def _send_again(self, origin: Origin, batch: Batch, error: TidewaterError) -> Produced:
        """Retry; new batches wait meanwhile, or the server would forget the number of this one."""
        self._hold()
        try:
            for attempt in itertools.count(1):
                is_moved = self._requests.moved(batch, error, self._routes)
                if not self._routes.failed(origin, error):
                    wait_s = self._retry.wait_s(
                        MOVED if is_moved else error, attempt, self._jitter,
                        repeatable=self._repeatable,
                    )  # fmt: skip
                    if wait_s is None:
                        break
                    await asyncio.sleep(wait_s)
                origin = self._origin_of(batch)
                try:
                    return await self._exchange(origin, batch)
                except TidewaterError as again:
                    error = again
            raise batch.last_word(error)
        finally:
            self._let_go()

    def _hold(self) -> None:
        self._holding += 1
        self._steady.clear()

    def _let_go(self) -> None:
        self._holding -= 1
        if self._holding == 0:
            self._steady.set()

    async def _exchange(self, origin: Origin, batch: Batch) -> Produced:
        lane = self._lanes.get(origin)
        if lane is None:
            connect_s = self._timeout_s if origin == self._routes.base else CONNECT_S
            lane = self._lanes[origin] = _Lane(origin, self._timeout_s, connect_s)
        request = self._requests.request(origin, batch)
        return wire.decode_produced(await lane.exchange(request))

    # ---- owners

    async def _learn(self) -> None:
        """Ask who owns the partitions; go new ways only when nothing is under way on the old.

        Otherwise a batch on a new connection could pass one before it on an old one.
        """
        try:
            found: dict[str, Any] | None = None
            try:
                found = await self.describe()
            except TidewaterError as error:
                self._routes.asked(None, error)
                return
            self._hold()
            try:
                while self._in_flight:
                    self._quiet.clear()
                    await self._quiet.wait()
                self._routes.asked(found)
            finally:
                self._let_go()
        finally:
            self._learning = None

    async def describe(self) -> dict[str, Any]:
        """Return the topic's description."""
        async with AsyncTransport(self._routes.base, timeout_s=self._timeout_s) as transport:
            return wire.decode_object(await transport.request("GET", f"/v1/{self._topic}"))

    # ---- batches that form by themselves

    async def post(
        self,
        value: Any,
        key: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "asyncio.Future[Ack]":
        """Send a message together with others that are posted about now; the future has its ack.

        Waits while too much waits to be sent. Messages of one key keep their order.
        """
        if self._batches is None:
            self._batches = Batches(self, self._batching)
        batches = self._batches
        future: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        await batches.room()
        if self._batches is not batches:
            raise Invalid("Closed", "the producer is closed")
        batches.add(Message(value, key, headers), partial(_settle, future))
        return future

    async def flush(self) -> None:
        """Wait until everything posted so far is stored; raise the first error since the last."""
        if self._batches is not None:
            await self._batches.flush()

    async def send_group(self, messages: list[Message]) -> Produced:
        """Send the messages of one partition."""
        return await self._send(wire.encode_json(messages), wire.JSON, (messages[0].key,))

    def group_of(self, key: bytes | str | None) -> int | None:
        """Return which messages may share a batch with those of a key."""
        return self._requests.group_of(self._routes, key)

    @property
    def partitions(self) -> int:
        """How many partitions the topic has, by which messages are grouped; 0: not known."""
        return self._routes.partitions

    async def know_partitions(self) -> None:
        """Ask for the partitions, if they are not known."""
        if not self._routes.partitions:
            self._routes.asked(await self.describe())

    async def close(self) -> None:
        """Wait for what was posted and close the connections; await the sends first."""
        try:
            if self._batches is not None:
                batches, self._batches = self._batches, None
                await batches.close()
        finally:
            if self._learning is not None:
                self._learning.cancel()
                await asyncio.wait({self._learning})
            for lane in self._lanes.values():
                await lane.close()
            self._lanes.clear()


class _Lane:
    """A connection to one worker, opened when it is needed."""

    def __init__(self, origin: Origin, timeout_s: float, connect_s: float) -> None:
        self._origin, self._timeout_s, self._connect_s = origin, timeout_s, connect_s
        self._connection: PipelinedConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._backlog: list[tuple[bytes, asyncio.Future[Response]]] = []

    def exchange(self, request: bytes) -> "asyncio.Future[Response]":
        """Put a request on its way; the order of calls is the order on the wire."""
        connection = self._connection
        if connection is not None and connection.usable and self._opening is None:
            # No flow control here: the batches in flight bound what waits to be written.
            return connection.send(request)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._backlog.append((request, future))
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return future

    async def _open(self) -> None:
        """Connect, then send what has been waiting for it."""
        try:
            connection = await connect(self._origin, self._timeout_s, self._connect_s)
        except TidewaterError as error:
            self._give_up(error)
        except BaseException as fault:
            # Also if whoever closes this is interrupted: nobody else would answer those who wait.
            self._give_up(Retryable("NotSent", f"no connection to {self._origin}: {fault!r}"))
            raise
        else:
            self._connection = connection
            for request, future in self._backlog:
                connection.send(request).add_done_callback(partial(_pass_on, future))
        finally:
            self._backlog.clear()
            self._opening = None

    def _give_up(self, error: TidewaterError) -> None:
        for _, future in self._backlog:
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """Close the connection."""
        if self._opening is not None:
            await self._opening
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


def _pass_on(future: "asyncio.Future[Response]", sent: "asyncio.Future[Response]") -> None:
    if future.done():
        # Cancelled by its sender; the answer is of no use to anybody else.
        sent.exception()
    elif (error := sent.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(sent.result())


def _settle(future: "asyncio.Future[Ack]", done: Ack | TidewaterError) -> None:
    if future.done():
        return
    if isinstance(done, Ack):
        future.set_result(done)
    else:
        future.set_exception(done)
        future.exception()  # whoever does not look at it hears of it from `flush`
