"""One client of a socket: what it asks for, and what it gets. The wire is `socket`'s."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import msgspec

from tidewater_core.errors import Conflict, Invalid, NotFound, Overloaded, TidewaterError
from tidewater_core.names import TopicName
from tidewater_worker.api import decode
from tidewater_worker.api import socket_frames as frames
from tidewater_worker.api import socket_messages as say
from tidewater_worker.api.decode import TopicDecoder
from tidewater_worker.api.produce import Producing
from tidewater_worker.api.socket_access import Gate, Needs, Payload, needs_of
from tidewater_worker.api.socket_producing import SocketProducer
from tidewater_worker.api.socket_reading import Chunks, Client, Following
from tidewater_worker.api.socket_subscribing import Subscribing, settle
from tidewater_worker.auth.access import PRODUCE
from tidewater_worker.auth.access import topic as on_topic
from tidewater_worker.auth.guard import Guard
from tidewater_worker.dispatch.manager import Dispatch
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

    def __init__(
        self, node: Node, producing: Producing, dispatch: Dispatch, guard: Guard | None = None
    ) -> None:
        self.node = node
        self.guard = guard
        """Judges what clients ask for; None: they may do everything."""
        self.producing = producing
        self.dispatch = dispatch
        self.chunks = Chunks()
        self.open: int = 0
        """Sockets that are open."""
        self._commands: dict[TopicName, tuple[TopicDecoder, say.CommandDecoder]] = {}

    def commands(self, topic: Topic) -> tuple[TopicDecoder, say.CommandDecoder]:
        """Return the decoders for a topic's present schema."""
        known = self._commands.get(topic.name)
        if known is None or known[0].spec is not topic.spec:
            decoder = self.producing.decoder(topic)
            known = (decoder, say.CommandDecoder(decoder.messages))
            self._commands[topic.name] = known
        return known


class Session:
    """One client."""

    def __init__(
        self,
        sockets: Sockets,
        namespace: str,
        name: str,
        client: Client,
        relax: Callable[[], None],
        authorization: bytes | None = None,
    ) -> None:
        self._sockets, self._node = sockets, sockets.node
        self._namespace, self._name = namespace, name
        self._client = client
        self.producer = SocketProducer(sockets.node, sockets.producing, client, relax)
        self._relax = relax
        self._streams: dict[int, tuple[Stream, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate: Gate | None = None
        if sockets.guard is not None:
            self._gate = Gate(
                sockets.guard, authorization, self._do, self._refuse_payload, self.producer.flush
            )

    @property
    def under_way(self) -> int:
        """Commands without an answer."""
        return self.producer.under_way + len(self._tasks)

    @property
    def is_waiting(self) -> bool:
        """Tell whether commands wait until it is known that they are allowed."""
        return self._gate is not None and bool(self._gate.waiting)

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
        """End every read and subscription; what else was asked for is done all the same."""
        for _, task in self._streams.values():
            task.cancel()
        self._streams.clear()

    def _say(self, value: object) -> None:
        self._client.send(frames.text(msgspec.json.encode(value)))

    def _refuse(self, id_: int | None, cause: TidewaterError) -> None:
        self._client.send(frames.text(say.error(id_, cause)))

    # ---- what comes

    def text(self, payload: bytes) -> None:
        """Take a text message."""
        self._take((payload, False))

    def binary(self, payload: bytes) -> None:
        """Take a binary message: Arrow to be produced."""
        self._take((payload, True))

    def _take(self, payload: Payload) -> None:
        gate = self._gate
        if gate is None:
            self._do(payload, True)
            return
        needs = None if gate.waiting else self._do(payload, False)
        if gate.waiting or needs is not None:
            gate.waiting.append(payload)
            if needs is not None:
                self._run(gate.ask(needs))

    def _do(self, payload: Payload, is_allowed: bool) -> Needs | None:
        """Do what a message asks for; return what has to be asked before that."""
        data, is_binary = payload
        try:
            topic = self._node.topic(self._namespace, self._name)
            decoder, commands = self._sockets.commands(topic)
            if is_binary:
                return self._binary(topic, decoder, commands, data, is_allowed)
            return self._text(topic, decoder, commands, data, is_allowed)
        except TidewaterError as error:
            self._refuse_payload(payload, error)
        return None

    def _text(
        self,
        topic: Topic,
        decoder: TopicDecoder,
        commands: say.CommandDecoder,
        data: bytes,
        is_allowed: bool,
    ) -> Needs | None:
        command = commands.text(data)
        if msgspec.structs.astuple(command).count(None) != ONE_KEY:
            raise Invalid(
                "InvalidFrame", f"a message is an object with one of {', '.join(say.NAMES)}"
            )
        if not is_allowed and (needs := self._unknown(command)) is not None:
            return needs
        if command.produce is not None:
            self.producer.take(topic, decoder, command.produce, len(data))
        else:
            self._other(topic, command)
        return None

    def _binary(
        self,
        topic: Topic,
        decoder: TopicDecoder,
        commands: say.CommandDecoder,
        data: bytes,
        is_allowed: bool,
    ) -> Needs | None:
        if not is_allowed and self._gate is not None:
            needs = on_topic(PRODUCE, self._namespace, self._name)
            if not self._gate.is_known(needs):
                return needs
        produce, stream = commands.binary(data)
        rows = decoder.decode(decode.ARROW, {}, stream)
        self.producer.batch(topic, produce, rows, len(data))
        return None

    def _unknown(self, command: Any) -> Needs | None:
        """Return what has to be asked before a command is done."""
        if self._gate is None:
            return None
        needs = needs_of(command, self._namespace, self._name)
        return None if self._gate.is_known(needs) else needs

    def _refuse_payload(self, payload: Payload, error: TidewaterError) -> None:
        self._refuse(say.id_of(payload[0], is_binary=payload[1]), error)

    # ---- reading

    def _other(self, topic: Topic, command: Any) -> None:
        if (read := command.read) is not None:
            following = Following(self._node, topic, self._sockets.chunks, self._client, read)
            self._begin(read.id, following, command)
        elif (credit := command.credit) is not None:
            self._stream(credit.id)[0].add_credit(credit.messages)
        elif (stop := command.stop) is not None:
            stream, task = self._stream(stop.id)
            del self._streams[stop.id]
            task.cancel()
            self._run(self._stopped(stop.id, stream, task))
        elif (subscribe := command.subscribe) is not None:
            dispatch = self._sockets.dispatch
            stream_ = Subscribing(dispatch, topic, self._client, subscribe)
            self._begin(subscribe.id, stream_, command)
        else:
            self._run(self._settle(topic, command))

    def _stream(self, id_: int) -> tuple[Stream, asyncio.Task[None]]:
        found = self._streams.get(id_)
        if found is None:
            raise NotFound("UnknownStream", f"no read or subscription {id_} is under way")
        return found

    def _begin(self, id_: int, stream: Stream, command: Any) -> None:
        if id_ in self._streams:
            raise Conflict("IdInUse", f"a read or subscription {id_} is under way")
        if len(self._streams) >= STREAMS_MAX:
            raise Overloaded(
                "TooManyStreams", f"a socket has at most {STREAMS_MAX} reads and subscriptions"
            )
        needs = needs_of(command, self._namespace, self._name) if self._gate else ()
        task = asyncio.create_task(self._guard(id_, stream, needs))
        self._streams[id_] = (stream, task)

    async def _guard(self, id_: int, stream: Stream, needs: Needs) -> None:
        """Run a stream; tell the client what ended it."""
        try:
            if self._gate is None:
                await stream.run()
            else:
                await self._gate.run(needs, stream)
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

    async def _settle(self, topic: Topic, command: Any) -> None:
        asked = command.acknowledge or command.reject or command.extend
        for stream, _ in self._streams.values():
            if isinstance(stream, Subscribing) and stream.subscription == asked.subscription:
                stream.touch()
        try:
            said = await settle(self._sockets.dispatch, topic, command)
        except TidewaterError as error:
            self._refuse(asked.id, error)
        else:
            self._client.send(frames.text(said))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a command of a socket failed", exc_info=fault)
        self._relax()
