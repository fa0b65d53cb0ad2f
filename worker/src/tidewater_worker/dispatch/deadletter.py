"""Messages that were delivered too often: into the dead-letter topic, and back.

A dead letter is the message with headers that tell where it came from. Replaying does not copy it
back: the original is still in its topic, so its acknowledgement is taken back, and only this
subscription gets it again.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import msgspec
import pyarrow as pa

from tidewater_coordination.port import CursorKey
from tidewater_core import names
from tidewater_core.errors import Conflict, Fenced, Invalid, Retryable, TidewaterError
from tidewater_worker import plain
from tidewater_worker.dispatch.cursor import Progress, decode_progress
from tidewater_worker.dispatch.keyshared import key_hash
from tidewater_worker.dispatch.part import Part
from tidewater_worker.dispatch.policy import Leased
from tidewater_worker.dispatch.ports import ProgressPort
from tidewater_worker.dispatch.store import ProgressStore
from tidewater_worker.log.group import Headers, Rows, Submission
from tidewater_worker.log.producers import Stored
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.reading import PartitionReader
from tidewater_worker.schema import HEADERS_TYPE, payload_fields
from tidewater_worker.topic import Payload, Topic

if TYPE_CHECKING:
    from tidewater_worker.dispatch.spread import Spread
    from tidewater_worker.dispatch.subscription import Origin, Subscription

ORIGIN_TOPIC: Final = "tidewater-origin-topic"
ORIGIN_PARTITION: Final = "tidewater-origin-partition"
ORIGIN_OFFSET: Final = "tidewater-origin-offset"
SUBSCRIPTION: Final = "tidewater-subscription"
REASON: Final = "tidewater-reason"
ATTEMPTS: Final = "tidewater-attempts"
BURY_MAX: Final = 500
"""Dead letters stored in one go."""
DIGITS_MAX: Final = 19
"""Of an offset."""
_PAYLOAD_AT: Final = 5
"""Columns of the table's schema before what the producer sent."""
log = logging.getLogger(__name__)


class DeadLetters:
    """Stores dead letters and finds them again."""

    def __init__(self, node: Node, store: ProgressStore, port: ProgressPort) -> None:
        self._node, self._store, self._port = node, store, port
        self._replaying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By subscription: a replay begins where the one before has ended."""

    async def bury_all(self, subscription: "Subscription", part: Part, target: str) -> None:
        """Put dead messages into the dead-letter topic, or let them live on if that fails."""
        key = CursorKey(subscription.name, subscription.topic_name, part.number)
        try:
            while part.delivery.dead and part.is_current:
                try:
                    buried = await self._bury(subscription, part, target)
                except TidewaterError as error:
                    log.warning("%s: no dead letters into %s: %s", subscription.name, target, error)
                    part.error = error
                    for offset in list(part.delivery.dead):
                        part.delivery.revive(offset, self._node.clock.monotonic())
                    break
                for offset in buried:
                    part.delivery.bury(offset)
                part.dead_lettered += len(buried)
                await part.make_durable()
                with suppress(Fenced):
                    await self._store.save({key: part.encode})
        except TidewaterError as error:
            # In memory they are buried; the store gets it with the next write.
            log.warning(
                "%s: progress of dead letters is not stored yet: %s", subscription.name, error
            )
        finally:
            part.is_burying = False
            subscription.notify()

    async def _bury(self, subscription: "Subscription", part: Part, target: str) -> list[int]:
        try:
            return await self.bury(subscription, part, target)
        except TidewaterError:
            raise
        except Exception as error:
            # Or it would be tried again at once, and for ever.
            log.exception("%s: dead letters of partition %d", subscription.name, part.number)
            said = f"a fault of the worker, whose log has more: {type(error).__name__}"
            raise Retryable("WorkerFault", said) from error

    async def bury(self, subscription: "Subscription", part: Part, target: str) -> list[int]:
        """Store dead messages of a partition; return those that are durable there now."""
        topic = self._node.topic(subscription.name.partition("/")[0], target)
        dead = dict(sorted(part.delivery.dead.items())[:BURY_MAX])
        attempts = {offset: part.delivery.deliveries(offset) for offset in dead}
        leases = [Leased(offset, 0, 0) for offset in dead]
        async with aclosing(part.window.payloads(leases)) as pieces:
            async for piece in pieces:
                added = [
                    {
                        ORIGIN_TOPIC: subscription.topic_name,
                        ORIGIN_PARTITION: str(part.number),
                        ORIGIN_OFFSET: str(at.offset),
                        SUBSCRIPTION: subscription.name,
                        REASON: dead[at.offset],
                        ATTEMPTS: str(attempts[at.offset]),
                    }
                    for at in piece.leases
                ]
                await self._produce(topic, _letters(piece.batch, topic, added))
        return list(dead)

    async def _produce(self, topic: Topic, payload: Payload) -> None:
        self._node.admit()
        size = payload.nbytes if isinstance(payload, pa.RecordBatch) else _size(payload)
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[Stored]] = []
        for number, rows in topic.route(payload, size, None, None):
            future: asyncio.Future[Stored] = loop.create_future()
            waiting.append(future)
            done = partial(_resolve, future)
            partition = topic.partition(number)
            if topic.is_elsewhere(number):
                self._node.forwarding.produce(topic, partition, rows, None, done, as_worker=True)
                continue
            submission = Submission(rows, size, done)
            appender = partition.ready()
            appender.check(submission)
            appender.offer(submission)
        await asyncio.gather(*waiting)

    # ---- and back

    async def replay(self, subscription: "Spread", limit: int) -> dict[str, int]:
        """Deliver the subscription's next dead letters again; count what was found.

        Only the dead letters that are here; their originals may be anywhere.
        """
        async with self._replaying.setdefault(subscription.name, asyncio.Lock()):
            return await self._replay(subscription, limit)

    async def _replay(self, subscription: "Spread", limit: int) -> dict[str, int]:
        topic = self.topic(subscription)
        name = str(topic.name)
        stored = await self._port.load_cursors(subscription.name, name)
        replayed = expired = found = 0
        for partition in list(topic.partitions.values()):
            if partition.is_elsewhere:
                continue
            begin = _position(stored.get(partition.number), subscription.uuid, topic, partition)
            origins, end = await self._origins(subscription, topic, partition, begin, limit - found)
            if end == begin:
                continue
            done, gone = await subscription.restore(origins)
            replayed, expired, found = replayed + done, expired + gone, found + len(origins)
            # After the originals: a crash in between replays some twice, and loses none.
            progress = Progress(subscription.uuid, str(topic.uuid), end, table=_table_of(topic))
            data = msgspec.json.encode(progress)
            epoch = partition.epoch
            key = CursorKey(subscription.name, name, partition.number)
            await self._store.save({key: lambda data=data, epoch=epoch: (data, epoch)})  # type: ignore[misc]
        return {"replayed": replayed, "expired": expired}

    async def replay_all(self, subscription: "Spread", limit: int) -> dict[str, int]:
        """Replay dead letters wherever they are."""
        topic = self.topic(subscription)
        for partition in topic.partitions.values():
            if partition.is_elsewhere and not partition.remote_url:
                partition.ready()  # raises who has it: better none than some, silently
        total = await self.replay(subscription, limit)
        for url in sorted({p.remote_url for p in topic.partitions.values()} - {""}):
            left = limit - total["replayed"] - total["expired"]
            if left <= 0:
                break
            said = await self._node.forwarding.call(
                url, "POST", subscription.target("/replay"), msgspec.json.encode({"max": left})
            )
            total = {name: total[name] + said[name] for name in total}
        return total

    def topic(self, subscription: "Spread") -> Topic:
        """Return the topic that a subscription's dead letters go to."""
        target = subscription.spec.dead_letter
        if target is None:
            raise Conflict("NoDeadLetters", f"{subscription.name} has no deadLetter topic")
        return self._node.topic(subscription.name.partition("/")[0], target.topic)

    async def _origins(
        self,
        subscription: "Spread",
        topic: Topic,
        partition: Partition,
        begin: int,
        limit: int,
    ) -> tuple[list["Origin"], int]:
        """Return where dead letters came from, and the offset after the last one looked at."""
        origins: list[Origin] = []
        end = begin
        if limit <= 0 or begin >= partition.readable().end:
            return origins, end
        reader = PartitionReader(self._node, topic, partition, begin)
        async with aclosing(reader.batches(1 << 62)) as batches:
            async for batch in batches:
                columns = (names.TW_OFFSET, names.TW_KEY, names.TW_HEADERS)
                for offset, key, pairs in zip(
                    *(batch.column(name).to_pylist() for name in columns), strict=True
                ):
                    if len(origins) >= limit:
                        return origins, end
                    end = offset + 1
                    origin = _origin(dict(pairs or ()), subscription)
                    if origin is not None:
                        origins.append((*origin, None if key is None else key_hash(key)))
        return origins, end


def _resolve(future: "asyncio.Future[Stored]", result: Stored | TidewaterError) -> None:
    if future.done():
        return
    if isinstance(result, TidewaterError):
        future.set_exception(result)
    else:
        future.set_result(result)


def _origin(headers: Mapping[str, str], subscription: "Spread") -> tuple[int, int] | None:
    mine = (headers.get(SUBSCRIPTION), headers.get(ORIGIN_TOPIC))
    if mine != (subscription.name, subscription.local.topic_name):
        return None
    numbers = (headers.get(ORIGIN_PARTITION, ""), headers.get(ORIGIN_OFFSET, ""))
    if not all(text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX for text in numbers):
        return None  # anybody who may write there could have
    return int(numbers[0]), int(numbers[1])


def _position(data: bytes | None, uuid: str, topic: Topic, partition: Partition) -> int:
    """Return the first dead letter that was not replayed yet."""
    first = min(partition.table.start, partition.readable().start)
    if data is None:
        return first
    progress = decode_progress(data)
    if not progress.is_of(uuid, str(topic.uuid), _table_of(topic)):
        return first
    if progress.topic != str(topic.uuid):  # made again: letters of its own from its log's begin on
        return max(min(progress.next, partition.readable().start), first)
    return max(progress.next, first)


def _table_of(topic: Topic) -> str:
    return "" if topic.state is None else topic.state.table_uuid


def _size(rows: Rows) -> int:
    return sum(len(value or b"") for value in rows.values) + 256 * rows.num_rows


def _letters(batch: pa.RecordBatch, topic: Topic, added: list[dict[str, str]]) -> Payload:
    """Turn messages into dead letters for a topic.

    Headers without a value, which older tables hold, are no longer taken, and go.
    """
    pairs = [
        list({**{key: text for key, text in own or () if text is not None}, **more}.items())
        for own, more in zip(batch.column(names.TW_HEADERS).to_pylist(), added, strict=True)
    ]
    columns = batch.schema.names[_PAYLOAD_AT:]
    if topic.spec.schema_ is None:
        values = _raw_values(batch, columns)
        headers: list[Headers | None] = list(pairs)
        return Rows(batch.column(names.TW_KEY).to_pylist(), headers, values)
    fields = payload_fields(topic.spec)
    if [(f.name, f.type) for f in fields] != [
        (name, batch.schema.field(name).type) for name in columns
    ]:
        raise Invalid(
            "DeadLetterSchema",
            f"{topic.name} must be a raw topic or have the columns of the one subscribed to",
        )
    arrays = [
        batch.column(names.TW_KEY),
        pa.array(pairs, HEADERS_TYPE),
        *(batch.column(name) for name in columns),
    ]
    schema = pa.schema([(names.TW_KEY, pa.binary()), (names.TW_HEADERS, HEADERS_TYPE), *fields])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _raw_values(batch: pa.RecordBatch, columns: list[str]) -> list[bytes | None]:
    if columns == [names.VALUE] and pa.types.is_binary(batch.schema.field(names.VALUE).type):
        values: list[bytes | None] = batch.column(names.VALUE).to_pylist()
        return values
    return [msgspec.json.encode(row) for row in plain.rows_of(batch, columns)]
