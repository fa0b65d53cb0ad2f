"""The Flight server of a worker: DoPut, DoGet, DoExchange, ListFlights, GetFlightInfo.

Flight has threads of its own; everything about topics belongs to the event loop. A call's thread
asks the loop and waits; from outside of it a topic is looked at, never changed.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyarrow import flight

from tidewater_core.errors import Overloaded, Retryable, TidewaterError
from tidewater_worker.api.produce import Producing
from tidewater_worker.flight.failures import to_flight
from tidewater_worker.flight.pull import Pull
from tidewater_worker.flight.put import PutStream
from tidewater_worker.flight.tickets import Ticket, follow_of, put_of, split, topic_of
from tidewater_worker.node import Node
from tidewater_worker.reading import PartitionReader, position
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.topic import Topic

STREAMS_MAX: Final = 128
"""Calls at a time that hold a thread for long."""
CALL_S: Final = 60.0
FOLLOW_S: Final = 0.25
"""A stream that has nothing to send looks this often whether its client is still there."""
STOP_S: Final = 2.0
"""How long streams of clients may take to end when the worker stops; then they are cut."""
_T = TypeVar("_T")
log = logging.getLogger(__name__)


@contextmanager
def _told() -> Iterator[None]:
    """Tell the client what went wrong in Flight's terms."""
    try:
        yield
    except TidewaterError as error:
        raise to_flight(error) from None


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves a node's topics over Flight."""

    def __init__(
        self, node: Node, producing: Producing, loop: asyncio.AbstractEventLoop, port: int
    ) -> None:
        host = node.settings.listen_host
        where = f"[{host}]" if ":" in host else host
        super().__init__(f"grpc://{where}:{port}")
        self._node, self._producing, self._loop = node, producing, loop
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self._stopping = threading.Event()

    def stop(self, wait_s: float = STOP_S) -> bool:
        """End live streams, let the others finish; False if some did not in time."""
        self._stopping.set()
        ending = threading.Thread(target=self.shutdown, name="flight-stop", daemon=True)
        ending.start()
        ending.join(wait_s)
        return not ending.is_alive()

    def _ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """Take one of the places for long calls."""
        if self._stopping.is_set():
            raise Retryable("ShuttingDown", "this worker is shutting down", 500)
        if not self._streams.acquire(blocking=False):
            raise Overloaded("TooManyStreams", f"at most {STREAMS_MAX} streams are served", 1_000)
        try:
            yield
        finally:
            self._streams.release()

    # ---- what there is

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        """List the topics whose name begins with the criteria (`shop/`)."""
        prefix = criteria.decode("latin-1")
        with _told():
            return iter(self._ask(self._infos(prefix)))

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        """Describe a topic: schema, and a ticket a partition for all that is there now."""
        with _told():
            command = descriptor.command
            if command:
                ticket = Ticket.parse(command)
                return self._ask(self._info_of_ticket(ticket))
            namespace, name = topic_of(descriptor.path)
            return self._ask(self._info(namespace, name))

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        """Return the columns of a topic."""
        info = self.get_flight_info(context, descriptor)
        return flight.SchemaResult(info.schema)

    async def _infos(self, prefix: str) -> list[flight.FlightInfo]:
        return [
            self._describe(topic)
            for name, topic in sorted(self._node.topics.items())
            if name.startswith(prefix)
        ]

    async def _info(self, namespace: str, name: str) -> flight.FlightInfo:
        return self._describe(self._node.topic(namespace, name))

    async def _info_of_ticket(self, ticket: Ticket) -> flight.FlightInfo:
        topic = self._node.topic(ticket.namespace, ticket.name)
        start, end = self._range(topic, ticket)
        return _info(topic, [(Ticket(ticket.namespace, ticket.name, ticket.partition, start, end))])

    def _range(self, topic: Topic, ticket: Ticket) -> tuple[int, int]:
        partition = topic.partition(ticket.partition)
        appender = partition.readable()
        first = min(partition.table.start, appender.start)
        start = first if ticket.start is None else ticket.start
        end = appender.end if ticket.end is None else min(ticket.end, appender.end)
        return start, max(end, start)

    def _describe(self, topic: Topic) -> flight.FlightInfo:
        tickets = []
        for number, partition in sorted(topic.partitions.items()):
            if partition.appender is None:
                continue  # it is opening, or another worker's
            name = topic.name
            whole = Ticket(name.namespace, name.name, number)
            start, end = self._range(topic, whole)
            tickets.append(Ticket(name.namespace, name.name, number, start, end))
        return _info(topic, tickets)

    # ---- reading

    def do_get(self, context: Any, ticket: Any) -> flight.GeneratorStream:
        """Send a range of a partition: from the table, the log's files and memory alike."""
        with _told():
            asked = Ticket.parse(ticket.ticket)
            schema, batches = self._ask(self._open(asked))
            places = self._stream()
            places.__enter__()
        return flight.GeneratorStream(schema, _guarded(Pull(self._loop, batches), places))

    async def _open(self, ticket: Ticket) -> tuple[pa.Schema, AsyncIterator[pa.RecordBatch]]:
        topic = self._node.topic(ticket.namespace, ticket.name)
        partition = topic.partition(ticket.partition)
        start, end = self._range(topic, ticket)
        begin = await position(self._node, topic, partition, start, None)
        reader = PartitionReader(self._node, topic, partition, begin)
        return table_arrow_schema(topic.spec), reader.batches(end - begin)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Follow a partition live: batches as they become durable, until the client goes.

        Each batch has metadata with `next_offset` and `end_offset`. The client says all it has
        to say with the descriptor; what it does not take holds the stream back.
        """
        with _told(), self._stream():
            command = descriptor.command or None
            follow = follow_of(descriptor.path, command)
            namespace, name = split(follow.topic)
            topic = self._node.topic(namespace, name)
            offset = self._ask(self._begin(topic, follow))
            writer.begin(table_arrow_schema(topic.spec))
            writer.write_metadata(_note(offset, topic.partition(follow.partition).readable().end))
            while not self._stopping.is_set() and not context.is_cancelled():
                if not self._ask(self._wait(topic, follow.partition, offset)):
                    continue
                _, batches = self._ask(
                    self._open(Ticket(namespace, name, follow.partition, offset, None))
                )
                for batch in Pull(self._loop, batches):
                    offset += batch.num_rows
                    end = topic.partition(follow.partition).readable().end
                    writer.write_with_metadata(batch, _note(offset, end))
                    if self._stopping.is_set() or context.is_cancelled():
                        break
        if self._stopping.is_set():
            raise to_flight(Retryable("ShuttingDown", "this worker is shutting down", 500))

    async def _begin(self, topic: Topic, follow: Any) -> int:
        partition = topic.partition(follow.partition)
        if follow.offset is None and follow.position == "latest":
            return partition.readable().end
        return await position(self._node, topic, partition, follow.offset, None)

    async def _wait(self, topic: Topic, partition: int, offset: int) -> bool:
        return await topic.partition(partition).readable().wait_past(offset, FOLLOW_S)

    # ---- producing

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Store batches; each is acknowledged with partition, offset and count."""
        with _told(), self._stream():
            put = put_of(descriptor.path, descriptor.command or None)
            self._node.topic(*split(put.topic))
            PutStream(self._node, self._producing, self._loop, put).run(reader, writer)


def _guarded(batches: Pull, places: Any) -> Iterator[pa.RecordBatch]:
    with _told():
        try:
            yield from batches
        finally:
            places.__exit__(None, None, None)


def _note(next_offset: int, end_offset: int) -> pa.Buffer:
    return pa.py_buffer(b'{"next_offset":%d,"end_offset":%d}' % (next_offset, end_offset))


def _info(topic: Topic, tickets: list[Ticket]) -> flight.FlightInfo:
    endpoints = [flight.FlightEndpoint(str(ticket).encode(), []) for ticket in tickets]
    rows = sum((t.end or 0) - (t.start or 0) for t in tickets)
    descriptor = flight.FlightDescriptor.for_path(topic.name.namespace, topic.name.name)
    return flight.FlightInfo(table_arrow_schema(topic.spec), descriptor, endpoints, rows, -1)
