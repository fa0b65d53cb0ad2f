"""G6 Bounded: a message that is not whole waits for room, but not for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.errors import Overloaded
from tidewater_core.settings import Limits
from tidewater_worker.api import socket
from tidewater_worker.api.socket_frames import Close

MESSAGE_BYTES = 1_000_000
HEAD = b"\x81\xff" + MESSAGE_BYTES.to_bytes(8, "big") + bytes(4)


class Node:
    """A worker that others may fill."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(limits=Limits())
        self.inflight_bytes = 0
        self.has_room = True

    def topic(self, *_: object) -> Any:
        return SimpleNamespace(name="shop/orders", spec=SimpleNamespace(partitions=1))

    def busy(self) -> Overloaded:
        return Overloaded("WorkerBusy", "too many bytes wait for the log", 100)


class Transport:
    """Notes what is done to a connection."""

    def __init__(self) -> None:
        self.said = b""
        self._is_read = True

    def reads(self) -> bool:
        return self._is_read

    def pause_reading(self) -> None:
        self._is_read = False

    def resume_reading(self) -> None:
        self._is_read = True

    def write(self, data: bytes) -> None:
        self.said += data

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """End it."""


def _open(node: Node) -> tuple[socket.SocketConnection, Transport]:
    sockets: Any = SimpleNamespace(node=node, producing=None, guard=None, open=0)
    loop = asyncio.get_running_loop()
    connection = socket.SocketConnection(sockets, "shop", "orders", set(), loop)
    transport = Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


async def test_a_message_goes_on_when_there_is_room() -> None:
    node = Node()
    connection, transport = _open(node)
    connection.data_received(HEAD + bytes(200_000))
    assert node.inflight_bytes == 200_000 + len(HEAD)
    assert transport.reads()
    node.has_room = False
    connection.data_received(bytes(1_000))
    assert not transport.reads()
    connection.resume_writing()  # nor does anything else make it go on
    assert not transport.reads()
    node.has_room = True
    await asyncio.sleep(3 * socket.BUSY_RETRY_S)
    assert transport.reads()
    assert node.inflight_bytes == 201_000 + len(HEAD)
    connection.connection_lost(None)
    assert node.inflight_bytes == 0


async def test_a_small_piece_of_a_message_waits_for_nothing() -> None:
    """It is whole soon, and refused then; its socket stays."""
    node = Node()
    node.has_room = False
    connection, transport = _open(node)
    connection.data_received(HEAD + bytes(60_000))
    assert transport.reads()
    connection.connection_lost(None)


async def test_without_room_it_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """All may wait for each other: then one after the other ends, until there is room."""
    monkeypatch.setattr(socket, "BUSY_S", 0.1)
    node = Node()
    node.has_room = False
    connection, transport = _open(node)
    connection.data_received(HEAD + bytes(200_000))
    await asyncio.sleep(0.1 + 3 * socket.BUSY_RETRY_S)
    assert node.inflight_bytes == 0
    close = transport.said[transport.said.index(b"\x88") :]
    assert int.from_bytes(close[2:4], "big") == Close.TRY_LATER
    assert b"WorkerBusy" in close
    connection.data_received(bytes(200_000))
    assert node.inflight_bytes == 0, "what still comes is not kept"
    connection.connection_lost(None)
    assert node.inflight_bytes == 0
