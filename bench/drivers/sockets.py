"""What one worker takes over WebSockets: many small messages in flight, each durable when acked.

The client does as little as a client can: its frames are masked and laid out before the clock
starts, and an acknowledgement is counted, not decoded. Every id must come back once.
"""

import base64
import json
import os
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from bench import driver

FRAMES: Final = 4096
"""Frames that are prepared for each socket, and sent again and again."""
_ACK: Final = b'{"ack":{"id":'


def masked_text(payload: bytes) -> bytes:
    """Frame a text message as a client must: masked with a key that nobody can foretell."""
    mask = os.urandom(4)
    size = len(payload)
    head = bytes((0x81, 0x80 | size)) if size < 126 else b"\x81\xfe" + size.to_bytes(2, "big")
    key = (mask * (size // 4 + 1))[:size]
    masked = int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")
    return head + mask + masked.to_bytes(size, "big")


@dataclass
class Peer:
    """One socket and what is under way on it."""

    sock: socket.socket
    frames: list[bytes]
    sent: int = 0
    acked: int = 0
    rest: bytes = b""
    began: list[float] = field(default_factory=list)

    def send(self, count: int) -> None:
        """Send the next messages in one go."""
        now = time.perf_counter()
        first = self.sent % FRAMES
        self.sock.sendall(b"".join(self.frames[first : first + count]))
        if first + count > FRAMES:
            self.sock.sendall(b"".join(self.frames[: first + count - FRAMES]))
        self.sent += count
        self.began += [now] * count

    def receive(self) -> int:
        """Count what was acknowledged; whatever else comes is a failure."""
        data = self.rest + self.sock.recv(262_144)
        end = data.rfind(b"}}") + 2
        self.rest, data = data[end:], data[:end]
        if (at := data.find(b'{"error"')) >= 0:
            sys.exit(f"refused: {data[at : at + 300]!r}")
        count = data.count(_ACK)
        self.acked += count
        return count


def connect(address: str, topic: str, size: int, number: int) -> Peer:
    """Open a socket and prepare its messages."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    key = base64.b64encode(os.urandom(16)).decode()
    sock.sendall(
        f"GET /v1/{topic}/socket HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
        "\r\n".encode()
    )
    greeting = b""
    while b'"welcome"' not in greeting or not greeting.endswith(b"}}"):
        piece = sock.recv(65_536)
        greeting += piece
        if not piece or b" 101 " not in greeting:
            sys.exit(f"no socket: {greeting!r}")
    value = f"{number}-".ljust(size, "x")
    frames = [
        masked_text(
            json.dumps(
                {"produce": {"id": i, "messages": [{"value": value}]}}, separators=(",", ":")
            ).encode()
        )
        for i in range(FRAMES)
    ]
    return Peer(sock, frames)


def run(peers: list[Peer], depth: int, seconds: float) -> dict[str, float]:
    """Keep `depth` messages in flight on each socket; return rate and latency."""
    selector = selectors.DefaultSelector()
    for peer in peers:
        selector.register(peer.sock, selectors.EVENT_READ, peer)
    latencies: list[float] = []
    cpu = time.process_time()
    started = time.perf_counter()
    before = sum(peer.acked for peer in peers)
    stop = started + seconds
    for peer in peers:
        peer.send(depth)
    under_way = depth * len(peers)
    while under_way:
        for key, _ in selector.select(10):
            peer = key.data
            count = peer.receive()
            now = time.perf_counter()
            latencies += [now - began for began in peer.began[:count]]
            del peer.began[:count]
            under_way -= count
            if now < stop and count:
                peer.send(count)
                under_way += count
    elapsed = time.perf_counter() - started
    acked = sum(peer.acked for peer in peers) - before
    latencies.sort()
    selector.close()
    return {
        "msg_per_s": round(acked / elapsed),
        "ack_ms_p50": round(latencies[len(latencies) // 2] * 1000, 3),
        "ack_ms_p99": round(latencies[len(latencies) * 99 // 100] * 1000, 3),
        "client_cpu_us_per_msg": round((time.process_time() - cpu) / acked * 1e6, 2),
    }


def main(url: str) -> None:
    """Serve."""
    address = urlsplit(url).netloc

    def produce(topic: str, sockets: int, depth: int, size: int, seconds: float) -> dict[str, Any]:
        """Open sockets, keep messages in flight on all of them, close them."""
        peers = [connect(address, topic, size, number) for number in range(sockets)]
        run(peers, depth, seconds / 4)  # warm
        found = run(peers, depth, seconds)
        for peer in peers:
            peer.sock.close()
        return found

    driver.serve({"produce": produce})


if __name__ == "__main__":
    main(sys.argv[1])
