"""Batches of threads: futures that are cancelled, faults, and messages of several threads."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from tidewater.batching import Batches, BatchOptions, Posting
from tidewater.origin import Origin
from tidewater.producer_async import AsyncProducer
from tidewater.wire import Ack, Message, Produced
from tidewater_core.errors import Invalid, OutcomeUnknown, Retryable
from tidewater_core.names import TopicName

WAIT_S = 20.0
A_WHILE_S = 0.3
PAUSE_S = 0.01


class Worker:
    """Stores what it is sent, as soon as it may."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.faults: list[Exception] = []
        self.takes_s = 0.0
        self.while_it_takes: Callable[[], object] | None = None

    async def send(self, messages: list[Message]) -> Produced:
        if self.faults:
            raise self.faults.pop(0)
        self.sent += messages
        if self.while_it_takes is not None:
            self.while_it_takes()
        await asyncio.sleep(self.takes_s)
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        return Produced([Ack(0, 0, len(messages))])


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()

    async def know_partitions(_: AsyncProducer) -> None:
        pass

    async def send_group(_: AsyncProducer, messages: list[Message]) -> Produced:
        return await worker.send(messages)

    monkeypatch.setattr(AsyncProducer, "know_partitions", know_partitions)
    monkeypatch.setattr(AsyncProducer, "send_group", send_group)
    return worker


@pytest.fixture
def posting(worker: Worker) -> Iterator[Posting]:
    options = {"batching": BatchOptions(linger_s=0.001)}
    posting = Posting(Origin("127.0.0.1", 1), TopicName("a", "b"), options)
    yield posting
    worker.may_answer.set()
    in_time(posting.close)


def in_time(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), f"{work} hangs"


def test_a_message_on_its_way_cannot_be_cancelled(worker: Worker, posting: Posting) -> None:
    worker.may_answer.clear()
    first, second = posting.post(Message(b"1")), posting.post(Message(b"2"))
    while not worker.sent:
        threading.Event().wait(0.01)
    assert not first.cancel()
    worker.may_answer.set()
    assert [first.result(WAIT_S), second.result(WAIT_S)]
    assert posting.post(Message(b"3")).result(WAIT_S)


def test_a_message_that_is_cancelled_in_time_is_not_sent(worker: Worker, posting: Posting) -> None:
    may_take = threading.Event()
    posting._thread.loop.call_soon_threadsafe(may_take.wait, WAIT_S)
    first, second = posting.post(Message(b"1")), posting.post(Message(b"2"))
    assert first.cancel()
    may_take.set()
    second.result(WAIT_S)
    in_time(posting.flush)
    assert [message.value for message in worker.sent] == [b"2"]
    assert posting._bytes == 0
    with pytest.raises(CancelledError):
        first.result(0)


def test_a_fault_does_not_end_a_partition(worker: Worker, posting: Posting) -> None:
    loop = posting._thread.loop
    loop.call_soon_threadsafe(loop.set_exception_handler, lambda *_: None)
    worker.faults = [ValueError("a fault")]
    with pytest.raises(OutcomeUnknown, match="a fault"):
        posting.post(Message(b"1")).result(WAIT_S)
    assert posting.post(Message(b"2")).result(WAIT_S)
    with pytest.raises(OutcomeUnknown, match="a fault"):
        posting.flush()


def test_what_waits_behind_a_fault_is_sent(worker: Worker, posting: Posting) -> None:
    loop, may_take = posting._thread.loop, threading.Event()
    loop.call_soon_threadsafe(loop.set_exception_handler, lambda *_: None)
    loop.call_soon_threadsafe(may_take.wait, WAIT_S)
    worker.faults = [ValueError("a fault")]
    sent = [posting.post(Message(b"%d" % i)) for i in range(BatchOptions().rows_max + 1)]
    may_take.set()
    assert isinstance(sent[0].exception(WAIT_S), OutcomeUnknown)
    assert sent[-1].result(WAIT_S), "nobody posts or flushes again"
    with pytest.raises(OutcomeUnknown, match="a fault"):
        posting.flush()


def test_a_key_of_another_type_is_refused_at_once(posting: Posting) -> None:
    good = posting.post(Message(b"1"))
    with pytest.raises(Invalid, match="InvalidKey: a key is bytes or text, not int"):
        posting.post(Message(b"2", key=7))  # type: ignore[arg-type]
    assert good.result(WAIT_S)
    in_time(posting.flush)
    assert posting._bytes == 0


def test_a_key_that_is_no_text_is_refused_at_once(posting: Posting) -> None:
    with pytest.raises(Invalid, match="InvalidKey: a key that is no text"):
        posting.post(Message(b"1", key="\ud800"))
    assert posting.post(Message(b"2", key="\u00e9")).result(WAIT_S)


def test_a_message_that_cannot_be_sent_takes_none_behind_it_along(
    worker: Worker, posting: Posting, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_of = AsyncProducer.group_of

    def picky(self: AsyncProducer, key: bytes | str | None) -> int | None:
        if key == b"bad":
            raise ValueError("no partition")
        return group_of(self, key)

    monkeypatch.setattr(AsyncProducer, "group_of", picky)
    may_take = threading.Event()
    posting._thread.loop.call_soon_threadsafe(may_take.wait, WAIT_S)
    bad, good = posting.post(Message(b"1", key=b"bad")), posting.post(Message(b"2"))
    may_take.set()
    with pytest.raises(Invalid, match="no partition"):
        bad.result(WAIT_S)
    assert good.result(WAIT_S)
    in_time(posting.flush)
    assert posting._bytes == 0


def test_a_fault_in_one_half_of_a_batch_answers_the_other(worker: Worker, posting: Posting) -> None:
    loop = posting._thread.loop
    loop.call_soon_threadsafe(loop.set_exception_handler, lambda *_: None)
    may_take = threading.Event()
    loop.call_soon_threadsafe(may_take.wait, WAIT_S)
    worker.faults = [Invalid("MessageTooLarge", "one of them"), ValueError("a fault")]
    sent = [posting.post(Message(b"%d" % i)) for i in range(4)]
    may_take.set()
    kinds = [type(each.exception(WAIT_S)) for each in sent]
    assert kinds == [OutcomeUnknown, OutcomeUnknown, Retryable, Retryable]
    assert posting.post(Message(b"2")).result(WAIT_S)
    with pytest.raises(OutcomeUnknown):
        posting.flush()


def test_a_flush_waits_for_what_was_posted_while_another_thread_woke_the_loop(
    posting: Posting, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, waking = posting._thread.loop, threading.Event()
    wake = loop.call_soon_threadsafe

    def slowly(callback: Any, *args: Any, **named: Any) -> Any:
        if callback == posting._take and not waking.is_set():
            waking.set()
            threading.Event().wait(A_WHILE_S)
        return wake(callback, *args, **named)

    monkeypatch.setattr(loop, "call_soon_threadsafe", slowly)
    other = threading.Thread(target=posting.post, args=[Message(b"1")], daemon=True)
    other.start()
    assert waking.wait(WAIT_S)
    mine = posting.post(Message(b"2"))
    in_time(posting.flush)
    assert mine.done()
    other.join(WAIT_S)


@pytest.mark.parametrize("key", [None, b"of another partition"])
def test_a_flush_waits_for_nothing_that_is_posted_after(
    worker: Worker, posting: Posting, monkeypatch: pytest.MonkeyPatch, key: bytes | None
) -> None:
    monkeypatch.setattr(AsyncProducer, "group_of", lambda _, key: 0 if key is None else 1)
    worker.takes_s = PAUSE_S
    worker.while_it_takes = lambda: posting.post(Message(b"another's", key))
    posting.post(Message(b"another's", key))
    mine = posting.post(Message(b"mine"))
    try:
        in_time(posting.flush)
        assert mine.done()
    finally:
        worker.while_it_takes = None


def test_a_flush_waits_for_all_that_was_posted_before(worker: Worker, posting: Posting) -> None:
    worker.takes_s = PAUSE_S
    sent = [posting.post(Message(b"%d" % i)) for i in range(3 * BatchOptions().rows_max)]
    in_time(posting.flush)
    assert all(each.done() for each in sent)


async def test_who_waits_for_room_when_the_producer_is_closed_is_told(worker: Worker) -> None:
    options = BatchOptions(pending_bytes_max=1)
    producer = AsyncProducer(Origin("127.0.0.1", 1), TopicName("a", "b"), batching=options)
    worker.may_answer.clear()
    first = await producer.post(b"1")
    behind = asyncio.create_task(producer.post(b"2"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    worker.may_answer.set()
    await closing
    assert first.done()
    with pytest.raises(Invalid, match="the producer is closed"):
        await behind
    assert [message.value for message in worker.sent] == [b"1"]


async def test_a_key_keeps_its_order_when_the_partitions_become_known() -> None:
    """As when the worker was away at first: what was posted before waits in a group for all."""

    class Topic:
        partitions = 0

        def __init__(self) -> None:
            self.sent: list[Message] = []
            self.is_there = asyncio.Event()

        def group_of(self, key: str) -> int | None:
            return hash(key) % self.partitions if self.partitions else None

        async def send_group(self, messages: list[Message]) -> Produced:
            await self.is_there.wait()
            self.sent += messages
            await asyncio.sleep(0.001)
            return Produced([Ack(0, 0, len(messages))])

    topic: Any = Topic()
    batches = Batches(topic, BatchOptions(linger_s=0, rows_max=2))
    batches._has_asked = True
    keys = ["a", "b", "c"]
    for n in range(60):
        batches.add(Message(n, keys[n % 3]), lambda _: None)
        if n in (30, 40):
            await asyncio.sleep(0)
            topic.partitions += 3
        if n == 50:
            topic.is_there.set()
    async with asyncio.timeout(WAIT_S):
        await batches.flush()
    assert len(topic.sent) == 60
    for key in keys:
        values = [message.value for message in topic.sent if message.key == key]
        assert values == sorted(values), "messages of one key keep their order"
