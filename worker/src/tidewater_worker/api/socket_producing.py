"""Producing over a socket: the same way into the log as over HTTP, many commands under way.

Commands that arrive together and would be joined by the group commit anyway are joined here
already: small messages cost what a batch costs. Each command still has its own answer.
"""

from collections.abc import Callable
from typing import Any, Final

from tidewater_core.errors import Invalid, TidewaterError
from tidewater_worker.api import decode
from tidewater_worker.api import socket_frames as frames
from tidewater_worker.api import socket_messages as say
from tidewater_worker.api.decode import TopicDecoder
from tidewater_worker.api.produce import Answer, Producing, acks_json
from tidewater_worker.api.socket_reading import Client
from tidewater_worker.log.producers import Request, Stored
from tidewater_worker.node import Node
from tidewater_worker.topic import Payload, Topic

JOINED_ROWS_MAX: Final = decode.ROWS_AS_PYTHON_MAX
"""So many messages of commands are joined; past it they gain nothing."""


class SocketProducer:
    """The `produce` commands of one socket."""

    def __init__(
        self, node: Node, producing: Producing, client: Client, relax: Callable[[], None]
    ) -> None:
        self._node, self._producing, self._client = node, producing, client
        self._relax = relax
        """Called after answers: there is room for more commands."""
        self.under_way = 0
        """Commands without an answer."""
        self.under_way_bytes = 0
        self._waiting: list[tuple[Any, int]] = []
        self._waiting_rows = 0
        self._topic: Topic = None  # type: ignore[assignment]
        self._decoder: TopicDecoder = None  # type: ignore[assignment]

    def take(self, topic: Topic, decoder: TopicDecoder, produce: Any, size: int) -> None:
        """Take a command in JSON; it is stored by the next `flush`."""
        messages = produce.messages
        rows = len(messages)
        joins = produce.sequence is None and produce.producer is None and produce.ack == "log"
        if joins and topic.spec.partitions > 1 and produce.partition is None:
            joins = all(m.key is None and m.key_b64 is None for m in messages)
        waiting = self._waiting
        if waiting and (
            not joins
            or decoder is not self._decoder
            or produce.partition != waiting[0][0].partition
            or self._waiting_rows + rows > JOINED_ROWS_MAX
        ):
            self.flush()
            waiting = self._waiting
        if joins:
            self._topic, self._decoder = topic, decoder
            waiting.append((produce, size))
            self._waiting_rows += rows
        else:
            self._one(topic, decoder, produce, size)

    def flush(self) -> None:
        """Give to the log what was taken."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting, self._waiting_rows = [], 0
        topic, decoder = self._topic, self._decoder
        if len(waiting) == 1:
            self._one(topic, decoder, *waiting[0])
            return
        messages = [message for produce, _ in waiting for message in produce.messages]
        size = sum(size for _, size in waiting)
        try:
            payload = decoder.decoded(messages)
            if not all(produce.messages for produce, _ in waiting):
                raise Invalid("NoMessages", "one of them is empty")
            self._submit(
                topic, payload, len(waiting), size, waiting[0][0].partition, None,
                lambda answer: self._stored_together(topic, waiting, size, answer),
            )  # fmt: skip
        except TidewaterError:
            # One of them is bad, or there is no room: each gets its own answer.
            for produce, size in waiting:
                self._one(topic, decoder, produce, size)

    def batch(self, topic: Topic, produce: Any, payload: Payload, size: int) -> None:
        """Store a command whose messages are decoded already."""
        self.flush()
        try:
            self._submit(
                topic, payload, 1, size, produce.partition, _request(produce),
                lambda answer: self._stored(topic, produce, size, answer),
            )  # fmt: skip
        except TidewaterError as error:
            self._client.send(frames.text(say.error(produce.id, error)))

    def _one(self, topic: Topic, decoder: TopicDecoder, produce: Any, size: int) -> None:
        try:
            payload = decoder.decoded(produce.messages)
        except TidewaterError as error:
            self._client.send(frames.text(say.error(produce.id, error)))
            return
        self.batch(topic, produce, payload, size)

    def _submit(
        self,
        topic: Topic,
        payload: Payload,
        commands: int,
        size: int,
        partition: int | None,
        request: Request | None,
        done: Callable[[Answer], None],
    ) -> None:
        self._node.admit()
        self._count(commands, size)
        try:
            self._producing.submit(topic, payload, size, partition, request, done)
        except TidewaterError:
            self._count(-commands, -size)
            raise

    def _count(self, commands: int, size: int) -> None:
        self.under_way += commands
        self.under_way_bytes += size
        self._node.inflight_bytes += size

    # ---- answers

    def _stored_together(
        self, topic: Topic, commands: list[tuple[Any, int]], size: int, answer: Answer
    ) -> None:
        send = self._client.send
        if answer.error is not None:
            topic.counters["errors"] += len(commands)
            for produce, _ in commands:
                send(frames.text(say.error(produce.id, answer.error)))
        else:
            ((partition, stored),) = answer.acks.items()
            topic.counters["messages"] += stored.count
            send(_acks_together(partition, stored, commands))
        self._count(-len(commands), -size)
        self._relax()

    def _stored(self, topic: Topic, produce: Any, size: int, answer: Answer) -> None:
        if answer.error is not None:
            topic.counters["errors"] += 1
            self._answer(size, say.error(produce.id, answer.error))
            return
        topic.counters["messages"] += sum(stored.count for stored in answer.acks.values())
        if produce.ack == "table":
            self._node.spawn(self._stored_in_table(topic, produce, size, answer))
            return
        self._answer(size, b'{"ack":{"id":%d,"acks":[%b]}}' % (produce.id, acks_json(answer)))

    async def _stored_in_table(self, topic: Topic, produce: Any, size: int, answer: Answer) -> None:
        timeout_ms = min(produce.timeout_ms, self._node.settings.limits.flush_wait_max.ms)
        try:
            snapshot = await self._producing.in_table(topic, answer, timeout_ms)
        except TidewaterError as error:
            self._answer(size, say.error(produce.id, error))
            return
        said = b'{"ack":{"id":%d,"acks":[%b],"snapshot_id":%b}}' % (
            produce.id, acks_json(answer), str(snapshot).encode(),
        )  # fmt: skip
        self._answer(size, said)

    def _answer(self, size: int, said: bytes) -> None:
        self._count(-1, -size)
        self._client.send(frames.text(said))
        self._relax()


def _request(produce: Any) -> Request | None:
    if produce.producer is None and produce.sequence is None:
        return None
    if produce.producer is None or produce.sequence is None:
        raise Invalid("InvalidProducer", "producer and sequence go together")
    return Request(produce.producer, produce.sequence)


def _acks_together(partition: int, stored: Stored, commands: list[tuple[Any, int]]) -> bytes:
    """Frame one ack a command; their messages lie one after the other in the partition."""
    offset = stored.offset
    out = []
    for produce, _ in commands:
        count = len(produce.messages)
        out.append(
            frames.text(
                b'{"ack":{"id":%d,"acks":[{"partition":%d,"offset":%d,"count":%d}]}}'
                % (produce.id, partition, offset, count)
            )
        )
        offset += count
    return b"".join(out)
