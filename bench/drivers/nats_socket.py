"""NATS JetStream over a bare socket: what its server takes, without nats-py's share.

Publishes with a reply subject and waits for the ack message, as the client library does, in the
fewest instructions that Python allows. Not a peer that anyone would use; it shows how much of the
difference between two rows is the servers' and how much is the clients'.
"""

import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from bench import driver, payload


class Connection:
    """One connection that subscribes to its own reply subject."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._sock = socket.create_connection((parts.hostname, parts.port or 4222), timeout=60)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._until(b"\r\n")
        self._sock.sendall(
            b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n'
            b"SUB reply.socket 1\r\nPING\r\n"
        )
        self._until(b"PONG\r\n")

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            data = self._sock.recv(65536)
            if not data:
                raise ConnectionError("nats-server closed the connection")
            self._buffer += data
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def publish(self, message: bytes) -> None:
        """Publish and wait for the ack."""
        self._sock.sendall(b"PUB bench.ack reply.socket %d\r\n%b\r\n" % (len(message), message))
        while True:
            head = self._until(b"\r\n")
            if head.startswith(b"PING"):
                self._sock.sendall(b"PONG\r\n")
                continue
            if not head.startswith(b"MSG "):
                raise ConnectionError(f"unexpected: {head!r}")
            ack = self._until(b"\r\n")
            if b'"error"' in ack:
                raise ConnectionError(ack.decode())
            return


def main(url: str) -> None:
    """Serve."""
    connection = Connection(url)

    def latency(size: int, count: int) -> dict[str, Any]:
        """Time single messages, one in flight."""
        messages = payload.messages(count + 20, size)
        for message in messages[:20]:
            connection.publish(message)
        samples = []
        for message in messages[20:]:
            began = time.perf_counter()
            connection.publish(message)
            samples.append((time.perf_counter() - began) * 1e6)
        return {"us": samples}

    driver.serve({"latency": latency})


if __name__ == "__main__":
    main(sys.argv[1])
