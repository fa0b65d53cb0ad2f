"""G6 Bounded: requests that wait until it is known who sends them are held against the limit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from tidewater_core.errors import Overloaded, TooLarge
from tidewater_core.settings import Limits
from tidewater_worker.api.bodies import whole_body
from tidewater_worker.api.protocol import EdgeProtocol

BODY = bytes(60_000)
HEAD = b"POST /v1/shop/orders/messages HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n"
REQUESTS = 40
HELD_BYTES_MAX = 1_000_000


class Node:
    """A worker that may hold little."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(limits=Limits())
        self.inflight_bytes = 0

    @property
    def has_room(self) -> bool:
        return self.inflight_bytes <= HELD_BYTES_MAX

    @property
    def is_full(self) -> bool:
        return self.inflight_bytes > 2 * HELD_BYTES_MAX

    def busy(self) -> Overloaded:
        return Overloaded("WorkerBusy", "too many bytes wait for the log", 100)


class Slow:
    """A guard that has to ask, and gets no answer yet."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    def quick(self, *_: object) -> None:
        """Know nothing."""

    async def check(self, *_: object) -> None:
        await self.answers.wait()


class Transport:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said = b""

    def get_extra_info(self, _name: str) -> None:
        """Know nothing."""

    def pause_reading(self) -> None:
        """Go on: what was read already has to be kept or let go."""

    def resume_reading(self) -> None:
        """Go on."""

    def write(self, data: bytes) -> None:
        self.said += data

    def is_closing(self) -> bool:
        return False


async def _nobody(_scope: Any, _receive: Any, _send: Any) -> None:
    """Answer nothing: no request comes here."""


def _stored(*request: Any) -> None:
    respond: Callable[[int, bytes, None], None] = request[-1]
    respond(200, b"{}", None)


def _connect(node: Node, guard: Any, transport: Transport) -> EdgeProtocol:
    sockets: Any = SimpleNamespace(open=0)
    config = Config(_nobody, lifespan="off", log_config=None)
    config.load()
    protocol = EdgeProtocol(
        cast("Any", node), cast("Any", _stored), sockets, cast("Any", guard),
        config=config, server_state=ServerState(), app_state={},
    )  # fmt: skip
    protocol.connection_made(cast("Any", transport))
    return protocol


class Chunks:
    """A request whose body comes in pieces."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def stream(self) -> AsyncIterator[bytes]:
        for _ in range(0, self.size, len(BODY)):
            yield BODY


@pytest.mark.parametrize("is_load", [True, False])
async def test_acks_have_room_where_messages_have_none_any_more(is_load: bool) -> None:
    """Else a worker that has too much to do would send again what was acknowledged."""
    node = Node()
    node.inflight_bytes = HELD_BYTES_MAX + 1
    request: Any = Chunks(3 * len(BODY))
    refused = pytest.raises(Overloaded) if is_load else nullcontext()
    with refused:
        async with whole_body(
            request, cast("Any", node), HELD_BYTES_MAX, TooLarge("T", "m"), is_load=is_load
        ) as body:
            assert len(body) == request.size
    assert node.inflight_bytes == HELD_BYTES_MAX + 1
    node.inflight_bytes = 2 * HELD_BYTES_MAX
    with pytest.raises(Overloaded):
        async with whole_body(request, cast("Any", node), HELD_BYTES_MAX, TooLarge("T", "m")):
            """There is a limit to that."""


async def test_what_is_too_large_is_told_so_also_where_there_is_no_room() -> None:
    node, transport = Node(), Transport()
    node.inflight_bytes = HELD_BYTES_MAX
    protocol = _connect(node, None, transport)
    size = Limits().request_bytes_max.bytes + 1
    protocol.data_received(HEAD % size)
    for begin in range(0, size, 1_000_000):
        protocol.data_received(bytes(min(1_000_000, size - begin)))
    protocol._unset_keepalive_if_required()
    assert transport.said.startswith(b"HTTP/1.1 413"), "to come back would not help"
    assert node.inflight_bytes == HELD_BYTES_MAX


async def test_small_requests_of_nobody_known_are_bounded() -> None:
    node, guard, transport = Node(), Slow(), Transport()
    protocol = _connect(node, guard, transport)
    for _ in range(REQUESTS):
        protocol.data_received(HEAD % len(BODY) + BODY)
    held = node.inflight_bytes
    assert held <= HELD_BYTES_MAX + len(BODY), f"G6 Bounded: {held} bytes are held"
    guard.answers.set()
    await asyncio.sleep(0.05)
    protocol._unset_keepalive_if_required()
    assert node.inflight_bytes == 0
    kept = HELD_BYTES_MAX // len(BODY)
    assert transport.said.count(b"HTTP/1.1 200") == kept
    assert transport.said.count(b"HTTP/1.1 429") == REQUESTS - kept
