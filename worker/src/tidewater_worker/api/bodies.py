"""Bodies that routes read: they count as in flight, and are held against what the worker may hold.

So do those of the short way (`protocol`) and unfinished messages of sockets (`socket`).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from tidewater_core.errors import TooLarge
from tidewater_worker.node import SMALL_BODY_BYTES, Node


@asynccontextmanager
async def whole_body(
    request: Request, node: Node, bytes_max: int, too_large: TooLarge, *, is_load: bool = False
) -> AsyncIterator[bytes]:
    """Read a body; what was read counts until the block ends.

    Messages to be stored are load: they leave some room to acks and commits, which make more.
    """
    data = bytearray()
    size = held = 0
    is_refused = False
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > bytes_max:
                raise too_large
            if is_refused:
                continue  # an answer amid a body may not be heard
            data += chunk
            held += len(chunk)
            node.inflight_bytes += len(chunk)
            if held > SMALL_BODY_BYTES and (node.is_full or (is_load and not node.has_room)):
                data.clear()
                node.inflight_bytes -= held
                held = 0
                is_refused = True
        if is_refused:
            raise node.busy()
        yield bytes(data)
    finally:
        node.inflight_bytes -= held
