"""Sending rows to a topic through a worker, from inside Spark's tasks.

A task is a *stream*: rows in a fixed order, cut into requests that have a producer id and a
sequence. Requests are sent one after the other, so a worker that finds a sequence too old to
remember has certainly stored it: a run that is started again, or a task that Spark starts again,
sends nothing twice (G8), and a stream's rows stay in order.
"""

import base64
import hashlib
import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from tidewater_core.errors import Invalid, Retryable, TidewaterError

ATTEMPTS_MAX: Final = 30
PAUSE_S_MAX: Final = 5.0
TIMEOUT_S: Final = 60.0
AGAIN: Final = frozenset({429, 503, 507})
STORED_LONG_AGO: Final = "SequenceTooOld"


@dataclass(frozen=True, slots=True)
class Target:
    """Where the messages go."""

    url: str
    """A worker: `http://host:port`."""
    topic: str
    batch_rows: int = 1000
    run_id: str = ""
    """Begins the producer ids: the same id never stores a message twice."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One request."""

    stream: str
    sequence: int
    messages: tuple[Mapping[str, Any], ...]
    partition: int | None = None
    """The partition to send to; None: by key, or the worker's choice."""


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


def message_of(key: bytes | None, headers: Mapping[str, str], payload: object) -> dict[str, Any]:
    """Write one message; bytes travel as base64, everything else as it is."""
    message: dict[str, Any] = {}
    if isinstance(payload, (bytes, bytearray)):
        message["value_b64"] = base64.b64encode(payload).decode()
    elif payload is not None:
        message["value"] = payload
    if key is not None:
        message["key_b64"] = base64.b64encode(key).decode()
    if headers:
        message["headers"] = dict(headers)
    return message


def cut_by_offset(
    stream: str,
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    batch_rows: int,
    partition: int | None,
) -> Iterator[Batch]:
    """Cut rows that have offsets at multiples of `batch_rows`: a filter does not move the cuts."""
    waiting: list[Mapping[str, Any]] = []
    sequence = -1
    for offset, message in rows:
        if offset // batch_rows != sequence:
            if waiting:
                yield Batch(stream, sequence, tuple(waiting), partition)
            waiting, sequence = [], offset // batch_rows
        waiting.append(message)
    if waiting:
        yield Batch(stream, sequence, tuple(waiting), partition)


def cut_in_order(
    stream: str, messages: Iterable[Mapping[str, Any]], batch_rows: int
) -> Iterator[Batch]:
    """Cut rows whose position is their order."""
    numbered = enumerate(messages)
    return cut_by_offset(stream, numbered, batch_rows, None)


class Sender:
    """One connection to a worker; sends batches one after the other until each is stored."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Invalid("InvalidUrl", f"{target.url!r} is not the address of a worker")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        self._target = target

    def partitions(self) -> int:
        """Ask how many partitions the topic has."""
        status, answer = self._request("GET", f"/v1/{self._target.topic}", None, {})
        if status != 200:
            raise TidewaterError.from_json(answer, status)
        found = answer["partitions"]
        return found if isinstance(found, int) else len(found)

    def send(self, batch: Batch, sent: Sent) -> None:
        """Store one batch, however often it takes; raise what no repetition changes."""
        path = f"/v1/{self._target.topic}/messages"
        if batch.partition is not None:
            path += f"?partition={batch.partition}"
        headers = {
            "Content-Type": "application/json",
            "Tidewater-Producer": producer_id(self._target.run_id, batch.stream),
            "Tidewater-Sequence": str(batch.sequence),
        }
        body = json.dumps({"messages": batch.messages}).encode()
        status, answer = self._request("POST", path, body, headers)
        error = answer.get("error", {})
        stored = status == 409 and error.get("reason") == STORED_LONG_AGO
        if status != 200 and not stored:
            raise TidewaterError.from_json(answer, status)
        sent.requests += 1
        sent.messages += len(batch.messages)
        if stored or any(ack.get("duplicate") for ack in answer.get("acks", [])):
            sent.known += len(batch.messages)

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        said = ""
        for attempt in range(ATTEMPTS_MAX):
            try:
                self._connection.request(method, path, body, dict(headers))
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

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


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
