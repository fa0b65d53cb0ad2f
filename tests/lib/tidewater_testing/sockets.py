"""A WebSocket of a topic for tests, over a client library that is not ours."""

import json
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import websocket

from tidewater_testing.parts.worker import Worker


class Dialled:
    """An open socket that speaks Tidewater's messages."""

    def __init__(self, worker: Worker, topic: str, **options: Any) -> None:
        url = f"ws://{worker.address}/v1/{topic}/socket"
        self.raw = websocket.create_connection(url, timeout=20, **options)
        self.welcome: dict[str, Any] = self.hear()["welcome"]

    def say(self, **command: Any) -> None:
        """Send a message without waiting."""
        self.raw.send(json.dumps(command))

    def say_arrow(self, head: dict[str, Any], batch: pa.RecordBatch, cut: int = 0) -> None:
        """Send a binary message; `cut` takes so many bytes off its end."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        text = json.dumps(head).encode()
        data = len(text).to_bytes(4, "little") + text + sink.getvalue().to_pybytes()
        self.raw.send_binary(data[: len(data) - cut])

    def hear(self) -> dict[str, Any]:
        """Wait for the next text message."""
        said: dict[str, Any] = json.loads(self.raw.recv())
        return said

    def hear_arrow(self) -> tuple[dict[str, Any], pa.Table]:
        """Wait for the next binary message: its object and its rows."""
        data = self.raw.recv()
        assert isinstance(data, bytes), data
        begin = 4 + int.from_bytes(data[:4], "little")
        assert begin % 8 == 0, "the stream is aligned"
        return json.loads(data[4:begin]), pa.ipc.open_stream(data[begin:]).read_all()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a message and wait for the next one."""
        self.say(**command)
        return self.hear()

    def messages(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many messages of a read or subscription."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            said = self.hear()
            assert "messages" in said, said
            found += said["messages"]["messages"]
        return found

    def close_code(self) -> int:
        """Read until the worker closes, and return why."""
        while True:
            opcode, data = self.raw.recv_data(control_frame=True)
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                return int.from_bytes(data[:2], "big")

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are, frames or not."""
        assert self.raw.sock is not None
        self.raw.sock.sendall(data)

    def cut(self) -> None:
        """Close the connection without a good-bye."""
        self.raw.shutdown()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()
