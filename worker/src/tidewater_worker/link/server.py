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
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidewater_core.crd.subscription import FilterSpec
from tidewater_core.errors import Invalid, TidewaterError
from tidewater_worker.link import wire
from tidewater_worker.ports import (
    FlushResult,
    Followed,
    Offer,
    OfferAnswer,
    Sifted,
    TableEngine,
    TopicAssignment,
    TopicState,
)

CALLS_AT_ONCE: Final = 16
PIECE_BYTES: Final = 4 * 1024 * 1024
"""History is sent in pieces of about this size."""
PIECE_ANSWERS: Final = 4
"""Windows of offsets that a filter looks through for one piece."""
log = logging.getLogger(__name__)


class _Stop(Exception):
    """SIGTERM came."""


def _fault(error: Exception) -> dict[str, Any]:
    """Say that a call failed by what nobody foresaw."""
    return {"error": {"kind": "Retryable", "reason": "TableProcessError", "message": str(error)}}


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[memoryview]:
    """Encode batches as Arrow streams of some batches each.

    What the reader gives is small (`history.GIVEN_BYTES`), so a piece is little more than its size.
    """
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= PIECE_BYTES:
            yield _encoded([(batch, None) for batch in gathered])
            gathered, size = [], 0
    if gathered:
        yield _encoded([(batch, None) for batch in gathered])


def _sifted_pieces(found: Iterator[Sifted]) -> Iterator[memoryview]:
    """Encode answers to a filter, each batch with the offsets that it stands for.

    Long stretches without a wanted row make small pieces: each is an answer, so that the edge
    neither gives up waiting nor looks through the same rows again when it must begin anew.
    """
    gathered: list[tuple[pa.RecordBatch, dict[str, str] | None]] = []
    size = 0
    for sifted in found:
        gathered.append((sifted.rows, {"start": str(sifted.start), "end": str(sifted.end)}))
        size += sifted.rows.nbytes
        if size >= PIECE_BYTES or len(gathered) >= PIECE_ANSWERS:
            yield _encoded(gathered)
            gathered, size = [], 0
    if gathered:
        yield _encoded(gathered)


def _encoded(batches: list[tuple[pa.RecordBatch, dict[str, str] | None]]) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0][0].schema) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return memoryview(sink.getvalue())


class _Connection:
    """One edge's connection."""

    def __init__(
        self,
        peer: socket.socket,
        engine: TableEngine,
        pool: ThreadPoolExecutor,
        offered: "_Offered",
    ) -> None:
        self._peer, self._engine, self._pool, self._offered = peer, engine, pool, offered
        self._sending = threading.Lock()
        self._history: dict[int, Iterator[memoryview]] = {}
        self._wanted: set[int] = set()
        """Calls of the pool that somebody waits for, and reads that may be asked for more."""

    def send(self, *parts: bytes | memoryview) -> None:
        """Send a message, given in parts so that a large one need not be copied."""
        with self._sending, suppress(OSError):
            for part in parts:
                self._peer.sendall(part)

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
                self._take_safely(msgspec.json.decode(payload))

    def _take_safely(self, message: dict[str, Any]) -> None:
        """Take a message; a fault of ours is that message's alone: nobody else reads for us."""
        try:
            self._take(message)
        except Exception as error:
            log.exception("%s could not be taken", message.get("op"))
            if "id" in message:
                self.send(wire.pack_json({"id": message["id"], **_fault(error)}))

    def run_to_end(self) -> None:
        """Serve the edge; offers that it has not answered by the end are lost."""
        try:
            self.run()
        finally:
            self.close()  # else an edge that is there would wait for who no longer reads
            self._offered.lose(self)
            self._wanted.clear()
            self._history.clear()  # each pins a snapshot, and has threads

    def _take(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "assign":
                self._engine.assign(
                    msgspec.convert(message["topics"], list[TopicAssignment], str_keys=True)
                )
            case "durable":
                for topic, ends in message["ends"].items():
                    self._engine.durable(topic, {int(p): end for p, end in ends.items()})
            case "offered":
                self._offered.answer(
                    message["call"], msgspec.convert(message["answer"], OfferAnswer, str_keys=True)
                )
            case "commit":
                self._commit(message)
            case "follow" | "flush":
                self._wait(message)
            case "ping":
                self.send(wire.pack_json({"id": message["id"], "result": None}))
            case "cancel":
                # Noted here, before a call that waits for its turn begins, or a read that has just
                # begun is kept; what it holds is let go of by a thread that has the time.
                self._wanted.discard(message["id"])
                if message["id"] in self._history:
                    self._pool.submit(self._history.pop, message["id"], None)
            case _:
                self._wanted.add(message["id"])
                self._pool.submit(self._call, message)

    def _wait(self, message: dict[str, Any]) -> None:
        """Take a call that is answered when something has happened; no thread waits for it."""
        call_id = message["id"]

        def answer(found: Followed | FlushResult | TidewaterError) -> None:
            if isinstance(found, TidewaterError):
                self.send(wire.pack_json({"id": call_id, "error": found.to_json()}))
            else:
                self.send(wire.pack_json({"id": call_id, "result": found}))

        try:
            timeout_s = float(message["timeout_s"])
            if message["op"] == "flush":
                upto = {int(p): end for p, end in message["upto"].items()}
                self._engine.flush(message["topic"], upto, timeout_s, answer)
            else:
                self._engine.follow(message["topic"], message["known"], timeout_s, answer)
        except TidewaterError as error:
            answer(error)

    def _commit(self, message: dict[str, Any]) -> None:
        """Take another worker's files; the answer comes when they are committed."""
        call_id = message["id"]

        def answer(result: OfferAnswer) -> None:
            self.send(wire.pack_json({"id": call_id, "result": result}))

        try:
            offer = msgspec.convert(message["offer"], Offer, str_keys=True)
            self._engine.commit_offer(offer, answer)
        except msgspec.ValidationError as error:
            invalid = Invalid("InvalidOffer", str(error))
            self.send(wire.pack_json({"id": call_id, "error": invalid.to_json()}))
        except TidewaterError as error:
            self.send(wire.pack_json({"id": call_id, "error": error.to_json()}))

    def _call(self, message: dict[str, Any]) -> None:
        call_id = message["id"]
        if call_id not in self._wanted:
            return
        try:
            answer = self._answer(call_id, message)
        except TidewaterError as error:
            answer = {"error": error.to_json()}
        except Exception as error:
            log.exception("call %s failed", message["op"])
            answer = _fault(error)
        if answer is not None:
            self._wanted.discard(call_id)
            self.send(wire.pack_json({"id": call_id, **answer}))

    def _answer(self, call_id: int, message: dict[str, Any]) -> dict[str, Any] | None:
        engine = self._engine
        match message["op"]:
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
            case "drop_table":
                return {"result": engine.drop_table(message["topic"])}
            case "frontier_at":
                ends = engine.frontier_at(message["topic"], message["snapshot_id"], message["tag"])
                return {"result": ends}
            case "history":
                batches = engine.history(
                    message["topic"], message["partition"], message["start"], message["end"],
                    message["max_rows"], message.get("columns"),
                )  # fmt: skip
                self._history[call_id] = _pieces(batches)
                return self._more(call_id)
            case "sift":
                found = engine.sift(
                    message["topic"], message["partition"], message["start"], message["end"],
                    FilterSpec.model_validate(message["wanted"]),
                )  # fmt: skip
                self._history[call_id] = _sifted_pieces(found)
                return self._more(call_id)
            case "more":
                return self._more(call_id)
            case unknown:
                raise ValueError(f"no call named {unknown!r}")

    def _more(self, call_id: int) -> dict[str, Any] | None:
        pieces = self._history.get(call_id)
        piece = next(pieces, None) if pieces is not None else None
        if piece is None or call_id not in self._wanted:
            self._history.pop(call_id, None)
            return {"result": None}
        self.send(wire.arrow_head(call_id, len(piece)), piece)
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


class _Offered:
    """Offers that the edge was asked to send to another worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = count(1)
        self._waiting: dict[int, tuple[_Connection, Callable[[OfferAnswer], None]]] = {}
        self._connection: _Connection | None = None

    def connect(self, connection: _Connection) -> None:
        with self._lock:
            self._connection = connection

    def hand(self, offer: Offer, answer: Callable[[OfferAnswer], None]) -> None:
        """Ask the edge; `answer` is called once, at once if there is no edge."""
        call = next(self._ids)
        with self._lock:
            connection = self._connection
            if connection is not None:
                self._waiting[call] = (connection, answer)
        if connection is None:
            answer(_EDGE_AWAY)
        else:
            connection.send(wire.pack_json({"offer": offer, "call": call}))

    def answer(self, call: int, answer: OfferAnswer) -> None:
        with self._lock:
            found = self._waiting.pop(call, None)
        if found is not None:
            found[1](answer)

    def lose(self, connection: _Connection) -> None:
        """Answer for an edge that has gone."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
            lost = [call for call, (asked, _) in self._waiting.items() if asked is connection]
        for call in lost:
            self.answer(call, _EDGE_AWAY)


_EDGE_AWAY: Final = OfferAnswer(landed=False, reason="EdgeAway", message="the edge went away")
MakeEngine = Callable[
    [
        Callable[[TopicState], None],
        Callable[[Offer, Callable[[OfferAnswer], None]], None],
    ],
    TableEngine,
]
"""Makes the engine from how to tell states and how to hand files to another worker."""


def serve(
    make_engine: MakeEngine,
    socket_path: Path,
    shutdown_deadline_s: float,
) -> None:
    """Serve the engine until SIGTERM, then close it within the deadline."""
    states, offered = _States(), _Offered()
    engine = make_engine(states.notify, offered.hand)
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
            current = _Connection(peer, engine, pool, offered)
            states.connect(current)
            offered.connect(current)
            threading.Thread(target=current.run_to_end, name="edge", daemon=True).start()
    except _Stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        engine.close(shutdown_deadline_s)
    finally:
        listener.close()
        pool.shutdown(wait=False, cancel_futures=True)
        socket_path.unlink(missing_ok=True)
