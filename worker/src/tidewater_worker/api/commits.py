"""The call between workers by which files are handed to the one that commits them."""

from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tidewater_core.errors import Invalid, TooLarge
from tidewater_worker.api.bodies import whole_body
from tidewater_worker.api.errors import read_json
from tidewater_worker.node import Node

OFFER_BYTES_MAX: Final = 64 * 1024 * 1024
PENDING: Final = {"pending": True}


def add_commits(app: FastAPI, node: Node) -> None:
    """Add the call."""

    @app.post("/v1/{namespace}/{name}/commits", include_in_schema=False)
    async def commits(
        namespace: str, name: str, request: Request, stand_in: bool = False
    ) -> Response:
        """Commit another owner's files with the next commit, and say what landed."""
        topic = node.topic(namespace, name)
        offer = await _offer(request, node, f"{namespace}/{name}")
        answer = await node.committing.take(topic, offer, stand_in)
        found = PENDING if answer is None else answer
        return Response(msgspec.json.encode(found), media_type="application/json")


async def _offer(request: Request, node: Node, topic: str) -> dict[str, Any]:
    """Read an offer. Who is refused since there is no room has another worker commit, or does."""
    length = request.headers.get("content-length", "")
    too_large = TooLarge("OfferTooLarge", f"an offer has at most {OFFER_BYTES_MAX} bytes")
    if not length.isdigit() or int(length) > OFFER_BYTES_MAX:
        raise too_large
    async with whole_body(request, node, OFFER_BYTES_MAX, too_large) as body:
        offer = read_json(body, dict[str, Any], "InvalidOffer")
    if offer.get("topic") != topic:
        raise Invalid("InvalidOffer", f"this is no offer for topic {topic}")
    return offer
