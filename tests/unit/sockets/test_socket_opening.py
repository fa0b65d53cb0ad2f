"""A socket that cannot be opened is refused, whatever the reason: its connection never stays."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_worker.api import socket


class Transport:
    """Notes what is done to a connection."""

    def __init__(self) -> None:
        self.said = b""
        self.closed = False

    def pause_reading(self) -> None:
        """Read nothing."""

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.said += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Broken:
    """A guard, or topics, with a fault."""

    async def check_any(self, *_: object) -> None:
        raise ZeroDivisionError("a fault")

    def topic(self, *_: object) -> None:
        raise ZeroDivisionError("a fault")


@pytest.mark.parametrize("guard", [None, Broken()])
async def test_a_fault_closes_the_connection(guard: Broken | None) -> None:
    """G6: with authentication the connection is not read, so its end would never be seen."""
    tasks = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.ensure_future(work))

    transport, node = Transport(), Broken()

    def end_with(word: bytes) -> None:
        transport.write(word)
        transport.close()

    http = SimpleNamespace(
        transport=transport, url=b"/v1/shop/orders/socket", headers=[], scope={"method": "GET"},
        end_with=end_with,
    )  # fmt: skip
    sockets: Any = SimpleNamespace(guard=guard, node=node)
    node.spawn = spawn  # type: ignore[attr-defined]
    socket.upgrade(http, sockets)
    await asyncio.gather(*tasks)
    assert transport.said.startswith(b"HTTP/1.1 500 Internal Server Error\r\n"), transport.said
    assert b'"reason":"Internal"' in transport.said
    assert transport.closed
