"""The table process's end of the local socket.

One edge is connected at a time; a new connection replaces the old one, whose calls are dropped.
Short calls are answered by the connection's own thread, long ones by a small pool.
"""

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidewater_core.errors import TidewaterError
from tidewater_worker.link import wire
from tidewater_worker.ports import TableEngine, TopicAssignment, TopicState

CALLS_AT_ONCE: Final = 16
PIECE_BYTES: Final = 4 * 1024 * 1024
"""History is sent in pieces of about this size."""
log = logging.getLogger(__name__)


class _Stop(Exception):
    """SIGTERM came."""


def _piece(batches: Iterator[pa.RecordBatch]) -> bytes | None:
    """Encode the next batches as an Arrow stream; None at the end."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= PIECE_BYTES:
            break
    if not gathered:
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, gathered[0].schema) as writer:
        for batch in gathered:
            writer.write_batch(batch)
    return bytes(memoryview(sink.getvalue()))


class _Connection:
    """One edge's connection."""

    def __init__(self, peer: socket.socket, engine: TableEngine, pool: ThreadPoolExecutor) -> None:
        self._peer, self._engine, self._pool = peer, engine, pool
        self._sending = threading.Lock()
        self._history: dict[int, Iterator[pa.RecordBatch]] = {}

    def send(self, message: bytes) -> None:
        with self._sending, suppress(OSError):
            self._peer.sendall(message)

    def close(self) -> None:
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def run(self) -> None:
        """Read messages until the edge goes away."""
        with suppress(OSError, EOFError), self._peer.makefile("rb") as stream:
            while True:
                head = stream.read(wire.HEAD_BYTES)
                if len(head) < wire.HEAD_BYTES:
                    return
                length, kind = wire.unpack_head(head)
                payload = stream.read(length)
                if len(payload) < length or kind != wire.JSON:
                    return
                self._take(msgspec.json.decode(payload))

    def _take(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "assign":
                self._engine.assign(
                    msgspec.convert(message["topics"], list[TopicAssignment], str_keys=True)
                )
            case "durable":
                for topic, ends in message["ends"].items():
                    self._engine.durable(topic, {int(p): end for p, end in ends.items()})
            case _:
                self._pool.submit(self._call, message)

    def _call(self, message: dict[str, Any]) -> None:
        call_id = message["id"]
        try:
            answer = self._answer(call_id, message)
        except TidewaterError as error:
            answer = {"error": error.to_json()}
        except Exception as error:
            log.exception("call %s failed", message["op"])
            answer = {
                "error": {"kind": "Retryable", "reason": "TableProcessError", "message": str(error)}
            }
        if answer is not None:
            self.send(wire.pack_json({"id": call_id, **answer}))

    def _answer(self, call_id: int, message: dict[str, Any]) -> dict[str, Any] | None:
        engine = self._engine
        match message["op"]:
            case "flush":
                upto = {int(p): end for p, end in message["upto"].items()}
                return {"result": engine.flush(message["topic"], upto, message["timeout_s"])}
            case "stats":
                return {"result": engine.stats(message["topic"])}
            case "offset_at":
                return {
                    "result": engine.offset_at(
                        message["topic"], message["partition"], message["timestamp_us"]
                    )
                }
            case "bounds":
                return {"result": engine.bounds(message["topic"])}
            case "frontier_at":
                ends = engine.frontier_at(message["topic"], message["snapshot_id"], message["tag"])
                return {"result": ends}
            case "history":
                self._history[call_id] = engine.history(
                    message["topic"], message["partition"], message["start"], message["end"],
                    message["max_rows"],
                )  # fmt: skip
                return self._more(call_id)
            case "more":
                return self._more(call_id)
            case "cancel":
                self._history.pop(call_id, None)
                return None
            case unknown:
                raise ValueError(f"no call named {unknown!r}")

    def _more(self, call_id: int) -> dict[str, Any] | None:
        batches = self._history.get(call_id)
        piece = _piece(batches) if batches is not None else None
        if piece is None:
            self._history.pop(call_id, None)
            return {"result": None}
        self.send(wire.pack_arrow(call_id, piece))
        return None


class _States:
    """The last state of every topic, told to whoever connects and on every change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, TopicState] = {}
        self._connection: _Connection | None = None

    def notify(self, state: TopicState) -> None:
        with self._lock:
            self._last[state.topic] = state
            connection = self._connection
        if connection is not None:
            connection.send(wire.pack_json({"state": state}))

    def connect(self, connection: _Connection) -> None:
        with self._lock:
            self._connection = connection
            states = list(self._last.values())
        for state in states:
            connection.send(wire.pack_json({"state": state}))


def serve(
    make_engine: Callable[[Callable[[TopicState], None]], TableEngine],
    socket_path: Path,
    shutdown_deadline_s: float,
) -> None:
    """Serve the engine until SIGTERM, then close it within the deadline."""
    states = _States()
    engine = make_engine(states.notify)
    socket_path.parent.mkdir(parents=True, exist_ok=True)
    socket_path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(socket_path))
    listener.listen(4)

    def stop(_signum: int, _frame: object) -> None:
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="call")
    current: _Connection | None = None
    try:
        while True:
            peer, _ = listener.accept()
            if current is not None:
                current.close()
            current = _Connection(peer, engine, pool)
            states.connect(current)
            threading.Thread(target=current.run, name="edge", daemon=True).start()
    except _Stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        engine.close(shutdown_deadline_s)
    finally:
        listener.close()
        pool.shutdown(wait=False, cancel_futures=True)
        socket_path.unlink(missing_ok=True)
