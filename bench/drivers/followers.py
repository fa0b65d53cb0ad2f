"""Many live readers of one topic in one process: WebSockets that are read and counted.

What is measured is the worker's cost, so the client does as little as a client can: bytes are
received and messages counted, none is decoded.
"""

import base64
import os
import selectors
import socket
import sys
import time
from typing import Any, Final
from urllib.parse import urlsplit

from bench import driver
from bench.drivers.sockets import masked_text

MARK: Final = b'"offset":'
"""Stands once in every message, and in nothing else that a reader gets after its beginning."""
RECEIVE_BYTES: Final = 1 << 20
CREDIT: Final = 1_000_000_000
QUIET_S: Final = 3.0


class Follower:
    """One socket that follows a partition from its end."""

    def __init__(self, host: str, port: int, topic: str) -> None:
        self.sock = socket.create_connection((host, port), timeout=30)
        self.messages = 0
        self.bytes = 0
        self._tail = b""
        key = base64.b64encode(os.urandom(16)).decode()
        self.sock.sendall(
            f"GET /v1/{topic}/socket HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
            "\r\n".encode()
        )
        self._until(b'"welcome"')
        self.sock.sendall(
            masked_text(b'{"read":{"id":1,"position":"latest","credit":%d}}' % CREDIT)
        )
        self._until(b'"reading"')
        self.sock.setblocking(False)

    def _until(self, mark: bytes) -> None:
        said = b""
        while mark not in said or not said.endswith(b"}}"):
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionError(f"closed: {said!r}")
            said += data

    def receive(self) -> None:
        """Count what has come."""
        data = self.sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the worker closed a live reader")
        self.bytes += len(data)
        self.messages += (self._tail + data).count(MARK)
        self._tail = data[-len(MARK) + 1 :]


def main(url: str) -> None:
    """Serve."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    host, port = parts.hostname, parts.port or 80
    followers: list[Follower] = []

    def join(topic: str, count: int) -> dict[str, Any]:
        """Open so many live readers."""
        followers.extend(Follower(host, port, topic) for _ in range(count))
        return {"count": count}

    def count(messages: int) -> dict[str, Any]:
        """Count until every reader has had `messages`, then close them all."""
        began = time.perf_counter()
        with selectors.DefaultSelector() as selector:
            for follower in followers:
                selector.register(follower.sock, selectors.EVENT_READ, follower)
            heard = time.perf_counter()
            # The first message may be a while in coming.
            while any(f.messages < messages for f in followers):
                for key, _ in selector.select(0.5):
                    key.data.receive()
                    heard = time.perf_counter()
                if time.perf_counter() - heard > (QUIET_S if followers[0].messages else 30.0):
                    break
        found = {
            "messages": [f.messages for f in followers],
            "bytes": sum(f.bytes for f in followers),
            "elapsed_s": time.perf_counter() - began,
        }
        for follower in followers:
            follower.sock.close()
        followers.clear()
        return found

    driver.serve({"join": join, "count": count})


if __name__ == "__main__":
    main(sys.argv[1])
