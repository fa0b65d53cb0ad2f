"""Everything but the hot path: reading, metadata, flush, health, metrics.

And producing, for the requests that do not take the short way of `protocol`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from tidewater_core import names
from tidewater_core.crd.subscription import Isolation
from tidewater_core.errors import Invalid, TidewaterError, TooLarge
from tidewater_worker import __doc__ as worker_doc
from tidewater_worker import stats
from tidewater_worker.api import decode, encode
from tidewater_worker.api.bodies import whole_body
from tidewater_worker.api.door import VISIBLE
from tidewater_worker.api.errors import error_body, retry_after_seconds
from tidewater_worker.api.produce import Producing
from tidewater_worker.cluster.forwarding import FORWARDED
from tidewater_worker.metrics import render
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.streaming import (
    END_HEADER,
    GAPS_HEADER,
    PartitionStream,
    gaps_header,
    table_only,
)
from tidewater_worker.topic import Topic

READ_ROWS_DEFAULT: Final = 100
STREAM_ROWS_DEFAULT: Final = 1_000_000
SLICE_ROWS: Final = 250
TIMESTAMP_DIGITS_MAX: Final = 15
JSON_TYPE: Final = "application/json"
FORWARD_S: Final = 30.0
_READ_QUERY: Final = frozenset({
    "partition", "offset", "timestamp", "limit", "wait_ms", "position", "snapshot_id", "tag",
    "columns", "isolation",
})  # fmt: skip


log = logging.getLogger(__name__)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON_TYPE)


def _error(error: TidewaterError) -> Response:
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(retry_after_seconds(error.retry_after_ms))
    return Response(error_body(error), error.status, headers, JSON_TYPE)


def _bare(status: int, kind: str, reason: str, message: str) -> Response:
    return _json({"error": {"kind": kind, "reason": reason, "message": message}}, status)


def check_query(request: Request, taken: frozenset[str]) -> None:
    """Refuse a parameter that is not known or there twice: it would say nothing, or half."""
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in taken:
            known = ", ".join(sorted(taken))
            raise Invalid("UnknownParameter", f"no {name[:40]!r} is taken here, but {known}")
    if len(set(given)) < len(given):
        raise Invalid("InvalidParameter", "a parameter is there twice")


def check_one_start(*starts: object) -> None:
    """Refuse a read that names more than one place to begin at."""
    if len(starts) - starts.count(None) > 1:
        raise Invalid(
            "InvalidParameter", "give one of offset, timestamp, position, snapshot_id and tag"
        )


def timestamp_us(text: str | None) -> int | None:
    """Read a time as microseconds since 1970."""
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) <= TIMESTAMP_DIGITS_MAX:
        return int(text) * 1000
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        parsed = None
    if parsed is None or parsed.tzinfo is None:
        raise Invalid(
            "InvalidTimestamp",
            "timestamp is milliseconds since 1970 or ISO 8601 with a time zone, "
            f"such as 2026-01-31T12:00:00Z; not {text[:40]!r}",
        )
    return round(parsed.timestamp() * 1_000_000)


def make_app(node: Node, producing: Producing) -> FastAPI:
    """Build the application."""
    app = FastAPI(title="Tidewater worker", description=worker_doc, version="v1", docs_url=None)
    app.state.node = node

    @app.exception_handler(TidewaterError)
    async def refused(_request: Request, error: TidewaterError) -> Response:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return _error(Invalid("InvalidParameter", f"{where}: {first['msg']}"))

    @app.exception_handler(Exception)
    async def broken(_request: Request, error: Exception) -> Response:
        log.exception("a request failed", exc_info=error)
        message = "this is a fault of the worker; its log has the details"
        return _bare(500, "OutcomeUnknown", "Internal", message)

    @app.exception_handler(400)
    async def unreadable(_request: Request, _error_: Exception) -> Response:
        return _error(Invalid("InvalidBody", "the body is no JSON that can be read"))

    @app.exception_handler(404)
    async def unknown(request: Request, _error_: Exception) -> Response:
        path = request.url.path
        return _bare(404, "NotFound", "NotFound", f"nothing is at {path}")

    @app.exception_handler(405)
    async def wrong_method(request: Request, _error_: Exception) -> Response:
        message = f"{request.method} is not taken at {request.url.path}"
        return _bare(405, "Invalid", "MethodNotAllowed", message)

    _add_health(app, node)
    _add_topics(app, node)
    _add_reading(app, node)
    _add_producing(app, node, producing)
    return app


def _add_health(app: FastAPI, node: Node) -> None:
    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Tell that the process answers."""
        return "ok\n"

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Tell whether what is this worker's has opened since its start, and what is not open.

        Where users are asked who they are, this names no topics: anybody may call it.
        """
        ready, waiting = stats.readiness(node)
        if VISIBLE in request.scope:
            waiting = []
        return _json({"ready": ready, "waiting": waiting}, 200 if ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Return metrics in the Prometheus text format."""
        return render(node)


def _add_topics(app: FastAPI, node: Node) -> None:
    @app.get("/v1/topics")
    async def topics(request: Request) -> Response:
        """List the topics of the namespaces all of whose topics the user may consume."""
        visible = request.scope.get(VISIBLE)
        found = [
            stats.summary(topic)
            for topic in node.topics.values()
            if visible is None or topic.name.namespace in visible
        ]
        return _json({"topics": found})

    @app.get("/v1/{namespace}/{name}")
    async def topic(request: Request, namespace: str, name: str) -> Response:
        """Return a topic's metadata: partitions, owners, offsets, frontier."""
        found = node.topic(namespace, name)
        answer = stats.metadata(node, found)
        if found.is_spread and not is_forwarded(request):
            others = await node.forwarding.describe(found)
            answer["partitions"] = [others.get(p["partition"], p) for p in answer["partitions"]]
        return _json(answer)

    @app.get("/v1/{namespace}/{name}/stats")
    async def topic_stats(namespace: str, name: str) -> Response:
        """Return rates, latencies, log and table health."""
        return _json(await stats.full(node, node.topic(namespace, name)))

    @app.post("/v1/{namespace}/{name}/flush")
    async def flush(
        request: Request, namespace: str, name: str, timeout_ms: int = Query(30_000, ge=1)
    ) -> Response:
        """Make everything acknowledged so far visible in the table."""
        topic = node.topic(namespace, name)
        bounded = min(timeout_ms, node.settings.limits.flush_wait_max.ms)
        others = []
        if topic.is_spread and not is_forwarded(request):
            others = await node.forwarding.flush(topic, bounded / 1000)
        answers = [await _flush(node, topic, bounded / 1000), *others]
        last = max(answers, key=lambda answer: sum(answer["frontier"].values()))
        frontier: dict[str, int] = {}
        for answer in answers:
            for number, end in answer["frontier"].items():
                frontier[number] = max(end, frontier.get(number, 0))
        return _json({"snapshot_id": last["snapshot_id"], "frontier": frontier})


def is_forwarded(request: Request) -> bool:
    """Tell whether another worker passed the request on: it is not passed on again."""
    return FORWARDED.decode() in request.headers


async def _flush(node: Node, topic: Topic, timeout_s: float) -> dict[str, Any]:
    upto = {}
    for number, partition in topic.partitions.items():
        if partition.is_elsewhere:
            continue
        appender = partition.readable()
        await appender.make_durable()
        upto[number] = appender.durable_end
    if not upto:
        return {"snapshot_id": None, "frontier": {}}
    node.tell_durable()
    result = await node.link.flush(str(topic.name), upto, timeout_s)
    frontier = {str(number): end for number, end in result.frontier.items()}
    return {"snapshot_id": result.snapshot_id, "frontier": frontier}


def _add_reading(app: FastAPI, node: Node) -> None:
    @app.get("/v1/{namespace}/{name}/messages")
    async def read(
        request: Request,
        namespace: str,
        name: str,
        partition: Annotated[int, Query(ge=0)] = 0,
        offset: Annotated[int | None, Query(ge=0)] = None,
        timestamp: str | None = None,
        limit: Annotated[int | None, Query(ge=1)] = None,
        wait_ms: Annotated[int, Query(ge=0)] = 0,
        position: Literal["earliest", "latest"] | None = None,
        snapshot_id: int | None = None,
        tag: str | None = None,
        columns: str | None = None,
        isolation: Isolation = Isolation.ACKNOWLEDGED,
    ) -> Response:
        """Read messages of one partition without a subscription, as JSON, NDJSON or Arrow."""
        check_query(request, _READ_QUERY)
        check_one_start(offset, timestamp, position, snapshot_id, tag)
        topic = node.topic(namespace, name)
        owned = topic.partition(partition)
        wait_s = min(wait_ms, node.settings.limits.wait_max.ms) / 1000
        if owned.is_elsewhere:
            if owned.remote_url and not is_forwarded(request):
                return await _proxied(node, owned.remote_url, request, wait_s)
            owned = await table_only(node, owned, offset)
        chosen = None if columns is None else [name for name in columns.split(",") if name]
        committed = isolation is Isolation.COMMITTED
        stream = PartitionStream(node, topic, partition, chosen, is_committed=committed, view=owned)
        if snapshot_id is not None or tag is not None:
            await stream.begin_at(snapshot_id, tag)
        else:
            await stream.begin(offset, timestamp_us(timestamp), at_end=position == "latest")
        if wait_ms:
            await stream.wait_past(wait_s)
        accept = request.headers.get("accept", "")
        headers = {END_HEADER.decode(): str(stream.end), **gaps_header(stream.lost(stream.offset))}
        if decode.ARROW in accept:
            body = _arrow_body(stream, limit or STREAM_ROWS_DEFAULT)
            return StreamingResponse(await _begun(body), headers=headers, media_type=decode.ARROW)
        if decode.NDJSON in accept:
            body = _ndjson_body(stream, limit or STREAM_ROWS_DEFAULT)
            return StreamingResponse(await _begun(body), headers=headers, media_type=decode.NDJSON)
        rows = min(limit or READ_ROWS_DEFAULT, node.settings.limits.read_rows_max)
        return await _json_body(stream, owned, rows, node.settings.limits.read_bytes_max)


async def _proxied(node: Node, url: str, request: Request, wait_s: float) -> Response:
    """Pass a read on to the partition's owner and its answer back, as it comes."""
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    headers = [(bytes(name), bytes(value)) for name, value in request.scope["headers"]]
    reply = await node.forwarding.proxy(
        url, request.method, target, headers, b"", wait_s + FORWARD_S
    )
    kept = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in reply.headers
        if name in (b"content-type", b"retry-after", END_HEADER, GAPS_HEADER)
    }
    return StreamingResponse(reply.chunks(), reply.status, kept)


async def _begun(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Wait for the first piece, so that an error before it still becomes a status code."""
    try:
        first = await anext(body)
    except StopAsyncIteration:
        first = b""

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for piece in body:
            yield piece

    return rest()


async def _arrow_body(stream: PartitionStream, limit: int) -> AsyncIterator[bytes]:
    pieces = [encode.arrow_schema_message(stream.schema)]
    async for batch in stream.batches(limit):
        pieces.append(encode.arrow_batch_message(batch))
        yield b"".join(pieces)
        pieces.clear()
    yield b"".join([*pieces, encode.ARROW_END])


async def _slices(batch: pa.RecordBatch) -> AsyncIterator[pa.RecordBatch]:
    """Cut a batch into pieces of well under a millisecond; others have their turn between."""
    for begin in range(0, batch.num_rows, SLICE_ROWS):
        yield batch.slice(begin, SLICE_ROWS)
        await asyncio.sleep(0)


async def _ndjson_body(stream: PartitionStream, limit: int) -> AsyncIterator[bytes]:
    async for batch in stream.batches(limit):
        async for piece in _slices(batch):
            yield encode.ndjson(piece)


def _rows_within(batch: pa.RecordBatch, nbytes: int) -> int:
    """Return about how many rows of a batch have so many bytes."""
    if batch.nbytes <= nbytes:
        return int(batch.num_rows)
    return int(max(nbytes, 0) * batch.num_rows // batch.nbytes)


async def _json_body(
    stream: PartitionStream, partition: Partition, limit: int, bytes_max: int
) -> Response:
    pieces: list[bytes] = []
    rows = size = 0
    begin = stream.offset
    position = partition.past_gap(begin)
    async for batch in stream.batches(limit):
        async for piece in _slices(batch):
            fitting = piece.slice(0, _rows_within(piece, bytes_max - size))
            if not rows and not fitting.num_rows:
                fitting = piece.slice(0, 1)  # one message is always given
            if fitting.num_rows:
                pieces.append(msgspec.json.encode(encode.to_messages(fitting))[1:-1])
                position = fitting.column(names.TW_OFFSET)[-1].as_py() + 1
            rows, size = rows + fitting.num_rows, size + fitting.nbytes
            if fitting.num_rows < piece.num_rows:
                break
        else:
            continue
        break
    end = stream.end
    head = b'{"messages":[' + b",".join(pieces)
    tail = b'],"next_offset":%d,"end_offset":%d' % (position, end)
    lost = stream.lost(begin, position)
    if lost:  # with a volume: a reader is told, not left to wonder
        tail += b',"gaps":' + msgspec.json.encode(lost)
    return Response(head + tail + b"}", media_type=JSON_TYPE)


def _add_producing(app: FastAPI, node: Node, producing: Producing) -> None:
    @app.post("/v1/{namespace}/{name}/messages")
    async def produce(request: Request, namespace: str, name: str) -> Response:
        """Store messages: JSON, NDJSON, Arrow IPC, raw bytes or CloudEvents."""
        limit = node.settings.limits.request_bytes_max
        too_large = TooLarge("RequestTooLarge", f"a request has at most {limit} bytes")
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def respond(status: int, data: bytes, retry_ms: int | None) -> None:
            headers = {}
            if retry_ms is not None:
                headers["retry-after"] = str(retry_after_seconds(retry_ms))
            if not answer.done():
                answer.set_result(Response(data, status, headers, JSON_TYPE))

        raw = [(bytes(key), bytes(value)) for key, value in request.scope["headers"]]
        query = request.scope["query_string"].decode("latin-1")
        async with whole_body(request, node, limit.bytes, too_large, is_load=True) as body:
            producing(namespace, name, query, raw, body, respond)
            return await answer
