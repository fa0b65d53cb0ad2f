"""Load for the attack tests: many senders, unique payloads, and a record of every promise made.

A sender sends one request after the other and does not go on before it knows the outcome: when a
connection breaks, or the answer is 503 or 429, it sends *the same* request again, with the same
producer id and sequence (G8). So each payload must be stored at most once, and once if it was
acknowledged, whatever happened in between.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from tidewater_testing.checker import AckedBatch, Range, make_payload
from tidewater_testing.web import Answer, Connection, NoAnswerError, NotSentError

RETRY_PAUSE_S = 0.05
RETRY_PAUSE_S_MAX = 1.0
ABANDON_S = 5.0
"""After a stop, how long a sender goes on to ask for the outcome of its last request."""
RESENT_STATUSES = frozenset({429, 503, 507})

Encoder = Callable[[list[bytes], str | None], tuple[str, bytes]]
"""Payloads and an optional key -> content type and body."""


class RefusedError(AssertionError):
    """The worker refused a good request for good."""


def encode_json(payloads: list[bytes], key: str | None) -> tuple[str, bytes]:
    """Encode as a JSON batch."""
    messages = [
        {"value": payload.decode()} if key is None else {"key": key, "value": payload.decode()}
        for payload in payloads
    ]
    return "application/json", json.dumps({"messages": messages}).encode()


def encode_ndjson(payloads: list[bytes], key: str | None) -> tuple[str, bytes]:
    """Encode as one JSON message a line."""
    lines = [
        json.dumps({"value": payload.decode(), **({} if key is None else {"key": key})})
        for payload in payloads
    ]
    return "application/x-ndjson", ("\n".join(lines) + "\n").encode()


def encode_arrow(payloads: list[bytes], key: str | None) -> tuple[str, bytes]:
    """Encode as an Arrow IPC stream of one batch."""
    columns: dict[str, pa.Array] = {"value": pa.array(payloads, pa.binary())}
    if key is not None:
        columns["tw_key"] = pa.array([key.encode()] * len(payloads), pa.binary())
    batch = pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return "application/vnd.apache.arrow.stream", sink.getvalue().to_pybytes()


ENCODERS: tuple[Encoder, ...] = (encode_json, encode_ndjson, encode_arrow)


@dataclass
class Record:
    """What the senders were promised, and how it went."""

    acked: list[AckedBatch] = field(default_factory=list)
    messages: int = 0
    """Acknowledged messages."""
    unknown: int = 0
    """Requests whose connection broke before the answer."""
    resent: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Answers by which nothing was stored for now, by status and reason."""
    abandoned: int = 0
    """Requests that had no definite outcome when the load was stopped."""
    duplicates: int = 0
    """Re-sent requests that the worker had stored before."""


@dataclass(frozen=True)
class Load:
    """How the senders behave."""

    address: str
    """`host:port` of the worker."""
    topic: str
    """`namespace/name`."""
    senders: int = 6
    batch_max: int = 20
    """Messages of a request, at most."""
    payload_bytes_max: int = 200
    partitions: int = 1
    """Senders take turns: a fixed partition, or a key that routes."""
    pause_s: float = 0.0
    """Between two requests of a sender."""
    seed: int = 1
    prefix: str = "s"
    """Begins the sender names, so that two loads do not make the same payload."""
    encoders: tuple[Encoder, ...] = ENCODERS
    give_up_s: float = 60.0
    """A request that has no definite outcome after this long fails the test."""
    token: str = field(default="", repr=False)
    """Bearer token of the sender; empty: none is sent."""


class Traffic:
    """Senders that run until they are stopped; use as `async with`."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.record = Record()
        self._stopping = asyncio.Event()
        self._abandon_after = float("inf")
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Traffic":
        """Start the senders."""
        self._tasks = [
            asyncio.create_task(self._send_all(index)) for index in range(self.load.senders)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the senders, each after the request it is at (if it ends); raise what went wrong."""
        self._stopping.set()
        self._abandon_after = time.monotonic() + ABANDON_S
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def failed(self) -> bool:
        """Tell whether a sender gave up."""
        return any(task.done() for task in self._tasks) and not self._stopping.is_set()

    async def _send_all(self, index: int) -> None:
        load = self.load
        draw = random.Random(f"{load.seed}/{load.prefix}/{index}")
        name = f"{load.prefix}{index}"
        encoder = load.encoders[index % len(load.encoders)]
        key = None if index % 2 == 0 else f"key-{index}"
        route = f"?partition={index // 2 % load.partitions}" if key is None else ""
        connection = Connection(load.address)
        number = 0
        sequence = 0
        try:
            while not self._stopping.is_set():
                count = draw.randint(1, load.batch_max)
                payloads = [
                    make_payload(name, number + i, draw.randint(30, load.payload_bytes_max))
                    for i in range(count)
                ]
                kind, body = encoder(payloads, key)
                headers = {
                    "Content-Type": kind,
                    "Tidewater-Producer": name,
                    "Tidewater-Sequence": str(sequence),
                }
                if load.token:
                    headers["Authorization"] = f"Bearer {load.token}"
                await self._until_acked(connection, route, payloads, body, headers)
                number += count
                sequence += 1
                await asyncio.sleep(load.pause_s)
        finally:
            await connection.close()

    async def _until_acked(
        self,
        connection: Connection,
        route: str,
        payloads: list[bytes],
        body: bytes,
        headers: dict[str, str],
    ) -> None:
        path = f"/v1/{self.load.topic}/messages{route}"
        deadline = time.monotonic() + self.load.give_up_s
        pause_s = RETRY_PAUSE_S
        last = ""
        while time.monotonic() < deadline:
            if time.monotonic() > self._abandon_after:
                self.record.abandoned += 1
                return
            try:
                answer = await connection.request("POST", path, body, headers)
            except NotSentError as error:
                last = str(error)
            except NoAnswerError as error:
                last = str(error)
                self.record.unknown += 1
            else:
                if answer.status == 200:
                    self._store(payloads, answer)
                    return
                last = f"{answer.status} {answer.reason}"
                if answer.status not in RESENT_STATUSES:
                    raise RefusedError(f"POST {path}: {last}: {answer.body[:500]!r}")
                self.record.refused[last] = self.record.refused.get(last, 0) + 1
                pause_s = max(pause_s, min(answer.retry_after_s or 0.0, RETRY_PAUSE_S_MAX))
            self.record.resent += 1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, RETRY_PAUSE_S_MAX)
        raise RefusedError(f"POST {path}: no definite answer in {self.load.give_up_s} s: {last}")

    def _store(self, payloads: list[bytes], answer: Answer) -> None:
        acks = answer.json()["acks"]
        ranges = tuple(Range(ack["partition"], ack["offset"], ack["count"]) for ack in acks)
        self.record.acked.append(AckedBatch(tuple(payloads), ranges))
        self.record.messages += len(payloads)
        if any(ack.get("duplicate") for ack in acks):
            self.record.duplicates += 1
