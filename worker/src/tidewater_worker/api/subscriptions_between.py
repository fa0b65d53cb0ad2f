"""What workers ask each other about a subscription whose partitions they share.

    news        is there something for a consumer? Waits; gives nothing out
    give-back   messages that were pulled and did not reach their consumer
    restore     originals of dead letters, to be delivered again

Each answers for the partitions that are here, and only for them.
"""

from typing import Annotated, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tidewater_worker.api.subscriptions import read_body, unless_gone
from tidewater_worker.dispatch.manager import Dispatch
from tidewater_worker.dispatch.subscription import Origin
from tidewater_worker.node import Node

ORIGINS_MAX: Final = 10_000
_PATH: Final = "/v1/{namespace}/{name}/subscriptions/{subscription}"


class NewsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Who waits, and how long."""

    consumer: str
    wait_ms: Annotated[int, msgspec.Meta(ge=0)] = 0


class GiveBackBody(msgspec.Struct, forbid_unknown_fields=True):
    """What did not reach whom."""

    consumer: str
    ack_ids: list[str]


class RestoreBody(msgspec.Struct, forbid_unknown_fields=True):
    """What to deliver again: partition, offset and the place of its key."""

    origins: Annotated[list[Origin], msgspec.Meta(max_length=ORIGINS_MAX)]


def add_between(app: FastAPI, node: Node, dispatch: Dispatch) -> None:
    """Add the calls."""

    @app.post(f"{_PATH}/news", include_in_schema=False)
    async def news(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Tell whether there is something for a consumer; waits up to `wait_ms` for it."""
        body = await read_body(request, NewsBody)
        found = dispatch.local(namespace, name, subscription)
        wait_ms = min(body.wait_ms, node.settings.limits.wait_max.ms)
        has_news, _ = await unless_gone(request, found.has_news(body.consumer, wait_ms / 1000))
        return _json({"news": bool(has_news)})

    @app.post(f"{_PATH}/give-back", include_in_schema=False)
    async def give_back(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Take messages back as if they had not been delivered."""
        body = await read_body(request, GiveBackBody)
        found = dispatch.local(namespace, name, subscription)
        await found.give_back(body.consumer, body.ack_ids)
        return _json({})

    @app.post(f"{_PATH}/restore", include_in_schema=False)
    async def restore(request: Request, namespace: str, name: str, subscription: str) -> Response:
        """Take acknowledgements back."""
        body = await read_body(request, RestoreBody)
        found = dispatch.local(namespace, name, subscription)
        restored, refused = await found.restore(body.origins)
        return _json({"restored": restored, "refused": refused})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
