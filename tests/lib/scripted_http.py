"""A small real HTTP server whose answers the test writes, faults included."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from tidewater.origin import Origin


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


HANG_UP = b"\0hang-up"
"""Close the connection instead of an answer."""
RESET = b"\0reset"
"""Reset the connection instead of an answer."""
SILENCE = b"\0silence"
"""Answer nothing and keep the connection."""

Handler = Callable[[Request], bytes]


def answer(body: bytes, status: int = 200, headers: str = "") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status,
        len(body),
        headers.encode(),
        body,
    )


class Server:
    """Accepts connections and answers each request with what `handler` returns."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[Request] = []
        self.connections = 0
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._sock.getsockname()[1]
        self._peers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def origin(self) -> Origin:
        return Origin("127.0.0.1", self._port)

    @property
    def url(self) -> str:
        return str(self.origin)

    def drop_connections(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                return
            self.connections += 1
            self._peers.append(peer)
            self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as file, contextlib.suppress(OSError):
            while (request := _read(file)) is not None:
                self.requests.append(request)
                reply = self.handler(request)
                if reply == SILENCE:
                    continue
                if reply == RESET:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                if reply == HANG_UP:
                    return
                peer.sendall(reply)
                if b"connection: close" in reply.lower():
                    return


def _read(file: BinaryIO) -> Request | None:
    first = file.readline()
    if not first:
        return None
    method, target, _ = first.decode().split()
    headers: dict[str, str] = {}
    while (line := file.readline()) not in {b"\r\n", b""}:
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return Request(method, target, headers, file.read(int(headers.get("content-length", "0"))))
