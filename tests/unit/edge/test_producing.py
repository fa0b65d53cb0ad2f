"""Requests that end half way: what is stored is never said not to be (G8)."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest

from tidewater_coordination.port import Ownership
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import OutcomeUnknown, Retryable, TidewaterError
from tidewater_core.names import TopicName
from tidewater_core.settings import Limits
from tidewater_worker.api.produce import Answer, Producing
from tidewater_worker.cluster.forwarding import Forwarding
from tidewater_worker.log.group import Rows
from tidewater_worker.log.producers import Stored
from tidewater_worker.partition import Partition
from tidewater_worker.topic import Topic, partition_of

PARTITIONS = 3
HERE, THERE, AWAY = range(PARTITIONS)
END = 42


class Owners(Forwarding):
    """The other workers."""

    def __init__(self) -> None:
        super().__init__("a", self.start)
        self.asked: list[str] = []
        self.frontier = {str(THERE): END}
        self.error: TidewaterError | None = None
        self.started: list[Coroutine[Any, Any, None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.started.append(work)

    async def call(self, url: str, *_: Any, **__: Any) -> Any:
        self.asked.append(url)
        if self.error is not None:
            raise self.error
        return {"snapshot_id": 7, "frontier": self.frontier}


class Worker:
    """One that has a partition of a topic; another one's owner is there, a third one's away."""

    def __init__(self, folder: Path) -> None:
        self.owners, self.is_committed, self.offered = Owners(), True, 0
        limits = Limits()
        node: Any = SimpleNamespace(
            settings=SimpleNamespace(limits=limits), forwarding=self.owners,
            wait_committed=self._wait_committed,
        )  # fmt: skip
        self.producing = Producing(node)
        parts = {number: Partition("a/b", number, folder) for number in range(PARTITIONS)}
        for number, url in ((THERE, "http://b"), (AWAY, "")):
            parts[number].is_elsewhere = True
            parts[number].owner = Ownership(number, "w", 1, is_live=bool(url), url=url)
            parts[number].refusal = Retryable("OwnerAway", "its owner is away", 2_000)
        spec = TopicSpec(partitions=PARTITIONS)
        name = TopicName("a", "b")
        self.topic = Topic(name, UUID(int=1), spec, "{}", parts, is_spread=True)

    async def _wait_committed(self, *_: Any) -> bool:
        return self.is_committed

    async def in_table(self, *numbers: int) -> int | None:
        answer = Answer(len(numbers), lambda _: None)
        for number in numbers:
            answer.one(number, Stored(END - 1, 1))
        return await self.producing.in_table(self.topic, answer, 1_000)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


async def test_ack_table_asks_those_who_have_the_messages_and_nobody_else(worker: Worker) -> None:
    assert await worker.in_table(THERE) == 7
    assert worker.owners.asked == ["http://b"]


@pytest.mark.parametrize(
    "error", [Retryable("OwnerUnreachable", "m"), Retryable("FlushTimeout", "m")]
)
async def test_ack_table_of_an_owner_that_does_not_say_it(
    worker: Worker, error: TidewaterError
) -> None:
    worker.owners.error = error
    with pytest.raises(OutcomeUnknown, match=f"NotInTableYet.*{error.reason}"):
        await worker.in_table(THERE)


async def test_ack_table_of_an_owner_that_has_it_no_more(worker: Worker) -> None:
    worker.owners.frontier = {}
    with pytest.raises(OutcomeUnknown, match="NotInTableYet"):
        await worker.in_table(THERE)


async def test_ack_table_of_an_owner_that_went_away(worker: Worker) -> None:
    with pytest.raises(OutcomeUnknown, match=r"NotInTableYet.*OwnerAway"):
        await worker.in_table(AWAY)


async def test_ack_table_of_an_owner_that_answers_nonsense(worker: Worker) -> None:
    """Whoever waits for it, and all behind it on the connection, must get an answer."""
    worker.owners.frontier = None  # type: ignore[assignment]
    with pytest.raises(OutcomeUnknown, match=r"NotInTableYet.*fault of the worker"):
        await worker.in_table(THERE)


async def test_ack_table_that_takes_too_long(worker: Worker) -> None:
    worker.is_committed = False
    with pytest.raises(OutcomeUnknown, match="NotInTableYet") as raised:
        await worker.in_table(HERE)
    assert msgspec.json.decode(msgspec.json.encode(raised.value.to_body()))["error"]["kind"] == (
        "OutcomeUnknown"
    )


def keyed(*numbers: int) -> Rows:
    """Return a message for each of these partitions."""
    keys: list[bytes | None] = [
        next(key for i in range(99) if partition_of(key := b"%d" % i, PARTITIONS) == number)
        for number in numbers
    ]
    return Rows(keys, [None] * len(keys), [b"v"] * len(keys))


def test_no_part_is_sent_while_an_owner_of_another_is_away(worker: Worker) -> None:
    with pytest.raises(Retryable, match="OwnerAway"):
        worker.producing.submit(
            worker.topic, keyed(THERE, AWAY), 1, None, None, lambda _: pytest.fail("answered")
        )
    assert not worker.owners.started


async def test_an_owner_that_goes_away_after_the_first_part_was_sent(worker: Worker) -> None:
    """One part is stored, the other is not: the request is neither."""
    lost = worker.topic.partitions[AWAY]
    assert lost.owner is not None
    lost.owner = msgspec.structs.replace(lost.owner, is_live=True, url="http://c")
    answers: list[Answer] = []
    payload = keyed(THERE, AWAY)
    worker.producing.submit(worker.topic, payload, 1, None, None, answers.append)
    lost.owner = None

    async def store(*_: Any) -> Any:
        ack = {"partition": THERE, "offset": 3, "count": 1}

        async def read() -> bytes:
            return msgspec.json.encode({"acks": [ack]})

        return SimpleNamespace(status=200, read=read)

    worker.owners.peers = SimpleNamespace(request=store)  # type: ignore[assignment]
    await asyncio.gather(*worker.owners.started)
    (answer,) = answers
    assert isinstance(answer.error, OutcomeUnknown), answer.error
    assert answer.error.reason == "PartlyStored"


@pytest.mark.parametrize("first", [0, 1])
def test_a_part_without_an_answer_outweighs_one_that_was_refused(first: int) -> None:
    errors = [OutcomeUnknown("OwnerSilent", "m"), Retryable("OwnerAway", "m")]
    answer = Answer(2, lambda _: None)
    answer.one(0, errors[first])
    answer.one(1, errors[1 - first])
    assert isinstance(answer.error, OutcomeUnknown)
