"""The API of subscriptions: pull, ack, nack, extend, seek, leave, replay, stream, status."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Annotated, Any, Final, TypeVar

import msgspec
import pyarrow as pa
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError

from tidewater_core.crd.explain import problems
from tidewater_core.crd.subscription import StartFrom
from tidewater_core.errors import Invalid, TidewaterError, TooLarge
from tidewater_worker.api import decode, encode
from tidewater_worker.api.bodies import whole_body
from tidewater_worker.api.errors import read_json
from tidewater_worker.api.routes import is_forwarded
from tidewater_worker.dispatch.manager import Dispatch
from tidewater_worker.dispatch.part import Delivered
from tidewater_worker.dispatch.report import Report
from tidewater_worker.dispatch.spread import GAPS_METADATA, Spread
from tidewater_worker.dispatch.subscription import Subscription
from tidewater_worker.node import Node
from tidewater_worker.schema import table_arrow_schema

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
PULL_MAX_DEFAULT: Final = 100
STREAM_ROWS: Final = 1_000
"""Messages that a stream takes at a time."""
STREAM_BYTES: Final = 4 * 1024 * 1024
HEARTBEAT_S: Final = 15.0
"""An event stream without messages says so this often, so that a dead connection is noticed."""
NO_NAME: Final = "anonymous"
SSE: Final = "text/event-stream"
ACK_ID_COLUMN: Final = "tw_ack_id"
DELIVERY_COLUMN: Final = "tw_delivery"
T = TypeVar("T")
Served = Spread | Subscription
log = logging.getLogger(__name__)


class PullBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a pull asks for."""

    max: Annotated[int, msgspec.Meta(ge=1)] = PULL_MAX_DEFAULT
    wait_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    consumer: str = ""


class AckBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which deliveries are done."""

    ack_ids: list[str]
    consumer: str = ""


class NackBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which deliveries failed."""

    ack_ids: list[str]
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=7 * 86_400_000)] | None = None
    consumer: str = ""


class ExtendBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which deliveries take longer."""

    ack_ids: list[str]
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] | None = None
    consumer: str = ""


class LeaveBody(msgspec.Struct, forbid_unknown_fields=True):
    """Who goes."""

    consumer: str = ""


class ReplayBody(msgspec.Struct, forbid_unknown_fields=True):
    """How many dead letters to deliver again."""

    max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1_000


def add_subscriptions(app: FastAPI, node: Node, dispatch: Dispatch) -> None:
    """Add the routes of subscriptions."""
    _add_status(app, dispatch)
    _add_pull(app, node, dispatch)
    _add_acks(app, dispatch)
    _add_moves(app, dispatch)
    _add_stream(app, node, dispatch)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _find(
    request: Request, dispatch: Dispatch, namespace: str, name: str, subscription: str
) -> Served:
    """Return a subscription; for another worker only what is here."""
    if is_forwarded(request):
        return dispatch.local(namespace, name, subscription)
    return dispatch.find(namespace, name, subscription)


async def read_body(request: Request, kind: type[T]) -> T:
    """Read a request's JSON."""
    too_large = TooLarge("RequestTooLarge", f"a request has at most {BODY_BYTES_MAX} bytes")
    async with whole_body(request, request.app.state.node, BODY_BYTES_MAX, too_large) as body:
        return read_json(body or b"{}", kind, "InvalidBody")


# ---- status


def _add_status(app: FastAPI, dispatch: Dispatch) -> None:
    @app.get("/v1/{namespace}/{name}/subscriptions")
    async def subscriptions(namespace: str, name: str) -> Response:
        """List a topic's subscriptions with their lag."""
        found = dispatch.of_topic(namespace, name)
        return _json({"subscriptions": [await subscription.status() for subscription in found]})

    @app.get("/v1/{namespace}/{name}/subscriptions/{subscription}")
    async def subscription(
        request: Request, namespace: str, name: str, subscription: str
    ) -> Response:
        """Return one subscription: how far it is, its consumers, what is not acknowledged."""
        found = _find(request, dispatch, namespace, name, subscription)
        # Consumers that extend must know how long they have.
        return _json({**await found.status(), "ack_deadline_ms": found.spec.ack_deadline.ms})


# ---- pull


def _add_pull(app: FastAPI, node: Node, dispatch: Dispatch) -> None:
    @app.post("/v1/{namespace}/{name}/subscriptions/{subscription}/pull")
    async def pull(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Take messages; waits up to `wait_ms` for the first one."""
        body = await read_body(request, PullBody)
        found = _find(request, dispatch, namespace, name, subscription)
        limits, who = node.settings.limits, body.consumer or NO_NAME
        work = found.pull(
            who,
            min(body.max, limits.read_rows_max),
            min(body.wait_ms, limits.wait_max.ms) / 1000,
            limits.read_bytes_max.bytes,
        )
        delivered, is_gone = await unless_gone(request, work)
        if is_gone and delivered:
            ids = [ack_id for piece in delivered for ack_id in piece.ack_ids]
            await found.give_back(who, ids)
        async with given_back(found, who, delivered or []):
            return _answer(request, found, delivered or [])


def _answer(request: Request, found: Served, delivered: list[Delivered]) -> Response:
    if decode.ARROW in request.headers.get("accept", ""):
        schema = _arrow_schema(table_arrow_schema(found.topic.spec))
        head = encode.arrow_schema_message(with_gaps(schema, delivered))
        data = b"".join([head, _arrow(delivered, schema), encode.ARROW_END])
        return Response(data, media_type=decode.ARROW)
    lost = gaps_of(delivered)
    return _json({"messages": _messages(delivered), **({"gaps": lost} if lost else {})})


@contextlib.asynccontextmanager
async def given_back(
    found: Served, consumer: str, delivered: list[Delivered]
) -> AsyncGenerator[None, None]:
    """Take back what is not written after all: its consumer will never hear of it."""
    try:
        yield
    except Exception:
        ids = [ack_id for piece in delivered for ack_id in piece.ack_ids]
        await found.give_back(consumer, ids)
        raise


def gaps_of(delivered: list[Delivered]) -> list[dict[str, int]]:
    """Name what was lost with volumes just before messages of an answer."""
    return [gap for piece in delivered for gap in piece.gaps]


def with_gaps(schema: pa.Schema, delivered: list[Delivered]) -> pa.Schema:
    """Name it in the schema of an answer in Arrow."""
    lost = gaps_of(delivered)
    return schema.with_metadata({GAPS_METADATA: msgspec.json.encode(lost)}) if lost else schema


async def unless_gone(request: Request, work: "Coroutine[Any, Any, T]") -> tuple[T | None, bool]:
    """Do something for a client as long as it is there; return the result and if it is gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when="FIRST_COMPLETED")
        return (task.result() if task.done() else None), gone.done()
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, gone, return_exceptions=True)


def _messages(delivered: list[Delivered]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for piece in delivered:
        messages = encode.to_messages(piece.batch)
        for message, ack_id, delivery in zip(
            messages, piece.ack_ids, piece.deliveries, strict=True
        ):
            message["ack_id"] = ack_id
            message["delivery"] = delivery
        found += messages
    return found


# ---- ack, nack, extend


def _report(done: str, report: Report) -> Response:
    refused = [
        {"ack_id": each.ack_id, "reason": each.reason, "message": each.message}
        for each in report.refused
    ]
    return _json({done: report.done, "refused": refused})


def _add_acks(app: FastAPI, dispatch: Dispatch) -> None:
    path = "/v1/{namespace}/{name}/subscriptions/{subscription}"

    @app.post(f"{path}/ack")
    async def ack(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Acknowledge deliveries; answered when that is stored."""
        body = await read_body(request, AckBody)
        found = _find(request, dispatch, namespace, name, subscription)
        _touch(found, body.consumer)
        return _report("acked", await found.ack(body.ack_ids))

    @app.post(f"{path}/nack")
    async def nack(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Give messages back, to be delivered again after `delay_ms` or the backoff."""
        body = await read_body(request, NackBody)
        found = _find(request, dispatch, namespace, name, subscription)
        _touch(found, body.consumer)
        delay_s = None if body.delay_ms is None else body.delay_ms / 1000
        return _report("nacked", await found.nack(body.ack_ids, delay_s))

    @app.post(f"{path}/extend")
    async def extend(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Hold messages for another `deadline_ms`, or another ackDeadline."""
        body = await read_body(request, ExtendBody)
        found = _find(request, dispatch, namespace, name, subscription)
        _touch(found, body.consumer)
        deadline_s = None if body.deadline_ms is None else body.deadline_ms / 1000
        return _report("extended", await found.extend(body.ack_ids, deadline_s))


def _touch(subscription: Served, consumer: str) -> None:
    if consumer:
        subscription.touch(consumer)


# ---- seek, leave, replay


def _add_moves(app: FastAPI, dispatch: Dispatch) -> None:
    path = "/v1/{namespace}/{name}/subscriptions/{subscription}"

    @app.post(f"{path}/seek")
    async def seek(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Move the subscription to another place, for all its consumers."""
        body = await read_body(request, dict[str, Any])
        try:
            start = StartFrom.model_validate(body)
        except ValidationError as error:
            told = "; ".join(problems(error, StartFrom))
            raise Invalid("InvalidStartFrom", told) from error
        offsets = await _find(request, dispatch, namespace, name, subscription).seek(start)
        return _json({"offsets": {str(number): at for number, at in offsets.items()}})

    @app.post(f"{path}/leave")
    async def leave(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Say that a consumer is gone: what it holds goes to others at once."""
        body = await read_body(request, LeaveBody)
        _find(request, dispatch, namespace, name, subscription).leave(body.consumer or NO_NAME)
        return _json({})

    @app.post(f"{path}/replay")
    async def replay(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Deliver the originals of the next dead letters again."""
        body = await read_body(request, ReplayBody)
        found = dispatch.find(namespace, name, subscription)
        if is_forwarded(request):
            return _json(await dispatch.dead_letters.replay(found, body.max))
        return _json(await dispatch.dead_letters.replay_all(found, body.max))


# ---- stream


def _add_stream(app: FastAPI, node: Node, dispatch: Dispatch) -> None:
    @app.get("/v1/{namespace}/{name}/subscriptions/{subscription}/stream")
    async def stream(
        request: Request,
        namespace: str,
        name: str,
        subscription: str,
        consumer: str | None = None,
        max_batch: Annotated[int, Query(ge=1, alias="max")] = STREAM_ROWS,
    ) -> Response:
        """Follow a subscription: server-sent events, NDJSON or Arrow; ack by the other calls."""
        found = _find(request, dispatch, namespace, name, subscription)
        limit = min(max_batch, node.settings.limits.read_rows_max)
        accept = request.headers.get("accept", "")
        if decode.ARROW in accept:
            schema = _arrow_schema(table_arrow_schema(found.topic.spec))
            head, write = encode.arrow_schema_message(schema), lambda d: _arrow(d, schema)
            media, idle, last = decode.ARROW, b"", lambda _error: encode.ARROW_END
        elif decode.NDJSON in accept:
            head, write, media, idle = b"", _ndjson, decode.NDJSON, b""
            last = _error_line
        else:
            head, write, media, idle = b": tidewater\n\n", _events, SSE, b": idle\n\n"
            last = _error_event
        # Refusals (an Exclusive subscription that is taken) become a status, not half a stream.
        who = consumer or dispatch.made_up_name("stream")
        try:
            first = await found.pull(who, limit, 0, STREAM_BYTES)
        except BaseException:
            if not consumer:  # it comes again under another name, and would find itself there
                found.leave(who)
            raise
        body = _follow(found, who, limit, first, write, idle, last, leaves=not consumer)
        return StreamingResponse(
            _after(head, body), media_type=media, headers={"cache-control": "no-store"}
        )


async def _after(head: bytes, body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    if head:
        yield head
    try:
        async for piece in body:
            yield piece
    finally:
        await body.aclose()


async def _follow(
    subscription: Served,
    consumer: str,
    limit: int,
    delivered: list[Delivered],
    write: Callable[[list[Delivered]], bytes],
    idle: bytes,
    last: Callable[[TidewaterError], bytes],
    *,
    leaves: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield what is delivered. The next pull waits until the last was written: flow control."""
    try:
        while True:
            if delivered:
                async with given_back(subscription, consumer, delivered):
                    data = write(delivered)
                yield data
            elif idle:
                yield idle
            delivered = await subscription.pull(consumer, limit, HEARTBEAT_S, STREAM_BYTES)
    except TidewaterError as error:
        # Deleted, shut down, past retention: the last word of the stream says which.
        log.info("a stream of %s ends: %s", subscription.name, error)
        yield last(error)
    finally:
        if leaves:
            # Nobody else can come under a name that was made up for this stream.
            subscription.leave(consumer)


def _events(delivered: list[Delivered]) -> bytes:
    encoder = msgspec.json.Encoder()
    return b"".join(
        b"id: %b\ndata: %b\n\n" % (message["ack_id"].encode(), encoder.encode(message))
        for message in _messages(delivered)
    )


def _ndjson(delivered: list[Delivered]) -> bytes:
    return msgspec.json.Encoder().encode_lines(_messages(delivered))


def _error_event(error: TidewaterError) -> bytes:
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error.to_body())


def _error_line(error: TidewaterError) -> bytes:
    return msgspec.json.encode(error.to_body()) + b"\n"


def _arrow_schema(schema: pa.Schema) -> pa.Schema:
    return schema.append(pa.field(ACK_ID_COLUMN, pa.string(), nullable=False)).append(
        pa.field(DELIVERY_COLUMN, pa.int32(), nullable=False)
    )


def _arrow(delivered: list[Delivered], schema: pa.Schema) -> bytes:
    pieces = []
    for piece in delivered:
        columns = [
            *piece.batch.columns,
            pa.array(piece.ack_ids, pa.string()),
            pa.array(piece.deliveries, pa.int32()),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        pieces.append(encode.arrow_batch_message(batch))
    return b"".join(pieces)
