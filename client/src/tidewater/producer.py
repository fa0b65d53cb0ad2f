"""Producers: a batch is stored whole or not at all, and once however often it is sent.

A producer has an id and numbers its batches (`Tidewater-Producer`, `Tidewater-Sequence`). When no
answer comes it sends the same batch under the same number, and the server recognises it. A new
producer object is a new producer: what an earlier process may have sent is not its concern.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tidewater import wire
from tidewater.batching import BatchOptions, Posting
from tidewater.producing import MOVED, AckLevel, Keys, Requests, encode_one
from tidewater.retry import RetryPolicy
from tidewater.routing import Routes
from tidewater.tables import batches_of, has_keys
from tidewater.transport import Transport
from tidewater.ways import Ways
from tidewater.wire import Ack, Message, Produced
from tidewater_core.clock import IdSource, SystemIds
from tidewater_core.errors import TidewaterError
from tidewater_core.names import TopicName

if TYPE_CHECKING:
    import pyarrow as pa

    from tidewater.tables import ArrowData


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
        ways: Ways | None = None,
        batching: BatchOptions | None = None,
    ) -> None:
        """Make a producer for one topic; nothing is sent yet.

        With `ways` messages go straight to the owner of their partition where it can be reached.
        """
        self._ids = ids or SystemIds()
        self._topic = topic if isinstance(topic, TopicName) else TopicName.parse(topic)
        self._retry = retry or RetryPolicy()
        self._repeatable = idempotent
        self._requests = Requests(
            self._topic,
            ack=ack,
            partition=partition,
            idempotent=idempotent,
            ids=self._ids,
        )
        self._ways = ways or Ways(transport)
        self._routes = Routes(transport.origin, direct=ways is not None)
        # One batch at a time: a retried batch never lands behind a later one.
        self._lock = threading.Lock()
        self._posting_lock = threading.Lock()
        self._posting: Posting | None = None
        self._post_options: dict[str, Any] = {
            "ack": ack,
            "partition": partition,
            "idempotent": idempotent,
            "retry": self._retry,
            "direct": ways is not None,
            "timeout_s": transport.timeout_s,
            "batching": batching,
        }

    def __enter__(self) -> Self:
        """Return the producer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what was posted."""
        self.close()

    def send(
        self,
        value: Any,
        key: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Ack:
        """Send one message and return where it is stored."""
        return self._send(*encode_one(value, key, headers), (key,)).acks[0]

    def send_many(self, messages: Iterable[Message]) -> Produced:
        """Send a batch as JSON."""
        listed = list(messages)
        return self._send(wire.encode_json(listed), wire.JSON, [m.key for m in listed])

    def send_arrow(self, data: "pa.RecordBatch | pa.Table") -> Produced:
        """Send the rows of a batch or a table in one request; its columns are the topic's."""
        keys = None if has_keys(data) else (None,)
        return self._send(wire.arrow_body(data), wire.ARROW, keys)

    def send_table(self, data: "ArrowData") -> Produced:
        """Send all rows of a table, a DataFrame or a stream, in as many requests as it takes."""
        return self.send_batches((data,))

    def send_batches(self, batches: "Iterable[ArrowData]") -> Produced:
        """Send tables, DataFrames or batches one after the other; each request is whole."""
        acks: list[Ack] = []
        snapshot_id = None
        for data in batches:
            for batch in batches_of(data):
                produced = self.send_arrow(batch)
                acks += produced.acks
                snapshot_id = produced.snapshot_id
        return Produced(acks, snapshot_id)

    def send_body(self, body: bytes, content_type: str, keys: Keys | None = None) -> Produced:
        """Send a batch that is already encoded; `keys`: those of its messages, if known."""
        return self._send(body, content_type, keys)

    def _send(self, body: bytes, content_type: str, keys: Keys | None) -> Produced:
        with self._lock:
            batch = self._requests.batch(body, content_type, keys)
            attempt = 1
            while True:
                self._ways.learn(self._routes, self._topic)
                partition = self._requests.partition_of(self._routes, batch)
                transport = self._ways.to(self._routes.origin_of(partition))
                request = self._requests.request(transport.origin, batch)
                try:
                    return wire.decode_produced(transport.send(request))
                except TidewaterError as error:
                    is_moved = self._requests.moved(batch, error, self._routes)
                    if self._routes.failed(transport.origin, error):
                        continue
                    wait_s = self._retry.wait_s(
                        MOVED if is_moved else error, attempt, self._ids.jitter(),
                        repeatable=self._repeatable,
                    )  # fmt: skip
                    if wait_s is None:
                        raise batch.last_word(error) from error
                time.sleep(wait_s)
                attempt += 1

    # ---- batches that form by themselves

    def post(
        self,
        value: Any,
        key: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "Future[Ack]":
        """Send a message together with others that are posted about now; the future has its ack.

        Blocks while too much waits to be sent. Messages of one key keep their order.
        """
        posting = self._posting
        if posting is None:
            with self._posting_lock:
                posting = self._posting
                if posting is None:
                    posting = self._posting = Posting(
                        self._ways.base.origin, self._topic, self._post_options
                    )
        return posting.post(Message(value, key, headers))

    def flush(self) -> None:
        """Wait until everything posted so far is stored; raise the first error since the last."""
        if self._posting is not None:
            self._posting.flush()

    def close(self) -> None:
        """Wait for what was posted; `send` needs no closing."""
        with self._posting_lock:
            posting, self._posting = self._posting, None
        if posting is not None:
            posting.close()
