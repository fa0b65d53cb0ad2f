"""One client of a socket: what it asks for, and what it gets. Knows nothing of frames on the wire.

Produced messages take the same way into the log as over HTTP. Many may be under way; each is
acknowledged by its id when it is durable, whatever the others do.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from tidewater_core.errors import Conflict, Invalid, NotFound, Overloaded, TidewaterError
from tidewater_worker.api import decode
from tidewater_worker.api import socket_frames as frames
from tidewater_worker.api import socket_messages as say
from tidewater_worker.api.decode import TopicDecoder
from tidewater_worker.api.produce import Answer, Producing, acks_json
from tidewater_worker.api.socket_reading import Chunks, Client, Following
from tidewater_worker.log.producers import Request
from tidewater_worker.node import Node
from tidewater_worker.topic import Topic

STREAMS_MAX: Final = 64
"""Reads and subscriptions of one socket."""
ONE_KEY: Final = len(say.NAMES) - 1
log = logging.getLogger(__name__)


class Stream(Protocol):
    """A read or a subscription under way."""

    @property
    def next_offset(self) -> int | None:
        """The first offset that was not sent, where there is such a thing."""

    def add_credit(self, messages: int) -> None:
        """Allow so many messages more."""

    async def run(self) -> None:
        """Send until cancelled; raise what ends it."""


class Sockets:
    """What all sockets of a worker share."""

    def __init__(self, node: Node, producing: Producing) -> None:
        self.node = node
        self.producing = producing
        self.chunks = Chunks()
        self.open: int = 0
        """Sockets that are open."""
        self._commands: dict[str, tuple[TopicDecoder, say.CommandDecoder]] = {}

    def commands(self, topic: Topic) -> tuple[TopicDecoder, say.CommandDecoder]:
        """Return the decoders for a topic's present schema."""
        decoder = self.producing.decoder(topic)
        name = str(topic.name)
        known = self._commands.get(name)
        if known is None or known[0] is not decoder:
            known = (decoder, say.CommandDecoder(decoder.messages))
            self._commands[name] = known
        return known


class Session:
    """One client."""

    def __init__(
        self, sockets: Sockets, namespace: str, name: str, client: Client, relax: Callable[[], None]
    ) -> None:
        self._sockets, self._node = sockets, sockets.node
        self._namespace, self._name = namespace, name
        self._client = client
        self._relax = relax
        """Called after each answer to a `produce`: there is room for another."""
        self.under_way = 0
        """`produce` commands without an answer."""
        self.under_way_bytes = 0
        self._streams: dict[int, tuple[Stream, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def welcome(self) -> None:
        """Tell the client where it is and what it may do."""
        topic = self._node.topic(self._namespace, self._name)
        limits = self._node.settings.limits
        said = {
            "topic": str(topic.name),
            "partitions": topic.spec.partitions,
            "message_bytes_max": limits.message_bytes_max.bytes,
            "frame_bytes_max": limits.request_bytes_max.bytes,
            "batch_rows_max": limits.batch_rows_max,
            "streams_max": STREAMS_MAX,
            "ping_ms": limits.socket_ping.ms,
        }
        self._say({"welcome": said})

    def stop(self) -> None:
        """End every read and subscription; what was produced is stored all the same."""
        for _, task in self._streams.values():
            task.cancel()
        for task in self._tasks:
            task.cancel()
        self._streams.clear()

    def _say(self, value: object) -> None:
        self._client.send(frames.text(msgspec.json.encode(value)))

    def _refuse(self, id_: int | None, cause: TidewaterError) -> None:
        self._client.send(frames.text(say.error(id_, cause)))

    # ---- what comes

    def text(self, payload: bytes) -> None:
        """Take a text message."""
        id_: int | None = None
        try:
            topic = self._node.topic(self._namespace, self._name)
            decoder, commands = self._sockets.commands(topic)
            command = commands.text(payload)
            if msgspec.structs.astuple(command).count(None) != ONE_KEY:
                raise Invalid(
                    "InvalidFrame", f"a message is an object with one of {', '.join(say.NAMES)}"
                )
            produce = command.produce
            if produce is None:
                self._other(topic, command)
                return
            id_ = produce.id
            self._produce(topic, produce, decoder.decoded(produce.messages), len(payload))
        except TidewaterError as error:
            self._refuse(say.id_of(payload, is_binary=False) if id_ is None else id_, error)

    def binary(self, payload: bytes) -> None:
        """Take a binary message: Arrow to be produced."""
        try:
            topic = self._node.topic(self._namespace, self._name)
            decoder, commands = self._sockets.commands(topic)
            produce, stream = commands.binary(payload)
            rows = decoder.decode(decode.ARROW, {}, stream)
            self._produce(topic, produce, rows, len(payload))
        except TidewaterError as error:
            self._refuse(say.id_of(payload, is_binary=True), error)

    # ---- producing

    def _produce(self, topic: Topic, produce: Any, rows: Any, size: int) -> None:
        self._node.admit()
        request = None
        if produce.producer is not None or produce.sequence is not None:
            if produce.producer is None or produce.sequence is None:
                raise Invalid("InvalidProducer", "producer and sequence go together")
            request = Request(produce.producer, produce.sequence)
        self._count(1, size)
        try:
            self._sockets.producing.submit(
                topic, rows, size, produce.partition, request,
                lambda answer: self._stored(topic, produce, size, answer),
            )  # fmt: skip
        except TidewaterError:
            self._count(-1, -size)
            raise

    def _count(self, commands: int, size: int) -> None:
        self.under_way += commands
        self.under_way_bytes += size
        self._node.inflight_bytes += size

    def _stored(self, topic: Topic, produce: Any, size: int, answer: Answer) -> None:
        if answer.error is not None:
            topic.counters["errors"] += 1
            self._answer(size, frames.text(say.error(produce.id, answer.error)))
            return
        topic.counters["messages"] += sum(stored.count for stored in answer.acks.values())
        if produce.ack == "table":
            self._node.spawn(self._stored_in_table(topic, produce, size, answer))
            return
        said = b'{"ack":{"id":%d,"acks":[%b]}}' % (produce.id, acks_json(answer))
        self._answer(size, frames.text(said))

    async def _stored_in_table(self, topic: Topic, produce: Any, size: int, answer: Answer) -> None:
        timeout_ms = min(produce.timeout_ms, self._node.settings.limits.flush_wait_max.ms)
        try:
            snapshot = await self._sockets.producing.in_table(topic, answer, timeout_ms)
        except TidewaterError as error:
            self._answer(size, frames.text(say.error(produce.id, error)))
            return
        said = b'{"ack":{"id":%d,"acks":[%b],"snapshot_id":%b}}' % (
            produce.id, acks_json(answer), str(snapshot).encode(),
        )  # fmt: skip
        self._answer(size, frames.text(said))

    def _answer(self, size: int, frame: bytes) -> None:
        self._count(-1, -size)
        self._client.send(frame)
        self._relax()

    # ---- reading

    def _other(self, topic: Topic, command: Any) -> None:
        if (read := command.read) is not None:
            following = Following(self._node, topic, self._sockets.chunks, self._client, read)
            self._begin(read.id, following)
        elif (credit := command.credit) is not None:
            self._stream(credit.id)[0].add_credit(credit.messages)
        elif (stop := command.stop) is not None:
            stream, task = self._stream(stop.id)
            del self._streams[stop.id]
            task.cancel()
            self._run(self._stopped(stop.id, stream, task))
        else:
            raise NotFound("NoSubscriptions", "this worker serves no subscriptions")

    def _stream(self, id_: int) -> tuple[Stream, asyncio.Task[None]]:
        found = self._streams.get(id_)
        if found is None:
            raise NotFound("UnknownStream", f"no read or subscription {id_} is under way")
        return found

    def _begin(self, id_: int, stream: Stream) -> None:
        if id_ in self._streams:
            raise Conflict("IdInUse", f"a read or subscription {id_} is under way")
        if len(self._streams) >= STREAMS_MAX:
            raise Overloaded(
                "TooManyStreams", f"a socket has at most {STREAMS_MAX} reads and subscriptions"
            )
        task = asyncio.create_task(self._guard(id_, stream))
        self._streams[id_] = (stream, task)

    async def _guard(self, id_: int, stream: Stream) -> None:
        """Run a stream; tell the client what ended it."""
        try:
            await stream.run()
        except TidewaterError as error:
            self._ended(id_, stream, error)
        except Exception:
            log.exception("a stream of %s/%s failed", self._namespace, self._name)
            fault = TidewaterError("Internal", "see the worker's log")
            self._ended(id_, stream, fault)

    def _ended(self, id_: int, stream: Stream, error: TidewaterError) -> None:
        found = self._streams.get(id_)
        if found is not None and found[0] is stream:
            del self._streams[id_]
            self._refuse(id_, error)

    async def _stopped(self, id_: int, stream: Stream, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        said: dict[str, Any] = {"id": id_}
        if stream.next_offset is not None:
            said["next_offset"] = stream.next_offset
        self._say({"stopped": said})

    def _run(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
