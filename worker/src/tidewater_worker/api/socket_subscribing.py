"""A subscription over a socket: messages as the credit allows, and what becomes of them."""

import asyncio
from typing import Any, Final

import msgspec

from tidewater_worker.api import encode, subscriptions
from tidewater_worker.api import socket_frames as frames
from tidewater_worker.api import socket_messages as say
from tidewater_worker.api.socket_reading import CHUNK_BYTES, CHUNK_ROWS, Client
from tidewater_worker.dispatch.manager import Dispatch
from tidewater_worker.dispatch.part import Delivered
from tidewater_worker.dispatch.report import Report
from tidewater_worker.schema import table_arrow_schema
from tidewater_worker.topic import Topic

PULL_S: Final = 15.0
ALIVE_SHARE: Final = 3
"""A consumer without credit is noted as alive this often in an ackDeadline."""


class Subscribing:
    """One `subscribe` of a client: a consumer of a subscription."""

    next_offset = None

    def __init__(
        self, dispatch: Dispatch, topic: Topic, client: Client, command: say.Subscribe
    ) -> None:
        name = topic.name
        self._found = dispatch.find(name.namespace, name.name, command.subscription)
        self._topic, self._client, self._command = topic, client, command
        self._is_named = bool(command.consumer)
        self._consumer = command.consumer or dispatch.made_up_name("socket")
        self._credit = command.credit
        self._more = asyncio.Event()

    @property
    def subscription(self) -> str:
        """The subscription's name."""
        return self._command.subscription

    def add_credit(self, messages: int) -> None:
        """Allow so many messages more."""
        self._credit = min(self._credit + messages, say.ID_MAX)
        self._more.set()

    def touch(self) -> None:
        """Note that the consumer is alive."""
        self._found.touch(self._consumer)

    async def run(self) -> None:
        """Send until it is cancelled; raise what ends it."""
        command, kind = self._command, self._command.format
        told = False
        try:
            while True:
                rows = min(self._credit, CHUNK_ROWS[kind])
                wait_s = PULL_S if told else 0.0
                # Also without credit, the first time: an Exclusive subscription may be taken.
                if rows or not told:
                    delivered = await self._found.pull(
                        self._consumer, rows, wait_s, CHUNK_BYTES[kind]
                    )
                else:
                    delivered = []
                if not told:
                    told = True
                    said = {"id": command.id, "consumer": self._consumer}
                    self._client.send(frames.text(msgspec.json.encode({"subscribed": said})))
                if delivered:
                    async with subscriptions.given_back(self._found, self._consumer, delivered):
                        self._send(delivered)
                await self._client.drained()
                await self._wait_for_credit()
        finally:
            if not self._is_named:
                # Nobody else can come under a name that was made up for this stream.
                self._found.leave(self._consumer)

    async def _wait_for_credit(self) -> None:
        alive_s = self._found.spec.ack_deadline.seconds / ALIVE_SHARE
        while self._credit <= 0:
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), alive_s)
            except TimeoutError:
                self.touch()

    def _send(self, delivered: list[Delivered]) -> None:
        rows = sum(piece.batch.num_rows for piece in delivered)
        self._credit -= rows
        head = b'{"messages":{"id":%d,"count":%d' % (self._command.id, rows)
        lost = subscriptions.gaps_of(delivered)
        if lost:
            head += b',"gaps":' + msgspec.json.encode(lost)
        if self._command.format == "json":
            data = msgspec.json.encode(subscriptions._messages(delivered))
            self._client.send(frames.text(b"".join((head, b',"messages":', data, b"}}"))))
            return
        schema = subscriptions._arrow_schema(table_arrow_schema(self._topic.spec))
        pieces = (
            encode.arrow_schema_message(schema),
            subscriptions._arrow(delivered, schema),
            encode.ARROW_END,
        )
        payload = say.binary(head + b"}}", b"".join(pieces))
        self._client.send(frames.head(frames.Opcode.BINARY, len(payload)) + payload)


async def settle(dispatch: Dispatch, topic: Topic, command: Any) -> bytes:
    """Acknowledge, reject or extend; return the answer when that is stored."""
    name = topic.name
    if (done := command.acknowledge) is not None:
        found = dispatch.find(name.namespace, name.name, done.subscription)
        return _answer("acknowledged", done.id, await found.ack(done.ack_ids))
    if (back := command.reject) is not None:
        found = dispatch.find(name.namespace, name.name, back.subscription)
        delay_s = None if back.delay_ms is None else back.delay_ms / 1000
        return _answer("rejected", back.id, await found.nack(back.ack_ids, delay_s))
    longer = command.extend
    found = dispatch.find(name.namespace, name.name, longer.subscription)
    deadline_s = None if longer.deadline_ms is None else longer.deadline_ms / 1000
    return _answer("extended", longer.id, await found.extend(longer.ack_ids, deadline_s))


def _answer(kind: str, id_: int, report: Report) -> bytes:
    refused = [
        {"ack_id": each.ack_id, "reason": each.reason, "message": each.message}
        for each in report.refused
    ]
    return msgspec.json.encode({kind: {"id": id_, "count": report.done, "refused": refused}})
