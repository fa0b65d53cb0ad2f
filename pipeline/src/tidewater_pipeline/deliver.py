"""Sending rows to a topic through a worker, from inside Spark's tasks.

A task is a *stream*: rows in a fixed order, cut by their number and their bytes into requests that
have a producer id and a sequence. Requests are sent one after the other, so a worker that finds a
sequence too old to remember has certainly stored it: a run that is started again, or a task that
Spark starts again, sends nothing twice (G8), and a stream's rows stay in order.

Workers recognise requests by partition. So each message's partition is chosen here, by how many the
topic had when the run began: one that goes on after the topic has grown asks the same partitions.
"""

import base64
import hashlib
import http.client
import json
import ssl
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tidewater_core.errors import Invalid, Retryable, TidewaterError

ATTEMPTS_MAX: Final = 30
PAUSE_S_MAX: Final = 5.0
TIMEOUT_S: Final = 60.0
AGAIN: Final = frozenset({429, 503, 507})
STORED_LONG_AGO: Final = "SequenceTooOld"
REQUEST_BYTES_MAX: Final = 4 * 1024**2
"""A request ends before it grows beyond this, unless it is a single message. Far below what a
worker takes, and no option: with another size a run that goes on would cut otherwise."""
TASKS_AT_ONCE: Final = 64
"""Tasks of one Spark job: each gives the driver its last batch."""
HELD_BYTES_MAX: Final = 256 * 1024**2
"""What the driver holds of them: a fourth of its heap, and of what Spark lets tasks return."""
assert TASKS_AT_ONCE * REQUEST_BYTES_MAX <= HELD_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Access:
    """Who we are to the worker, and whom we trust: as values, since executors have no files."""

    token: str = field(default="", repr=False)
    token_file: str = ""
    """Read again for each request, where it is: Kubernetes writes a new token before one ends."""
    ca: str = ""
    """Certificates, as PEM; empty: those that the machine trusts."""

    @classmethod
    def of(cls, token: str | None, token_file: str | None, ca_file: str | None) -> "Access":
        """Read the files that the arguments name."""
        if token_file:
            token = _text(token_file).strip()
            if not token:
                raise Invalid("BadTokenFile", f"{token_file} is empty")
        ca = _text(ca_file) if ca_file else ""
        if ca_file and not ca.strip():
            raise Invalid("BadCa", f"{ca_file} is empty")  # else everybody's roots would do
        return cls(token or "", token_file or "", ca)

    def headers(self) -> dict[str, str]:
        """Return what every request says of us."""
        token = self.token
        if self.token_file:
            with suppress(OSError):  # an executor: the token that the driver has read
                token = Path(self.token_file).read_text(encoding="utf-8").strip() or token
        return {"Authorization": f"Bearer {token}"} if token else {}


NOBODY: Final = Access()
"""No token, and the machine's own roots."""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid("InvalidArgument", f"cannot read {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Target:
    """Where the messages go."""

    url: str
    """A worker: `http://host:port`."""
    topic: str
    batch_rows: int = 1000
    run_id: str = ""
    """Begins the producer ids: the same id never stores a message twice."""
    access: Access = NOBODY
    typed: bool = False
    """Whether the topic has columns of its own; else it takes bytes."""
    partitions: int = 1
    """How many the topic had when the run began."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What has one sequence: a request to each partition that has messages in it."""

    stream: str
    sequence: int
    messages: tuple[bytes, ...]
    """Each the JSON of a message."""
    partitions: tuple[int, ...]
    """Of each message."""

    def parts(self) -> list[tuple[int, list[bytes]]]:
        """Return the messages of each partition, in order."""
        found: dict[int, list[bytes]] = {}
        for partition, message in zip(self.partitions, self.messages, strict=True):
            found.setdefault(partition, []).append(message)
        return sorted(found.items())


@dataclass(slots=True)
class Sent:
    """What a task did."""

    messages: int = 0
    requests: int = 0
    known: int = 0
    """Messages that were stored by an earlier run."""
    errors: list[str] = field(default_factory=list)
    last: Batch | None = None
    """The last batch, which is not sent yet."""


def producer_id(run_id: str, stream: str) -> str:
    """Name a stream's producer in at most 128 bytes."""
    return f"{run_id[:60]}-{hashlib.sha256(stream.encode()).hexdigest()[:24]}"


def run_id_of(*parts: object) -> str:
    """Make an id from what the run does: doing the same again is the same run."""
    text = "\n".join(str(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def route(target: Target, stream: str) -> Callable[[bytes | None], int]:
    """Return what chooses a message's partition by its key, as a worker does.

    Messages without a key all go where the stream's producer id belongs.
    """
    own = zlib.crc32(producer_id(target.run_id, stream).encode()) % target.partitions
    return lambda key: own if key is None else zlib.crc32(key) % target.partitions


def message_of(
    key: bytes | None, headers: Mapping[str, str], payload: object, typed: bool
) -> bytes:
    """Write one message as JSON.

    A payload that is text is JSON already, and is passed on as it stands: to read it here would
    make floats of decimals. A typed topic takes it as its columns, another one as text to store.
    """
    if payload is None:
        fields = ['"value":null']
    elif isinstance(payload, (bytes, bytearray)):
        fields = [f'"value_b64":"{base64.b64encode(payload).decode()}"']
    else:
        fields = [f'"value":{payload if typed else json.dumps(payload)}']
    if key is not None:
        fields.append(f'"key_b64":"{base64.b64encode(key).decode()}"')
    if headers:
        fields.append(f'"headers":{json.dumps(dict(headers))}')
    return f"{{{','.join(fields)}}}".encode()


def cut_by_offset(
    stream: str, rows: Iterable[tuple[int, int, bytes]], batch_rows: int
) -> Iterator[Batch]:
    """Cut rows (offset, partition to send to, message) at multiples of `batch_rows`.

    A filter does not move these cuts. What lies between two multiples and is too large for one
    request is several, in the order of their sequences: the rows must begin where they began.
    """
    waiting: list[tuple[int, bytes]] = []
    block = piece = nbytes = 0
    for offset, partition, message in rows:
        is_next = offset // batch_rows != block
        if is_next or nbytes + len(message) > REQUEST_BYTES_MAX:
            if waiting:
                yield _batch(stream, block * batch_rows + piece, waiting)
            piece = 0 if is_next else piece + bool(waiting)
            waiting, block, nbytes = [], offset // batch_rows, 0
        waiting.append((partition, message))
        nbytes += len(message)
    if waiting:
        yield _batch(stream, block * batch_rows + piece, waiting)


def _batch(stream: str, sequence: int, rows: list[tuple[int, bytes]]) -> Batch:
    partitions, messages = zip(*rows, strict=True)
    return Batch(stream, sequence, messages, partitions)


def cut_in_order(
    stream: str, rows: Iterable[tuple[int, bytes]], batch_rows: int
) -> Iterator[Batch]:
    """Cut rows (partition to send to, message) whose position is their order."""
    numbered = ((n, partition, message) for n, (partition, message) in enumerate(rows))
    return cut_by_offset(stream, numbered, batch_rows)


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """What a worker says of a topic."""

    partitions: int
    typed: bool


class Sender:
    """One connection to a worker; sends batches one after the other until each is stored."""

    def __init__(self, target: Target) -> None:
        scheme, host, port = _address(target.url)
        self._connection: http.client.HTTPConnection
        if scheme == "https":
            self._connection = http.client.HTTPSConnection(
                host, port, timeout=TIMEOUT_S, context=_trust(target.access.ca)
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        self._target = target

    def topic(self) -> TopicInfo:
        """Ask what the topic is like."""
        status, answer = self._request("GET", f"/v1/{self._target.topic}", None, {})
        if status != 200:
            raise TidewaterError.from_json(answer, status)
        return TopicInfo(len(answer["partitions"]), bool(answer["typed"]))

    def send(self, batch: Batch, sent: Sent) -> None:
        """Store one batch, however often it takes; raise what no repetition changes."""
        headers = {
            "Content-Type": "application/json",
            "Tidewater-Producer": producer_id(self._target.run_id, batch.stream),
            "Tidewater-Sequence": str(batch.sequence),
        }
        for partition, messages in batch.parts():
            self._send(partition, messages, headers, sent)

    def _send(
        self, partition: int, messages: list[bytes], headers: Mapping[str, str], sent: Sent
    ) -> None:
        path = f"/v1/{self._target.topic}/messages?partition={partition}"
        body = b'{"messages":[' + b",".join(messages) + b"]}"
        status, answer = self._request("POST", path, body, headers)
        error = answer.get("error", {})
        stored = status == 409 and error.get("reason") == STORED_LONG_AGO
        if status != 200 and not stored:
            raise TidewaterError.from_json(answer, status)
        sent.requests += 1
        sent.messages += len(messages)
        if stored or any(ack.get("duplicate") for ack in answer.get("acks", [])):
            sent.known += len(messages)

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        said = ""
        for attempt in range(ATTEMPTS_MAX):
            try:
                self._ask(method, path, body, {**headers, **self._target.access.headers()})
                response = self._connection.getresponse()
                answer: dict[str, Any] = json.loads(response.read() or b"{}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._connection.close()
                said = str(error)
            else:
                if response.status not in AGAIN:
                    return response.status, answer
                said = str(answer)
            time.sleep(min(PAUSE_S_MAX, 0.1 * 2**attempt))
        raise Retryable("WorkerUnreachable", f"{self._target.url}{path}: {said[:300]}")

    def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> None:
        try:
            self._connection.request(method, path, body, headers)
        except ValueError:  # it says the whole header, which may be the token's
            said = "the token, the run's id or the worker's name has characters that none has"
            raise Invalid("InvalidRequest", said) from None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _address(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of a worker."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.scheme, parts.hostname, parts.port
    except ValueError:  # brackets around no address, a port that is no number
        pass
    raise Invalid("InvalidUrl", f"{url!r} is not the address of a worker")


def _trust(ca: str) -> ssl.SSLContext:
    # Beside certificates a file may have comments, in any language; ssl takes none of those.
    certificates = ca.encode("ascii", "ignore").decode()
    try:
        return ssl.create_default_context(cadata=certificates or None)
    except ssl.SSLError as error:
        raise Invalid("BadCa", f"the file of the CA holds no certificates: {error}") from error


def topic_info(url: str, topic: str, access: Access) -> TopicInfo:
    """Ask a worker what a topic is like."""
    with closing(Sender(Target(url, topic, access=access))) as sender:
        return sender.topic()


def send_all(target: Target, batches: Iterable[Batch]) -> Sent:
    """Send the batches of a task, all but the last.

    Spark ends the rows of a task that is cancelled as if there were no more: the last batch may be
    a cut one, and its sequence must not be used for less than it stands for. `finish` sends it.
    """
    sent = Sent()
    with closing(Sender(target)) as sender:
        for batch in batches:
            if sent.last is not None:
                sender.send(sent.last, sent)
            sent.last = batch
    return sent


def finish(target: Target, done: Iterable[Sent]) -> list[Sent]:
    """Send the last batches of tasks that came to their end."""
    finished = list(done)
    with closing(Sender(target)) as sender:
        for sent in finished:
            if sent.last is not None:
                sender.send(sent.last, sent)
                sent.last = None
    return finished
