"""Requests for what another worker has: any worker answers any request.

A forwarded request says so, and is never forwarded again: the one that gets it owns the partition
or refuses, and the caller asks again when the registry has moved on. It carries the token of the
user for whom it is done, who is judged again there; what a worker does on its own account carries
the worker's.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidewater_core.errors import OutcomeUnknown, Retryable, TidewaterError
from tidewater_worker.auth.caller import CALLER
from tidewater_worker.auth.tokens import TokenFile
from tidewater_worker.cluster.http import Peers, RawHeaders, Reply
from tidewater_worker.log.group import Rows
from tidewater_worker.log.producers import Duplicate, Request, Stored
from tidewater_worker.partition import Partition
from tidewater_worker.schema import HEADERS_TYPE
from tidewater_worker.topic import Payload, Topic

FORWARDED: Final = b"tidewater-forwarded"
"""Names the worker that forwarded a request."""
_AUTHORIZATION: Final = b"authorization"
ARROW: Final = b"application/vnd.apache.arrow.stream"
PRODUCE_S: Final = 30.0
DESCRIBE_S: Final = 2.0
_HOP: Final = frozenset(
    {b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"expect"}
)
Spawn = Callable[[Coroutine[Any, Any, None]], object]
log = logging.getLogger(__name__)


def check_owner(partition: Partition) -> None:
    """Raise if a partition that is elsewhere has no owner who could be asked."""
    if not partition.remote_url:
        partition.ready()  # raises why not


class Forwarding:
    """Asks the owners of partitions that are elsewhere."""

    def __init__(self, worker_id: str, spawn: Spawn) -> None:
        self.peers = Peers()
        self.token: TokenFile | None = None
        """The worker's own; None: nobody is asked who they are."""
        self._mark = (FORWARDED, worker_id.encode())
        self._spawn = spawn
        self._turns: dict[tuple[str, int], asyncio.Lock] = {}
        """One request at a time per partition: what came first is stored first."""

    def _signed(self, as_worker: bool = False) -> list[tuple[bytes, bytes]]:
        """Return the headers that say who asks: a user, or the worker for itself."""
        if self.token is None:
            return [self._mark]
        user = None if as_worker else CALLER.get()
        return [self._mark, (_AUTHORIZATION, user or self.token.authorization())]

    async def call(
        self,
        url: str,
        method: str,
        target: str,
        body: bytes = b"",
        timeout_s: float = PRODUCE_S,
        *,
        as_worker: bool = False,
    ) -> Any:
        """Call another worker's API with JSON; return the decoded answer or raise its error."""
        headers = [*self._signed(as_worker), (b"content-type", b"application/json")]
        reply = await self.peers.request(url, method, target, headers, body, timeout_s)
        data = await reply.read()
        if reply.status >= 400:
            raise _error(reply.status, data)
        return msgspec.json.decode(data) if data else None

    async def proxy(
        self, url: str, method: str, target: str, headers: RawHeaders, body: bytes, timeout_s: float
    ) -> Reply:
        """Pass a request on as it is; the answer's body may be streamed."""
        signed = self._signed()
        dropped = _HOP | {name for name, _ in signed}
        kept = [(name, value) for name, value in headers if name not in dropped]
        return await self.peers.request(url, method, target, [*kept, *signed], body, timeout_s)

    # ---- producing

    def produce(
        self,
        topic: Topic,
        partition: Partition,
        payload: Payload,
        request: Request | None,
        done: Callable[[Stored | TidewaterError], None],
        *,
        as_worker: bool = False,
    ) -> None:
        """Have messages stored by their partition's owner; `done` is called once, later."""
        check_owner(partition)
        signed = self._signed(as_worker)
        self._spawn(self._produce(topic, partition, payload, request, done, signed))

    async def _produce(
        self,
        topic: Topic,
        partition: Partition,
        payload: Payload,
        request: Request | None,
        done: Callable[[Stored | TidewaterError], None],
        signed: list[tuple[bytes, bytes]],
    ) -> None:
        turn = self._turns.setdefault((partition.topic, partition.number), asyncio.Lock())
        may_be_sent = False
        try:
            headers = [*signed, (b"content-type", ARROW), *_identity(request)]
            target = f"/v1/{topic.name}/messages?partition={partition.number}"
            async with turn:
                if not partition.remote_url:
                    partition.ready()
                    raise Retryable("PartitionMoving", f"{topic.name} is moving here", 100)
                body = _encode(payload)
                may_be_sent = True
                reply = await self.peers.request(
                    partition.remote_url, "POST", target, headers, body, PRODUCE_S
                )
                data = await reply.read()
            if reply.status != 200:
                raise _error(reply.status, data)
            stored = _stored(data)
        except TidewaterError as error:
            done(error)
        except asyncio.CancelledError:
            done(OutcomeUnknown("ShuttingDown", "this worker is shutting down", 500))
            raise
        except Exception as error:
            # Whatever it is: somebody waits, and what is in flight counts until `done`.
            log.exception("%s partition %s: not forwarded", topic.name, partition.number)
            kind = OutcomeUnknown if may_be_sent else Retryable
            done(kind("ForwardingFailed", f"this worker could not pass it on: {error!r}", 500))
        else:
            done(stored)

    # ---- reading and metadata

    async def flush(
        self,
        topic: Topic,
        timeout_s: float,
        numbers: Collection[int] | None = None,
        *,
        as_worker: bool = False,
    ) -> list[dict[str, Any]]:
        """Have other owners flush, of all partitions or of some; return their answers."""
        target = f"/v1/{topic.name}/flush?timeout_ms={int(timeout_s * 1000)}"
        calls = [
            self.call(url, "POST", target, timeout_s=timeout_s + DESCRIBE_S, as_worker=as_worker)
            for url in self._urls(topic, numbers)
        ]
        return list(await asyncio.gather(*calls))

    def _urls(self, topic: Topic, numbers: Collection[int] | None) -> list[str]:
        """Return the other owners of a topic; raise if one of the partitions has none."""
        urls = set()
        for partition in topic.partitions.values():
            if partition.is_elsewhere and (numbers is None or partition.number in numbers):
                check_owner(partition)
                urls.add(partition.remote_url)
        return sorted(urls)

    async def describe(self, topic: Topic) -> dict[int, dict[str, Any]]:
        """Return what other owners tell of their partitions; those away are not in it."""
        urls = {p.remote_url for p in topic.partitions.values()} - {""}
        calls = [self.call(url, "GET", f"/v1/{topic.name}", timeout_s=DESCRIBE_S) for url in urls]
        found: dict[int, dict[str, Any]] = {}
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, TidewaterError):
                log.warning("%s: an owner does not describe it: %s", topic.name, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for one in answer["partitions"]:
                    if one.get("state") not in ("elsewhere", "away"):
                        found[one["partition"]] = one
        return found

    def forget(self, topic: str) -> None:
        """Keep nothing about a topic that is gone."""
        for key in [key for key in self._turns if key[0] == topic]:
            del self._turns[key]

    async def close(self) -> None:
        """Hang up."""
        await self.peers.close()


def _identity(request: Request | None) -> RawHeaders:
    """Return the headers of an idempotent request: its id goes on as it came, in UTF-8."""
    if request is None:
        return []
    return [
        (b"tidewater-producer", request.producer.encode()),
        (b"tidewater-sequence", b"%d" % request.sequence),
    ]


def _stored(data: bytes) -> Stored:
    """Read the one ack of an answer."""
    (ack,) = msgspec.json.decode(data)["acks"]
    kind = Duplicate if ack.get("duplicate") else Stored
    return kind(ack["offset"], ack["count"])


def _error(status: int, data: bytes) -> TidewaterError:
    try:
        body = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    return TidewaterError.from_json(body, status)


def _encode(payload: Payload) -> bytes:
    if isinstance(payload, Rows):
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array(payload.keys, pa.binary()),
                pa.array(payload.headers, HEADERS_TYPE),
                pa.array(payload.values, pa.binary()),
            ],
            names=["tw_key", "tw_headers", "value"],
        )
    else:
        batch = payload
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data
