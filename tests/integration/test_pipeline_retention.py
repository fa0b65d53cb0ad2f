"""Retention under traffic: who reads is told of the new start, and never of a row that is gone."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPException
from typing import Any

import pytest

from tidewater_core.errors import Retryable
from tidewater_core.names import TopicName
from tidewater_core.units import Duration
from tidewater_pipeline.jobs import audit, retention
from tidewater_pipeline.report import Outcome
from tidewater_pipeline.session import Session, TopicTable
from tidewater_testing.parts.worker import Worker, topic_manifest
from tidewater_testing.spark import SPARK_MARKS, small_spark
from tidewater_testing.traffic import Load, Traffic

pytestmark = [*SPARK_MARKS]

TOPIC = "shop/live"
SPEC = {
    "partitions": 1,
    "writer": {"flushInterval": "500ms"},
    # Segments go as soon as they are in the table, so that readers need its history.
    "log": {"segmentSize": "64Ki", "retention": {"time": "0s", "size": "0"}},
}


class LaterClock:
    """Three hours ahead: every row that is there is too old."""

    def now_us(self) -> int:
        return int((time.time() + 3 * 3600) * 1_000_000)

    def monotonic(self) -> float:
        return time.monotonic()


class Reader(threading.Thread):
    """Walks from the first kept message to the end, over and over; notes whatever is no stream."""

    def __init__(self, worker: Worker, partition: int) -> None:
        super().__init__(daemon=True)
        self.path = f"/v1/{TOPIC}/messages?partition={partition}&limit=500"
        self.worker, self.partition = worker, partition
        self.halt = threading.Event()
        self.wrong: list[str] = []
        self.rounds = self.expired = 0

    def run(self) -> None:
        while not self.halt.is_set():
            offset: int | None = None
            while not self.halt.is_set():
                at = "" if offset is None else f"&offset={offset}"
                try:
                    answer = self.worker.get(f"{self.path}{at}")
                except (OSError, HTTPException):
                    continue  # the worker ends
                if answer.status == 503:
                    time.sleep(0.05)
                    continue
                page: dict[str, Any] = answer.json()
                if answer.status != 200:
                    if page["error"]["reason"] != "OffsetExpired":
                        self.wrong.append(f"{answer.status} {page}")
                        return
                    self.expired += 1  # it has been passed by: from the new start
                    break
                found = [message["offset"] for message in page["messages"]]
                first = found[0] if offset is None and found else offset
                if first is not None and found != list(range(first, first + len(found))):
                    self.wrong.append(f"G3 One stream: partition {self.partition} at {first}")
                    return
                offset = page["next_offset"]
                if offset >= page["end_offset"]:
                    self.rounds += 1
                    break


@pytest.fixture
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("retention"), [topic_manifest(TOPIC, SPEC)]) as part:
        yield part


@pytest.fixture
def session(worker: Worker) -> Iterator[Session]:
    """Start Spark on the worker's catalog."""
    with small_spark(worker.settings.catalog, lambda: worker.get("/readyz").status == 200) as part:
        yield part


async def test_readers_see_one_stream_while_rows_go(
    worker: Worker, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is cut after the starts were raised and before a file went."""
    table = session.table(TopicName.parse(TOPIC))
    table.load()  # a thread of its own would not find the catalog the first time
    later = replace(session, clock=LaterClock())
    options = retention.RetentionOptions(keep=Duration("1h"))
    readers = [Reader(worker, 0) for _ in range(2)]

    def cut(*_words: object) -> None:
        raise Retryable("Cut", "between the starts and the files")

    async with Traffic(Load(worker.address, TOPIC, senders=2, partitions=1, pause_s=0.05)):
        deadline = time.monotonic() + 60
        while not any((ends := (await asyncio.to_thread(table.load)).frontiers).values()):
            assert time.monotonic() < deadline, (ends, worker.get(f"/v1/{TOPIC}").body)
            await asyncio.sleep(0.5)
        for reader in readers:
            reader.start()
        with monkeypatch.context() as patched:
            patched.setattr(TopicTable, "delete_files", cut)
            with pytest.raises(Retryable, match="Cut"):
                await asyncio.to_thread(retention.run, later, table, options)
        raised = table.load()
        assert min(raised.starts.values()) > 0
        assert raised.size.files > 0, "nothing was removed"
        await asyncio.sleep(3)
        removed = 0
        for _ in range(3):
            done = await asyncio.to_thread(retention.run, later, table, options)
            assert done.outcome in (Outcome.DONE, Outcome.NOTHING), done.to_json()
            removed += done.details["removed_files"]
            await asyncio.sleep(2)
    for reader in readers:
        reader.halt.set()
        await asyncio.to_thread(reader.join, 60)
        assert reader.wrong == []
        assert reader.rounds > 0
    assert removed > 0
    await asyncio.to_thread(worker.flush, TOPIC)
    state = table.load()
    assert all(state.starts[p] >= raised.starts[p] for p in raised.starts), "only upwards"
    sound = await asyncio.to_thread(audit.run, session, table, audit.AuditOptions())
    assert sound.outcome is Outcome.DONE, sound.to_json()
