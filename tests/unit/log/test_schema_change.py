"""A topic's schema changes while messages come: each is stored in the schema it was decoded for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidewater_core.clock import SystemClock
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.settings import Limits
from tidewater_testing import logs, wal
from tidewater_worker.api.decode import TopicDecoder
from tidewater_worker.log.appender import Appender, LogOptions
from tidewater_worker.log.durable import forget_durable
from tidewater_worker.log.group import Submission
from tidewater_worker.log.reader import LogReader
from tidewater_worker.log.segment import SegmentWriter
from tidewater_worker.log.syncpool import SyncPool


def spec(*columns: str) -> TopicSpec:
    fields = [{"name": name, "type": "string"} for name in columns]
    return TopicSpec.model_validate({"schema": {"fields": fields}})


BEFORE, AFTER, TURNED = spec("a", "b"), spec("a", "b", "c"), spec("b", "a")


def options(of: TopicSpec) -> LogOptions:
    return LogOptions.of(of, 10**8, 10**8)


def message(of: TopicSpec, **value: str) -> Submission:
    """Decode a message as the edge does."""
    body = msgspec.json.encode({"messages": [{"value": value}]})
    payload = TopicDecoder.of(of, Limits()).decode("application/json", {}, body)
    return Submission(payload, 100, lambda _: None)


class Clock(SystemClock):
    """The real clock, put forward."""

    ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.ahead_us


@pytest.fixture
async def pool() -> AsyncIterator[SyncPool]:
    made = SyncPool(asyncio.get_running_loop(), threads=1)
    yield made
    made.close()


def open_log(
    directory: Path, pool: SyncPool, of: TopicSpec, clock: SystemClock | None = None
) -> Appender:
    return Appender(
        directory, logs.TOPIC_UUID, logs.PARTITION, options(of), logs.reopen(directory), pool,
        asyncio.get_running_loop(), clock or SystemClock(), lambda _: None,
    )  # fmt: skip


def read(directory: Path, end: int) -> list[dict[str, str | None]]:
    """Return the columns of all messages by two readers that share nothing."""
    names = ("a", "b", "c")
    batches = [found.batch for found in LogReader(directory).read(0, end, 10**9)]
    again = [frame.batch for segment in wal.read_log(directory) for frame in segment.frames]
    rows = [[row for batch in each for row in batch.to_pylist()] for each in (batches, again)]
    assert rows[0] == rows[1]
    return [{name: row[name] for name in names if name in row} for row in rows[0]]


class Gate:
    """Holds up a call of the sync thread."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def before(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(10)
            return real(*args, **kwargs)

        return call


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.mark.parametrize("moment", ["waiting", "create", "append", "sync"])
@pytest.mark.parametrize("later", [AFTER, TURNED])
async def test_a_change_at_any_moment_loses_nothing(
    tmp_path: Path, pool: SyncPool, gate: Gate, monkeypatch: pytest.MonkeyPatch,
    moment: str, later: TopicSpec,
) -> None:  # fmt: skip
    log = open_log(tmp_path, pool, BEFORE)
    first = asyncio.create_task(logs.offer(log, message(BEFORE, a="one", b="1")))
    if moment == "waiting":
        await asyncio.sleep(0)  # offered, not taken
        gate.opened.set()
    else:
        monkeypatch.setattr(SegmentWriter, moment, gate.before(getattr(SegmentWriter, moment)))
        await asyncio.to_thread(gate.reached.wait, 10)
    log.change(options(later))  # as the registry says, at a time of its own
    rest = [
        message(later, a="two", b="2"),
        message(BEFORE, a="three", b="3"),  # decoded before, offered after
        message(later, a="four", b="4"),
    ]
    waiting = [asyncio.create_task(logs.offer(log, each)) for each in rest]
    await asyncio.sleep(0)
    gate.opened.set()
    stored = await asyncio.gather(first, *waiting)
    assert [each.offset for each in stored] == [0, 1, 2, 3]
    await log.close()
    found = read(tmp_path, 4)
    assert [(row["a"], row["b"]) for row in found] == [
        ("one", "1"), ("two", "2"), ("three", "3"), ("four", "4"),
    ], "G1 Durable: an acknowledged message cannot be read"  # fmt: skip
    assert ["c" in row for row in found] == [False, later is AFTER, False, later is AFTER]
    assert logs.reopen(tmp_path).next_offset == 4


async def test_batches_that_differ_in_what_is_required_share_a_group(
    tmp_path: Path, pool: SyncPool
) -> None:
    required = TopicSpec.model_validate(
        {"schema": {"fields": [{"name": "a", "type": "string", "required": True}]}}
    )
    optional = spec("a")
    log = open_log(tmp_path, pool, required)
    sent = [message(of, a=value) for value, of in (("one", required), ("two", optional))]
    log.change(options(optional))
    stored = await asyncio.gather(*(logs.offer(log, each) for each in sent))
    assert [each.offset for each in stored] == [0, 1]
    await log.close()
    assert [row["a"] for row in read(tmp_path, 2)] == ["one", "two"]


async def test_another_schema_begins_a_segment_once(tmp_path: Path, pool: SyncPool) -> None:
    log = open_log(tmp_path, pool, BEFORE)
    await logs.offer(log, message(BEFORE, a="one"))
    log.change(options(AFTER))
    for value in ("two", "three"):
        await logs.offer(log, message(AFTER, a=value, c="c"))
    log.change(replace(options(AFTER), tail_bytes=1))
    await logs.offer(log, message(AFTER, a="four"))
    await log.close()
    log = open_log(tmp_path, pool, AFTER)
    await logs.offer(log, message(AFTER, a="five"))
    await log.close()
    ends = [(each.header.base_offset, each.end_offset) for each in wal.read_log(tmp_path)]
    assert ends == [(0, 1), (1, 5)], "the same schema again is no other"
    assert [row["a"] for row in read(tmp_path, 5)] == ["one", "two", "three", "four", "five"]


async def test_a_segment_without_messages_gives_way_to_another_schema(
    tmp_path: Path, pool: SyncPool
) -> None:
    log = open_log(tmp_path, pool, BEFORE)
    await logs.offer(log, message(BEFORE, a="one"))
    await log.close()
    data = (tmp_path / f"{0:020d}.wal").read_bytes()
    header = wal.decode_header(data, "")
    (tmp_path / f"{0:020d}.wal").write_bytes(data[: header.size])  # a crash before its first frame
    forget_durable(tmp_path / f"{0:020d}.wal")
    log = open_log(tmp_path, pool, AFTER)
    assert (await logs.offer(log, message(AFTER, a="two", c="x"))).offset == 0
    await log.close()
    assert read(tmp_path, 1) == [{"a": "two", "b": None, "c": "x"}]


async def test_a_segment_is_old_by_its_first_message_also_after_a_restart(
    tmp_path: Path, pool: SyncPool
) -> None:
    clock = Clock()
    log = open_log(tmp_path, pool, BEFORE, clock)
    age_us = log.options.segment_age_us
    assert age_us >= 3_600_000_000
    await logs.offer(log, message(BEFORE, a="one"))
    clock.ahead_us += age_us // 2
    await logs.offer(log, message(BEFORE, a="two"))
    assert len(log.segments) == 1
    clock.ahead_us += age_us // 2 + 1_000_000
    await logs.offer(log, message(BEFORE, a="three"))
    assert [each.base_offset for each in log.segments] == [0, 2], "older than segmentAge"
    await log.close()
    clock.ahead_us += age_us // 2
    log = open_log(tmp_path, pool, BEFORE, clock)
    clock.ahead_us += age_us // 2 - 60_000_000
    await logs.offer(log, message(BEFORE, a="four"))
    assert len(log.segments) == 2
    clock.ahead_us += 120_000_000
    await logs.offer(log, message(BEFORE, a="five"))
    assert [each.base_offset for each in log.segments] == [0, 2, 4], "a restart makes none young"
    await log.close()
    assert [row["a"] for row in read(tmp_path, 5)] == ["one", "two", "three", "four", "five"]
