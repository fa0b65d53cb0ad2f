"""One DoPut: batches from a Flight thread into the log, and an ack for each back.

    Flight thread: read, check, wait for room ──▶ event loop: route, append ──▶ ack thread: write

The same checks and the same log as for HTTP. A stream has a bounded number of bytes under way;
past it the client is not read. After the first batch that cannot be stored none is begun: the
client gets that batch's error and may go on in another stream from there. Those that were under way
by then may be stored all the same, and each has its own answer.
"""

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidewater_core.errors import OutcomeUnknown, Overloaded, TidewaterError
from tidewater_worker.api.decode import TopicDecoder
from tidewater_worker.api.produce import Answer, Producing, acks_json, not_in_table_yet
from tidewater_worker.api.sizes import held_bytes
from tidewater_worker.flight.judge import Permission
from tidewater_worker.flight.tickets import Put, note_of, split
from tidewater_worker.log.producers import Request
from tidewater_worker.node import Node
from tidewater_worker.topic import Topic

UNDER_WAY_MAX: Final = 256
UNDER_WAY_BYTES_MAX: Final = 32 * 1024 * 1024
BUSY_RETRY_S: Final = 0.02
BUSY_S: Final = 10.0
"""How long a stream waits for a partition that has no room."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    """A batch on its way."""

    number: int
    payload: pa.RecordBatch
    nbytes: int
    request: Request | None
    deadline: float


class PutStream:
    """A stream of batches for one topic."""

    def __init__(
        self,
        node: Node,
        producing: Producing,
        loop: asyncio.AbstractEventLoop,
        put: Put,
        allowed: Permission | None = None,
    ) -> None:
        self._allowed = allowed
        self._node, self._producing, self._loop, self._put = node, producing, loop, put
        self._namespace, self._name = split(put.topic)
        self._next_sequence = put.sequence
        self._count = 0
        self._lock = threading.Condition()
        self._offered: deque[_Batch] = deque()
        self._is_scheduled = False
        self._under_way = 0
        self._under_way_bytes = 0
        self._answers: SimpleQueue[tuple[_Batch | None, bytes]] = SimpleQueue()
        self.error: TidewaterError | None = None

    # ---- the Flight thread

    def run(self, reader: Any, writer: Any) -> None:
        """Store batch after batch until the client ends the stream; raise what was wrong."""
        # A daemon: an idle stream must not hold up the end of the process.
        acks = threading.Thread(
            target=self._write_acks, args=(writer,), name="flight-acks", daemon=True
        )
        acks.start()
        try:
            while self.error is None:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    break
                if chunk.data is not None and self.error is None:
                    self._take(chunk.data, chunk.app_metadata)
        finally:
            with self._lock:
                while self._under_way:
                    self._lock.wait()
            self._answers.put((None, b""))
            acks.join()
        if self.error is not None:
            raise self.error

    def _take(self, data: pa.RecordBatch, metadata: Any) -> None:
        if self._allowed is not None:
            self._allowed.check()
        decoder = self._decoder()
        request = None
        if self._put.producer is not None:
            note = note_of(metadata.to_pybytes()) if metadata is not None else None
            if note is not None and note.sequence is not None:
                self._next_sequence = note.sequence
            request = Request(self._put.producer, self._next_sequence)
            self._next_sequence += 1
        payload = decoder.batch(data)
        nbytes = held_bytes(payload)
        deadline = self._node.clock.monotonic() + BUSY_S
        batch = _Batch(self._count, payload, nbytes, request, deadline)
        self._count += 1
        with self._lock:
            while self._under_way >= UNDER_WAY_MAX or (
                self._under_way and self._under_way_bytes + nbytes > UNDER_WAY_BYTES_MAX
            ):
                self._lock.wait()
            self._under_way += 1
            self._under_way_bytes += nbytes
            self._offered.append(batch)
            wake = not self._is_scheduled
            self._is_scheduled = True
        if wake:
            self._loop.call_soon_threadsafe(self._offer)

    def _decoder(self) -> TopicDecoder:
        return self._producing.decoder(self._node.topic(self._namespace, self._name))

    # ---- the event loop

    def _offer(self) -> None:
        with self._lock:
            batches = list(self._offered)
            self._offered.clear()
            self._is_scheduled = False
        for i, batch in enumerate(batches):
            try:
                if self.error is not None:
                    raise self.error
                self._store(batch)
            except Overloaded as error:
                if self._node.clock.monotonic() < batch.deadline:
                    self._try_later(batches[i:])
                    return
                self._refused(batch, error)
            except TidewaterError as error:
                self._refused(batch, error)
            except Exception:
                log.exception("DoPut to %s failed", self._put.topic)
                said = "this is a fault of the worker; its log has more"
                self._refused(batch, OutcomeUnknown("Internal", said))

    def _try_later(self, batches: list[_Batch]) -> None:
        with self._lock:
            self._offered.extendleft(reversed(batches))
            self._is_scheduled = True
        self._loop.call_later(BUSY_RETRY_S, self._offer)

    def _store(self, batch: _Batch) -> None:
        self._node.admit()
        topic = self._node.topic(self._namespace, self._name)
        self._node.inflight_bytes += batch.nbytes
        try:
            self._producing.submit(
                topic, batch.payload, batch.nbytes, self._put.partition, batch.request,
                lambda answer: self._stored(topic, batch, answer), nbytes=batch.nbytes,
            )  # fmt: skip
        except Exception:
            self._node.inflight_bytes -= batch.nbytes
            raise

    def _stored(self, topic: Topic, batch: _Batch, answer: Answer) -> None:
        self._node.inflight_bytes -= batch.nbytes
        if answer.error is not None:
            topic.counters["errors"] += 1
            self._refused(batch, answer.error)
            return
        topic.counters["messages"] += sum(stored.count for stored in answer.acks.values())
        if self._put.ack == "table":
            self._node.spawn(self._stored_in_table(topic, batch, answer))
            return
        said = b'{"batch":%d,"acks":[%b]}' % (batch.number, acks_json(answer))
        self._answers.put((batch, said))

    async def _stored_in_table(self, topic: Topic, batch: _Batch, answer: Answer) -> None:
        timeout_ms = min(self._put.timeout_ms, self._node.settings.limits.flush_wait_max.ms)
        try:
            snapshot = await self._producing.in_table(topic, answer, timeout_ms)
        except TidewaterError as error:
            self._refused(batch, error)
            return
        except asyncio.CancelledError:
            self._refused(batch, not_in_table_yet("this worker is shutting down"))
            raise
        said = b'{"batch":%d,"acks":[%b],"snapshot_id":%b}' % (
            batch.number, acks_json(answer), str(snapshot).encode(),
        )  # fmt: skip
        self._answers.put((batch, said))

    def _refused(self, batch: _Batch, error: TidewaterError) -> None:
        self.error = self.error or error
        said = {"batch": batch.number, **error.to_body()}
        self._answers.put((batch, msgspec.json.encode(said)))

    # ---- the ack thread

    def _write_acks(self, writer: Any) -> None:
        gone = False
        while True:
            batch, said = self._answers.get()
            if batch is None:
                return
            if not gone:
                try:
                    writer.write(pa.py_buffer(said))
                except (pa.ArrowException, OSError):
                    gone = True  # the client went away; what it sent is stored all the same
            with self._lock:
                self._under_way -= 1
                self._under_way_bytes -= batch.nbytes
                self._lock.notify()
