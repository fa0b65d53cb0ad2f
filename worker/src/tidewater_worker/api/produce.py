"""Producing: from a request to an answer, with callbacks and no task per request.

This is the hot path. It is called by the protocol for each produce request, and by the ordinary
route when a request comes any other way; both get their answer through `respond`.
"""

import logging
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qsl

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import (
    Invalid,
    OutcomeUnknown,
    TidewaterError,
    TooLarge,
    Unsupported,
)
from tidewater_worker.api.decode import TopicDecoder
from tidewater_worker.api.errors import error_body
from tidewater_worker.api.sizes import check_log_bytes, held_bytes, log_bytes_max
from tidewater_worker.cluster.forwarding import FORWARDED, check_owner
from tidewater_worker.log.group import Submission
from tidewater_worker.log.producers import Duplicate, Request, Stored
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Payload, Topic

PRODUCER_HEADER: Final = b"tidewater-producer"
SEQUENCE_HEADER: Final = b"tidewater-sequence"
_MESSAGE_HEADERS: Final = (b"tidewater-key", b"tidewater-header-", b"ce-")
_ONCE: Final = (PRODUCER_HEADER, SEQUENCE_HEADER, *_MESSAGE_HEADERS)
ACK_TABLE_WAIT_MS: Final = 30_000
DIGITS_MAX: Final = 19
_DUPLICATE: Final = b',"duplicate":true'
_QUERY: Final = frozenset({"ack", "partition", "timeout_ms"})
log = logging.getLogger(__name__)

Respond = Callable[[int, bytes, int | None], None]
"""(status, JSON body, Retry-After in ms)."""
RawHeaders = list[tuple[bytes, bytes]]


class Answer:
    """Gathers the acks of one request's partitions."""

    __slots__ = ("acks", "error", "left", "respond")

    def __init__(self, left: int, respond: Callable[["Answer"], None]) -> None:
        self.left = left
        self.acks: dict[int, Stored] = {}
        self.error: TidewaterError | None = None
        self.respond = respond

    def one(self, partition: int, result: Stored | TidewaterError) -> None:
        """Take a partition's result; the last one ends the request."""
        if isinstance(result, TidewaterError):
            # That a part may be stored is not outweighed by one that certainly is not.
            if not isinstance(self.error, OutcomeUnknown):
                self.error = result
        else:
            self.acks[partition] = result
        self.left -= 1
        if self.left == 0:
            if self.error is not None and self.acks:
                said = f"{sorted(self.acks)} are stored, but: {self.error}"
                self.error = OutcomeUnknown("PartlyStored", f"partitions {said}", 500)
            self.respond(self)


class Producing:
    """Takes produce requests for a node's topics."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._bytes_max = log_bytes_max(node.settings.limits)
        self._decoders: dict[str, tuple[TopicSpec, TopicDecoder]] = {}

    def decoder(self, topic: Topic) -> TopicDecoder:
        """Return the decoder for a topic's present schema."""
        name = str(topic.name)
        known = self._decoders.get(name)
        if known is None or known[0] is not topic.spec:
            known = (topic.spec, TopicDecoder.of(topic.spec, self._node.settings.limits))
            self._decoders[name] = known
        return known[1]

    def __call__(
        self,
        namespace: str,
        name: str,
        query: str,
        headers: RawHeaders,
        body: bytes,
        respond: Respond,
    ) -> None:
        """Store a request's messages; `respond` is called once, now or later."""
        try:
            self._produce(namespace, name, query, headers, body, respond)
        except TidewaterError as error:
            respond(error.status, error_body(error), error.retry_after_ms)
        except Exception:
            log.exception("produce to %s/%s failed", namespace, name)
            fault = OutcomeUnknown("Internal", "this is a fault of the worker; its log has more")
            respond(500, error_body(fault), None)

    def _produce(
        self,
        namespace: str,
        name: str,
        query: str,
        headers: RawHeaders,
        body: bytes,
        respond: Respond,
    ) -> None:
        node = self._node
        node.admit()
        topic = node.topic(namespace, name)
        limit = node.settings.limits.request_bytes_max
        if len(body) > limit:
            raise TooLarge("RequestTooLarge", f"a request has at most {limit} bytes")
        asked, ack_table, timeout_ms = _options(query) if query else (None, False, 0)
        fields = dict(headers)
        if len(fields) < len(headers):
            _check_twice(headers)
        if fields.get(b"content-encoding", b"identity") != b"identity":
            raise Unsupported(
                "UnsupportedEncoding",
                "a body is sent as it is, without Content-Encoding; Arrow's own compression is "
                "taken",
            )
        request = _request(fields)
        content_type = fields.get(b"content-type", b"").decode("latin-1")
        texts = {
            key.decode("latin-1"): _text(key, value)
            for key, value in headers
            if key.startswith(_MESSAGE_HEADERS)
        }
        payload = self.decoder(topic).decode(content_type, texts, body)
        self.submit(
            topic, payload, len(body), asked, request,
            lambda done: self._finish(topic, done, ack_table, timeout_ms, respond),
            may_forward=FORWARDED not in fields,
        )  # fmt: skip

    def submit(
        self,
        topic: Topic,
        payload: Payload,
        body_bytes: int,
        asked: int | None,
        request: Request | None,
        done: Callable[[Answer], None],
        *,
        may_forward: bool = True,
        nbytes: int | None = None,
    ) -> None:
        """Give decoded messages to the log, whole or not at all; `done` is called once, later.

        `nbytes` are the payload's `held_bytes`, for who knows them already.
        """
        if nbytes is None:
            nbytes = held_bytes(payload)
        check_log_bytes(nbytes, self._bytes_max)
        parts = topic.route(payload, nbytes, asked, request.producer if request else None)
        answer = Answer(len(parts), done)
        away: list[tuple[Partition, Payload]] = []
        if topic.is_spread and may_forward:
            away = [(topic.partition(n), part) for n, part in parts if topic.is_elsewhere(n)]
            parts = [(n, part) for n, part in parts if not topic.is_elsewhere(n)]
        # All are asked before the first one takes its share: whole or not at all. What another
        # worker refuses nonetheless is gathered with what others have stored.
        for partition, _ in away:
            check_owner(partition)
        appenders = [topic.partition(number).ready() for number, _ in parts]
        submissions = []
        for (number, part), appender in zip(parts, appenders, strict=True):
            submission = Submission(
                part,
                nbytes if len(parts) == 1 else held_bytes(part),
                lambda result, number=number: answer.one(number, result),  # type: ignore[misc]
                request,
            )
            appender.check(submission)
            submissions.append((appender, submission))
        for partition, part in away:
            self._node.forwarding.produce(
                topic, partition, part, request,
                lambda result, number=partition.number: answer.one(number, result),  # type: ignore[misc]
            )  # fmt: skip
        for appender, submission in submissions:
            appender.offer(submission)
        counters = topic.counters
        counters["requests"] += 1
        counters["bytes"] += body_bytes

    def _finish(
        self, topic: Topic, answer: Answer, ack_table: bool, timeout_ms: int, respond: Respond
    ) -> None:
        if answer.error is not None:
            topic.counters["errors"] += 1
            respond(answer.error.status, error_body(answer.error), answer.error.retry_after_ms)
            return
        topic.counters["messages"] += sum(stored.count for stored in answer.acks.values())
        if ack_table:
            self._node.spawn(self._finish_in_table(topic, answer, timeout_ms, respond))
            return
        respond(200, b'{"acks":[' + acks_json(answer) + b"]}", None)

    async def _finish_in_table(
        self, topic: Topic, answer: Answer, timeout_ms: int, respond: Respond
    ) -> None:
        try:
            snapshot = await self.in_table(topic, answer, timeout_ms)
        except TidewaterError as error:
            respond(error.status, error_body(error), error.retry_after_ms)
            return
        body = b'{"acks":[%b],"snapshot_id":%b}' % (acks_json(answer), str(snapshot).encode())
        respond(200, body, None)

    async def in_table(self, topic: Topic, answer: Answer, timeout_ms: int) -> int | None:
        """Wait until stored messages are in the table; return the snapshot that has them.

        The messages are in the log: whatever goes wrong from here on, no error says that nothing
        was stored, or a producer would send them under another number (G8).
        """
        try:
            return await self._in_table(topic, answer, timeout_ms / 1000)
        except TidewaterError as error:
            said = str(error)
        except TimeoutError:
            said = f"not after {timeout_ms} ms"
        except Exception as error:  # whoever waits, and all behind it, must get an answer
            log.exception("ack=table of %s", topic.name)
            said = f"a fault of the worker: {error!r}"
        raise not_in_table_yet(said)

    async def _in_table(self, topic: Topic, answer: Answer, timeout_s: float) -> int | None:
        ends = {number: stored.offset + stored.count for number, stored in answer.acks.items()}
        upto = {number: end for number, end in ends.items() if not topic.is_elsewhere(number)}
        away = ends.keys() - upto.keys()
        snapshot = None
        if away:
            # Flushing needs another permission than producing: it is this worker that asks.
            others = await self._node.forwarding.flush(topic, timeout_s, away, as_worker=True)
            told = [other["frontier"] for other in others]
            if any(all(has.get(str(n), 0) < ends[n] for has in told) for n in away):
                raise TimeoutError  # a partition changes hands, and who was asked has it no more
            snapshot = max(others, key=lambda other: sum(other["frontier"].values()))["snapshot_id"]
        if not upto:
            return snapshot
        if not await self._node.wait_committed(topic, upto, timeout_s):
            raise TimeoutError
        return topic.state.snapshot_id if topic.state else None


def not_in_table_yet(said: str) -> OutcomeUnknown:
    """Say that messages are stored and that nobody knows of them in the table."""
    return OutcomeUnknown(
        "NotInTableYet", f"the messages are in the log, but not known to be in the table: {said}",
        1_000,
    )  # fmt: skip


def acks_json(answer: Answer) -> bytes:
    """Write the acks, one a partition, without the brackets around them."""
    return b",".join(
        b'{"partition":%d,"offset":%d,"count":%d%b}'
        % (number, stored.offset, stored.count, _DUPLICATE if type(stored) is Duplicate else b"")
        for number, stored in sorted(answer.acks.items())
    )


def _text(name: bytes, value: bytes) -> str:
    """Read a header as what its bytes say: a key must not depend on the door it came by."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        said = f"the HTTP header {name.decode('latin-1')!r} is not UTF-8"
        raise Invalid("InvalidHeader", said) from None


def _check_twice(headers: RawHeaders) -> None:
    """Refuse to choose between two keys, or between two values of a header."""
    seen = set()
    for name, _ in headers:
        if name in seen and name.startswith(_ONCE):
            raise Invalid("InvalidHeader", f"{name.decode('latin-1')[:40]!r} is there twice")
        seen.add(name)


def _request(fields: dict[bytes, bytes]) -> Request | None:
    producer, sequence = fields.get(PRODUCER_HEADER), fields.get(SEQUENCE_HEADER)
    if producer is None and sequence is None:
        return None
    if producer is None or sequence is None:
        raise Invalid("InvalidProducer", "Tidewater-Producer and Tidewater-Sequence go together")
    if not sequence.isdigit() or len(sequence) > DIGITS_MAX:
        raise Invalid("InvalidSequence", "Tidewater-Sequence is a number from 0 on")
    try:
        return Request(producer.decode(), int(sequence))
    except UnicodeDecodeError:
        raise Invalid("InvalidProducer", "Tidewater-Producer is UTF-8") from None


def _options(query: str) -> tuple[int | None, bool, int]:
    asked: int | None = None
    ack_table = False
    timeout_ms = ACK_TABLE_WAIT_MS
    pairs = parse_qsl(query, keep_blank_values=True)
    if len(dict(pairs)) < len(pairs):
        raise Invalid("InvalidParameter", "a parameter is there twice")
    for name, value in pairs:
        if name not in _QUERY:
            raise Invalid(
                "UnknownParameter", f"produce takes ack, partition, timeout_ms, not {name[:40]!r}"
            )
        if name == "ack":
            if value not in ("log", "table"):
                raise Invalid("InvalidParameter", f"ack is log or table, not {value!r}")
            ack_table = value == "table"
        elif not (value.isascii() and value.isdigit() and len(value) <= DIGITS_MAX):
            raise Invalid("InvalidParameter", f"{name} is a number from 0 on, not {value!r}")
        elif name == "partition":
            asked = int(value)
        else:
            timeout_ms = min(int(value), 600_000)
    return asked, ack_table, timeout_ms
