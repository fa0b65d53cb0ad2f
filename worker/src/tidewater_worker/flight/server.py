"""The Flight server of a worker: DoPut, DoGet, DoExchange, ListFlights, GetFlightInfo.

Flight has threads of its own; everything about topics belongs to the event loop. A call's thread
asks the loop and waits; from outside of it a topic is looked at, never changed.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
from pyarrow import flight

from tidewater_core import names
from tidewater_core.errors import Overloaded, Retryable, TidewaterError
from tidewater_worker.api.produce import Producing
from tidewater_worker.api.routes import check_one_start, timestamp_us
from tidewater_worker.auth.access import CONSUME, PRODUCE
from tidewater_worker.auth.access import topic as on_topic
from tidewater_worker.auth.guard import Guard
from tidewater_worker.flight.failures import to_flight
from tidewater_worker.flight.judge import MIDDLEWARE, Callers, Judge, Permission
from tidewater_worker.flight.pull import Pull
from tidewater_worker.flight.put import PutStream
from tidewater_worker.flight.tickets import Follow, Ticket, follow_of, put_of, split, topic_of
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.streaming import PartitionStream, chosen_columns
from tidewater_worker.topic import Topic

STREAMS_MAX: Final = 128
"""Calls at a time that hold a thread for long."""
CALL_S: Final = 60.0
FOLLOW_S: Final = 0.25
"""A stream that has nothing to send looks this often whether its client is still there."""
ROWS_MAX: Final = 1 << 62
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
        self,
        node: Node,
        producing: Producing,
        loop: asyncio.AbstractEventLoop,
        port: int,
        guard: Guard | None = None,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        host = node.settings.listen_host
        where = f"[{host}]" if ":" in host else host
        scheme = "grpc" if tls is None else "grpc+tls"
        super().__init__(
            f"{scheme}://{where}:{port}", middleware={MIDDLEWARE: Callers()}, **(tls or {})
        )
        self._judge = Judge(guard, loop)
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
            names = {topic.name.namespace for topic in list(self._node.topics.values())}
            visible = self._judge.visible(context, names)
            return iter(self._ask(self._infos(prefix, visible)))

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        """Describe a topic: schema, and a ticket a partition for all that is there now."""
        with _told():
            command = descriptor.command
            if command:
                ticket = Ticket.parse(command)
                self._judge.check(context, on_topic(CONSUME, ticket.namespace, ticket.name))
                return self._ask(self._info_of_ticket(ticket))
            namespace, name = topic_of(descriptor.path)
            self._judge.check(context, on_topic(CONSUME, namespace, name))
            return self._ask(self._info_of_topic(namespace, name))

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        """Return the columns of a topic."""
        info = self.get_flight_info(context, descriptor)
        return flight.SchemaResult(info.schema)

    async def _infos(self, prefix: str, visible: frozenset[str] | None) -> list[flight.FlightInfo]:
        return [
            self._info(topic, {})
            for name, topic in sorted(self._node.topics.items())
            if name.startswith(prefix) and (visible is None or topic.name.namespace in visible)
        ]

    async def _info_of_topic(self, namespace: str, name: str) -> flight.FlightInfo:
        topic = self._node.topic(namespace, name)
        others = await self._node.forwarding.describe(topic) if topic.is_spread else {}
        return self._info(topic, others)

    async def _info_of_ticket(self, ticket: Ticket) -> flight.FlightInfo:
        topic = self._node.topic(ticket.namespace, ticket.name)
        stream = await self._begin(topic, ticket)
        end = stream.end if ticket.end is None else min(ticket.end, stream.end)
        exact = msgspec.structs.replace(ticket, start=stream.offset, end=max(end, stream.offset))
        return describe(topic, [(exact, self._location(topic.partition(ticket.partition)))])

    def _info(self, topic: Topic, others: Mapping[int, Mapping[str, Any]]) -> flight.FlightInfo:
        """Describe a topic: a ticket a partition, and where its owner serves it.

        Of other workers' partitions `others` tells the range; without it their tickets are for
        all that there will be when they are used.
        """
        endpoints: list[tuple[Ticket, str]] = []
        namespace, name = topic.name.namespace, topic.name.name
        for number, partition in sorted(topic.partitions.items()):
            start = end = None
            if not partition.is_elsewhere:
                if partition.appender is None or not partition.is_open:
                    continue  # it is opening
                start = min(partition.table.start, partition.appender.start)
                end = max(partition.appender.end, start)
            elif number in others and "end" in others[number]:
                other = others[number]
                start = min(other["start"], other["log_start"])
                end = max(other["end"], start)
            endpoints.append(
                (Ticket(namespace, name, number, start, end), self._location(partition))
            )
        return describe(topic, endpoints)

    def _location(self, partition: Partition) -> str:
        """Return where a partition is served without a step in between; empty: here."""
        owner = partition.owner
        if not partition.is_elsewhere or owner is None:
            return ""
        worker = self._node.owning.registry.workers.get(owner.worker_id)
        return "" if worker is None else worker.flight_url

    # ---- reading

    def do_get(self, context: Any, ticket: Any) -> flight.GeneratorStream:
        """Send a range of a partition: from the table, the log's files and memory alike."""
        with _told():
            asked = Ticket.parse(ticket.ticket)
            allowed = self._judge.check(context, on_topic(CONSUME, asked.namespace, asked.name))
            stream, batches = self._ask(self._open(asked))
            places = self._stream()
            places.__enter__()
        rows = _with_gaps(stream, stream.offset, Pull(self._loop, batches))
        return flight.GeneratorStream(stream.schema, _guarded(rows, places, allowed))

    async def _open(self, ticket: Ticket) -> tuple[PartitionStream, AsyncIterator[pa.RecordBatch]]:
        topic = self._node.topic(ticket.namespace, ticket.name)
        stream = await self._begin(topic, ticket)
        end = stream.end if ticket.end is None else min(ticket.end, stream.end)
        return stream, stream.batches(max(end - stream.offset, 0), end)

    async def _begin(self, topic: Topic, ticket: Ticket) -> PartitionStream:
        stream = PartitionStream(
            self._node, topic, ticket.partition, ticket.columns, is_committed=ticket.is_committed
        )
        await stream.begin(ticket.start, None)
        return stream

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Follow a partition live: batches as they become durable, until the client goes.

        Each batch has metadata with `next_offset` and `end_offset`. The client says all it has
        to say with the descriptor; what it does not take holds the stream back.
        """
        with _told(), self._stream():
            command = descriptor.command or None
            follow = follow_of(descriptor.path, command)
            namespace, name = split(follow.topic)
            allowed = self._judge.check(context, on_topic(CONSUME, namespace, name))
            topic = self._node.topic(namespace, name)
            stream = self._ask(self._follow(topic, follow))
            writer.begin(stream.schema)
            writer.write_metadata(_note(stream))
            while not self._stopping.is_set() and not context.is_cancelled():
                allowed.check()  # also where there is nothing to send
                if not self._ask(stream.wait_past(FOLLOW_S)):
                    continue
                # The stream itself is a step ahead of what was sent.
                offset = stream.offset
                # A partition that is written to all the time may have no end for hours.
                for batch in allowed.guarded(Pull(self._loop, stream.batches(ROWS_MAX))):
                    begin, offset = offset, batch.column(names.TW_OFFSET)[-1].as_py() + 1
                    writer.write_with_metadata(batch, _note(stream, offset, begin))
                    if self._stopping.is_set() or context.is_cancelled():
                        break
                stream.offset = offset
        if self._stopping.is_set():
            raise to_flight(Retryable("ShuttingDown", "this worker is shutting down", 500))

    async def _follow(self, topic: Topic, follow: Follow) -> PartitionStream:
        stream = PartitionStream(
            self._node, topic, follow.partition, follow.columns,
            is_committed=follow.isolation == "committed",
        )  # fmt: skip
        check_one_start(follow.offset, follow.timestamp, follow.snapshot_id, follow.tag)
        if follow.snapshot_id is not None or follow.tag is not None:
            await stream.begin_at(follow.snapshot_id, follow.tag)
            return stream
        time_us = timestamp_us(None if follow.timestamp is None else str(follow.timestamp))
        at_end = follow.offset is None and time_us is None and follow.position == "latest"
        await stream.begin(follow.offset, time_us, at_end=at_end)
        return stream

    # ---- producing

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Store batches; each is acknowledged with partition, offset and count."""
        with _told(), self._stream():
            put = put_of(descriptor.path, descriptor.command or None)
            where = split(put.topic)
            allowed = self._judge.check(context, on_topic(PRODUCE, *where))
            self._node.topic(*where)
            PutStream(self._node, self._producing, self._loop, put, allowed).run(reader, writer)


def _with_gaps(
    stream: PartitionStream, offset: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch | tuple[pa.RecordBatch, pa.Buffer]]:
    """Yield batches; those after offsets that were lost with a volume say so in metadata."""
    for batch in batches:
        begin, offset = offset, batch.column(names.TW_OFFSET)[-1].as_py() + 1
        lost = stream.lost(begin, offset)
        yield (batch, pa.py_buffer(msgspec.json.encode({"gaps": lost}))) if lost else batch


def _guarded(batches: Iterable[Any], places: Any, allowed: Permission) -> Iterator[Any]:
    with _told():
        try:
            yield from allowed.guarded(batches)
        finally:
            places.__exit__(None, None, None)


def _note(stream: PartitionStream, offset: int | None = None, begin: int = 0) -> pa.Buffer:
    at = stream.offset if offset is None else offset
    note: dict[str, Any] = {"next_offset": at, "end_offset": max(stream.end, at)}
    lost = stream.lost(begin, at) if offset is not None else []
    return pa.py_buffer(msgspec.json.encode({**note, **({"gaps": lost} if lost else {})}))


def describe(topic: Topic, endpoints: list[tuple[Ticket, str]]) -> flight.FlightInfo:
    """Tell what tickets a topic is read by, and where."""
    found = [
        flight.FlightEndpoint(str(ticket).encode(), [location] if location else [])
        for ticket, location in endpoints
    ]
    ends = [(ticket.start, ticket.end) for ticket, _ in endpoints]
    rows = -1
    if all(end is not None for _, end in ends):
        rows = sum((end or 0) - (start or 0) for start, end in ends)
    columns = endpoints[0][0].columns if endpoints else None
    descriptor = flight.FlightDescriptor.for_path(topic.name.namespace, topic.name.name)
    return flight.FlightInfo(chosen_columns(topic, columns), descriptor, found, rows, -1)
