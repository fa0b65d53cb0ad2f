"""Batches that form by themselves: messages posted about the same time share a request.

Messages are gathered per partition, and a partition has one request under way: its messages keep
their order, retries included. While that is under way the next batch grows, so batches are large
exactly when there is much to send, and a lone message waits for `linger_s` at most.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidewater.background import LoopThread
from tidewater.errors import (
    PASSING,
    Conflict,
    Invalid,
    OutcomeUnknown,
    Retryable,
    TidewaterError,
)
from tidewater.origin import Origin
from tidewater.wire import Ack, Message, Produced
from tidewater_core.names import TopicName

if TYPE_CHECKING:
    from tidewater.producer_async import AsyncProducer

MESSAGE_BYTES: Final = 64
"""What a message takes besides its key and value."""
Done = Callable[[Ack | TidewaterError], None]
log = logging.getLogger("tidewater.producer")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How batches form."""

    linger_s: float = 0.002
    """How long a message waits for others."""
    rows_max: int = 1_000
    """Messages of a batch."""
    bytes_max: int = 1024 * 1024
    """About how many bytes a batch has."""
    pending_bytes_max: int = 32 * 1024 * 1024
    """What may wait to be stored; past it, posting waits."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.linger_s < 0 or min(self.rows_max, self.bytes_max, self.pending_bytes_max) < 1:
            raise Invalid("BadOptions", "linger_s is 0 or more, the rest 1 or more")


class _Group:
    """What waits for one partition."""

    def __init__(self, before: "list[tuple[_Group, int]]") -> None:
        self.before = before
        """What is sent first: groups as they were made before, each up to so many messages."""
        self.waiting: deque[tuple[Message, int, Done]] = deque()
        self.nbytes = 0
        self.added = self.settled = 0
        """Messages so far, and those of them that are answered: the oldest ones."""
        self.moved = asyncio.Event()
        self.full = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def settle(self, count: int) -> None:
        """Count messages that have their answer."""
        self.settled += count
        self.moved.set()

    async def begun(self) -> None:
        """Wait until all that comes before it is answered."""
        for group, added in self.before:
            await group.reach(added)
        self.before = []

    async def reach(self, count: int) -> None:
        """Wait until so many messages are answered, however many come behind them."""
        while self.settled < count:
            self.moved.clear()
            await self.moved.wait()


class Batches:
    """Gathers messages of one producer, in its event loop."""

    def __init__(self, producer: "AsyncProducer", options: BatchOptions) -> None:
        """Begin with nothing to send."""
        self._producer = producer
        self._options = options
        self._groups: dict[int | None, _Group] = {}
        self._partitions = 0
        """How many the topic had when these groups were made."""
        self._before: list[tuple[_Group, int]] = []
        """What may wait in groups that were made for another number of partitions."""
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._hurry = False
        self._has_asked = False
        self._failed: TidewaterError | None = None

    async def room(self) -> None:
        """Wait while too much waits to be stored; the first time, learn the partitions."""
        if not self._has_asked:
            self._has_asked = True
            with contextlib.suppress(*PASSING):  # the worker is away: sending waits for it
                await self._producer.know_partitions()
        while not self._room.is_set():
            await self._room.wait()

    def add(self, message: Message, done: Done) -> None:
        """Take a message; `done` is called once, later."""
        nbytes = _weight(message)
        if self._producer.partitions != self._partitions:
            self._regroup()
        number = self._producer.group_of(message.key)
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group(self._before)
        group.waiting.append((message, nbytes, done))
        group.nbytes += nbytes
        group.added += 1
        self._bytes += nbytes
        if self._bytes >= self._options.pending_bytes_max:
            self._room.clear()
        if self._is_full(group):
            group.full.set()
        self._begin(group)

    def _regroup(self) -> None:
        """Have keys that have another group from here on wait for what is in the one before."""
        self._partitions = self._producer.partitions
        self._before = self._unanswered()
        self._groups = {}

    def _unanswered(self) -> list[tuple[_Group, int]]:
        groups = [*(group for group, _ in self._before), *self._groups.values()]
        return [(group, group.added) for group in groups if group.settled < group.added]

    def _begin(self, group: _Group) -> None:
        if group.task is None:
            group.task = asyncio.ensure_future(self._run(group))

    async def flush(self) -> None:
        """Send what is there without waiting for more; raise the first error since the last.

        What others post meanwhile is not waited for: they may never stop.
        """
        there = self._unanswered()
        self._hurry = True
        for group, _ in there:
            group.full.set()
            if group.waiting:
                self._begin(group)
        try:
            for group, added in there:
                await group.reach(added)
        finally:
            self._hurry = False
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    async def close(self) -> None:
        """Flush; whatever is posted after is not sent."""
        await self.flush()

    def _is_full(self, group: _Group) -> bool:
        options = self._options
        return len(group.waiting) >= options.rows_max or group.nbytes >= options.bytes_max

    async def _run(self, group: _Group) -> None:
        """Send what waits for a partition, until nothing does; then the next message begins it."""
        is_cut_short = False
        try:
            await self._send_all(group)
        except Exception:
            is_cut_short = bool(group.waiting)
            raise
        finally:
            # Also by a fault: whoever posts or flushes next must not wait for a task that is gone,
            # nor what waits already for the next post.
            group.task = None
            if is_cut_short:
                self._begin(group)

    async def _send_all(self, group: _Group) -> None:
        """Send what waits for a partition, one request after the other."""
        await group.begun()
        linger_s = self._options.linger_s
        while group.waiting:
            if linger_s and not self._hurry and not self._is_full(group):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(linger_s):
                        await group.full.wait()
            group.full.clear()
            # The next ones have waited while these were under way.
            linger_s = 0.0
            taken: list[tuple[Message, int, Done]] = []
            nbytes = 0
            while group.waiting and len(taken) < self._options.rows_max:
                if taken and nbytes + group.waiting[0][1] > self._options.bytes_max:
                    break
                taken.append(group.waiting.popleft())
                nbytes += taken[-1][1]
            group.nbytes -= nbytes
            try:
                await self._send(taken)
            finally:
                group.settle(len(taken))
                self._bytes -= nbytes
                if self._bytes < self._options.pending_bytes_max:
                    self._room.set()

    async def _send(self, taken: list[tuple[Message, int, Done]]) -> None:
        """Send a batch; if one of its messages is refused, only that one fails."""
        try:
            produced = await self._producer.send_group([message for message, _, _ in taken])
            acks = self._acks([message for message, _, _ in taken], produced)
        except TidewaterError as error:
            if len(taken) > 1 and isinstance(error, Invalid) and not isinstance(error, Conflict):
                await self._send_halves(taken)
                return
            self._refuse(taken, error)
            return
        except BaseException as fault:
            self._refuse(taken, OutcomeUnknown("Internal", f"a fault of the client: {fault!r}"))
            raise
        for (_, _, done), ack in zip(taken, acks, strict=True):
            done(ack)

    async def _send_halves(self, taken: list[tuple[Message, int, Done]]) -> None:
        """Send the halves of what was refused as a whole."""
        half = len(taken) // 2
        try:
            await self._send(taken[:half])
        except BaseException as fault:
            # Nothing of the whole was stored, and this half was not sent again.
            self._refuse(taken[half:], Retryable("NotSent", f"a fault of the client: {fault!r}"))
            raise
        await self._send(taken[half:])

    def _refuse(self, taken: list[tuple[Message, int, Done]], error: TidewaterError) -> None:
        if self._failed is None:
            self._failed = error
        for _, _, done in taken:
            done(error)

    def _acks(self, messages: list[Message], produced: Produced) -> list[Ack]:
        """Return where each message is. One partition is the rule; more, if the topic has grown."""
        if len(produced.acks) == 1:
            (ack,) = produced.acks
            return [
                Ack(ack.partition, ack.offset + i, 1, ack.duplicate) for i in range(len(messages))
            ]
        following = {ack.partition: ack for ack in produced.acks}
        found = []
        for message in messages:
            number = self._producer.group_of(message.key)
            ack = following.get(-1 if number is None else number, produced.acks[0])
            found.append(Ack(ack.partition, ack.offset, 1, ack.duplicate))
            following[ack.partition] = Ack(ack.partition, ack.offset + 1, ack.count, ack.duplicate)
        return found


class Posting:
    """Batches for threads: an event loop of its own sends, `post` may be called from anywhere."""

    def __init__(self, origin: Origin, topic: TopicName, options: dict[str, Any]) -> None:
        """Start the thread."""
        self._options = options.pop("batching", None) or BatchOptions()
        self._inbox: deque[tuple[Message, int, Future[Ack]]] = deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._is_woken = False
        self._is_closed = False
        self._thread = LoopThread("tidewater-producer")
        try:
            self._producer, self._batches = self._thread.call(self._start(origin, topic, options))
        except BaseException:
            self._thread.close()
            raise

    async def _start(
        self, origin: Origin, topic: TopicName, options: dict[str, Any]
    ) -> "tuple[AsyncProducer, Batches]":
        from tidewater.producer_async import AsyncProducer

        producer = AsyncProducer(origin, topic, **options)
        batches = Batches(producer, self._options)
        try:
            await batches.room()
        except TidewaterError:
            await producer.close()
            raise
        return producer, batches

    def post(self, message: Message) -> "Future[Ack]":
        """Take a message; blocks while too much waits."""
        future: Future[Ack] = Future()
        nbytes = _weight(message)
        with self._changed:
            while self._bytes >= self._options.pending_bytes_max and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                raise Invalid("Closed", "the producer is closed")
            self._bytes += nbytes
            self._inbox.append((message, nbytes, future))
            if not self._is_woken:
                # Under the lock: a flush of another thread that has seen this message posted comes
                # to the loop behind it, as does the end of the loop.
                self._is_woken = True
                self._thread.loop.call_soon_threadsafe(self._take)
        return future

    def _take(self) -> None:
        with self._changed:
            taken, self._is_woken = list(self._inbox), False
            self._inbox.clear()
        for message, nbytes, future in taken:
            # From here on it cannot be cancelled: it may be on its way.
            if not future.set_running_or_notify_cancel():
                self._let_go(nbytes)
                continue
            done = self._done(nbytes, future)
            try:
                self._batches.add(message, done)
            except Exception as fault:
                log.exception("a message cannot be sent")  # those behind it are, all the same
                done(Invalid("BadMessage", f"cannot be sent: {fault!r}"))

    def _let_go(self, nbytes: int) -> None:
        with self._changed:
            self._bytes -= nbytes
            self._changed.notify_all()

    def _done(self, nbytes: int, future: "Future[Ack]") -> Done:
        def done(result: Ack | TidewaterError) -> None:
            self._let_go(nbytes)
            if isinstance(result, Ack):
                future.set_result(result)
            else:
                future.set_exception(result)

        return done

    def flush(self) -> None:
        """Wait until everything posted so far is stored."""
        self._thread.call(self._batches.flush())

    def close(self) -> None:
        """Flush, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        try:
            self._thread.call(self._batches.flush())
        finally:
            self._thread.call(self._producer.close())
            self._thread.close()


def _weight(message: Message) -> int:
    """Return about how many bytes a message has; refuse a key that has no partition."""
    key: object = message.key
    if key is not None and not isinstance(key, (bytes, str)):
        raise Invalid("InvalidKey", f"a key is bytes or text, not {type(key).__name__}")
    if isinstance(key, str) and not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise Invalid("InvalidKey", f"a key that is no text: {error}") from None
    return MESSAGE_BYTES + _size(key) + _size(message.value)


def _size(data: object) -> int:
    return len(data) if isinstance(data, (bytes, str)) else 0 if data is None else 256
