"""Producers: a batch is stored whole or not at all, and once however often it is sent.

A producer has an id and numbers its batches (`Tidewater-Producer`, `Tidewater-Sequence`). When no
answer comes it sends the same batch under the same number, and the server recognises it. A new
producer object is a new producer: what an earlier process may have sent is not its concern.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from tidewater import wire
from tidewater.http1 import Response, request_bytes
from tidewater.origin import Origin
from tidewater.retry import RetryPolicy
from tidewater.transport import TIMEOUT_S, Transport
from tidewater.transport_async import PipelinedConnection, connect
from tidewater.wire import Ack, Message, Produced
from tidewater_core.clock import IdSource, SystemIds
from tidewater_core.errors import TidewaterError
from tidewater_core.names import TopicName

if TYPE_CHECKING:
    import pyarrow as pa

AckLevel = Literal["log", "table"]
"""When a message counts as stored: fsynced in the worker's log, or a row of the table."""
IN_FLIGHT_MAX: Final = 64
"""Batches of an async producer without an answer. A server knows a producer's last 256 batches
again; a re-send must fall among them."""


class _Requests:
    """Builds the requests of one producer."""

    def __init__(
        self,
        origin: Origin,
        topic: TopicName,
        *,
        ack: AckLevel,
        partition: int | None,
        producer_id: str | None,
    ) -> None:
        query = "&".join(
            part
            for part in (
                "ack=table" if ack == "table" else "",
                f"partition={partition}" if partition is not None else "",
            )
            if part
        )
        target = f"/v1/{topic}/messages" + (f"?{query}" if query else "")
        self._heads = {
            kind: origin.head("POST", target, Content_Type=kind, Tidewater_Producer=producer_id)
            for kind in (wire.RAW, wire.JSON, wire.NDJSON, wire.ARROW)
        }
        self._numbered = producer_id is not None
        self._sequence = itertools.count()

    def request(self, body: bytes, content_type: str) -> bytes:
        """Return the next request; the same bytes serve for sending it again."""
        head = self._heads[content_type]
        if not self._numbered:
            return request_bytes(head, body)
        return request_bytes(head, body, b"Tidewater-Sequence: %d\r\n" % next(self._sequence))


def _one(
    value: Any, key: bytes | str | None, headers: Mapping[str, str] | None
) -> tuple[bytes, str]:
    """Return body and content type of a single message: bare bytes cost least."""
    if key is None and not headers:
        if isinstance(value, bytes):
            return value, wire.RAW
        if isinstance(value, str):
            return value.encode(), wire.RAW
    return wire.encode_json((Message(value, key, headers),)), wire.JSON


class Producer:
    """A blocking producer. Threads may share it; their batches then go one after the other."""

    def __init__(
        self,
        transport: Transport,
        topic: TopicName | str,
        *,
        ack: AckLevel = "log",
        partition: int | None = None,
        idempotent: bool = True,
        retry: RetryPolicy | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Make a producer for one topic; nothing is sent yet."""
        self._ids = ids or SystemIds()
        self._transport = transport
        self._retry = retry or RetryPolicy()
        self._repeatable = idempotent
        self._requests = _Requests(
            transport.origin,
            topic if isinstance(topic, TopicName) else TopicName.parse(topic),
            ack=ack,
            partition=partition,
            producer_id=str(self._ids.uuid()) if idempotent else None,
        )
        # One batch at a time: a retried batch never lands behind a later one.
        self._lock = threading.Lock()

    def send(
        self,
        value: Any,
        key: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Ack:
        """Send one message and return where it is stored."""
        return self.send_body(*_one(value, key, headers)).acks[0]

    def send_many(self, messages: Iterable[Message]) -> Produced:
        """Send a batch as JSON."""
        return self.send_body(wire.encode_json(messages), wire.JSON)

    def send_arrow(self, data: "pa.RecordBatch | pa.Table") -> Produced:
        """Send the rows of a batch or a table; its columns are the topic's."""
        return self.send_body(wire.arrow_body(data), wire.ARROW)

    def send_body(self, body: bytes, content_type: str) -> Produced:
        """Send a batch that is already encoded."""
        with self._lock:
            request = self._requests.request(body, content_type)
            attempt = 1
            while True:
                try:
                    return wire.decode_produced(self._transport.send(request))
                except TidewaterError as error:
                    wait_s = self._retry.wait_s(
                        error, attempt, self._ids.jitter(), repeatable=self._repeatable
                    )
                    if wait_s is None:
                        raise
                time.sleep(wait_s)
                attempt += 1


class AsyncProducer:
    """An asyncio producer with its own connection and many batches in flight.

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
    ) -> None:
        """Make a producer for one topic; it connects at the first send."""
        self._ids = ids or SystemIds()
        self._origin = origin
        self._retry = retry or RetryPolicy()
        self._repeatable = idempotent
        self._timeout_s = timeout_s
        self._requests = _Requests(
            origin,
            topic if isinstance(topic, TopicName) else TopicName.parse(topic),
            ack=ack,
            partition=partition,
            producer_id=str(self._ids.uuid()) if idempotent else None,
        )
        self._slots = asyncio.Semaphore(in_flight_max)
        self._connection: PipelinedConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._backlog: list[tuple[bytes, asyncio.Future[Response]]] = []
        self._retrying = 0
        self._steady = asyncio.Event()
        self._steady.set()
        # Drawn once: batches that failed together wake up in the order in which they were sent.
        self._jitter = self._ids.jitter()

    async def send(
        self,
        value: Any,
        key: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Ack:
        """Send one message and return where it is stored."""
        return (await self.send_body(*_one(value, key, headers))).acks[0]

    async def send_many(self, messages: Iterable[Message]) -> Produced:
        """Send a batch as JSON."""
        return await self.send_body(wire.encode_json(messages), wire.JSON)

    async def send_arrow(self, data: "pa.RecordBatch | pa.Table") -> Produced:
        """Send the rows of a batch or a table; its columns are the topic's."""
        return await self.send_body(wire.arrow_body(data), wire.ARROW)

    async def send_body(self, body: bytes, content_type: str) -> Produced:
        """Send a batch that is already encoded."""
        async with self._slots:
            while not self._steady.is_set():
                await self._steady.wait()
            request = self._requests.request(body, content_type)
            try:
                return wire.decode_produced(await self._exchange(request))
            except TidewaterError as error:
                return await self._send_again(request, error)

    async def close(self) -> None:
        """Close the connection; await the sends first."""
        if self._opening is not None:
            await self._opening
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _send_again(self, request: bytes, error: TidewaterError) -> Produced:
        """Retry; new batches wait meanwhile, or the server would forget the number of this one."""
        self._retrying += 1
        self._steady.clear()
        try:
            for attempt in itertools.count(1):
                wait_s = self._retry.wait_s(
                    error, attempt, self._jitter, repeatable=self._repeatable
                )
                if wait_s is None:
                    break
                await asyncio.sleep(wait_s)
                try:
                    return wire.decode_produced(await self._exchange(request))
                except TidewaterError as again:
                    error = again
            raise error
        finally:
            self._retrying -= 1
            if self._retrying == 0:
                self._steady.set()

    def _exchange(self, request: bytes) -> asyncio.Future[Response]:
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
            connection = await connect(self._origin, self._timeout_s)
        except TidewaterError as error:
            for _, future in self._backlog:
                if not future.done():
                    future.set_exception(error)
        else:
            self._connection = connection
            for request, future in self._backlog:
                connection.send(request).add_done_callback(partial(_pass_on, future))
        finally:
            self._backlog.clear()
            self._opening = None


def _pass_on(future: asyncio.Future[Response], sent: asyncio.Future[Response]) -> None:
    if future.done():
        # Cancelled by its sender; the answer is of no use to anybody else.
        sent.exception()
    elif (error := sent.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(sent.result())
