"""Real log directories for tests, written by the worker's own appender and read back two ways."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import pyarrow as pa

from tidewater_core import names
from tidewater_core.clock import SystemClock
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import TidewaterError
from tidewater_testing.evidence import Row, read_log_side
from tidewater_worker.log.appender import Appender, LogOptions
from tidewater_worker.log.group import Rows, Submission
from tidewater_worker.log.producers import Request, Stored
from tidewater_worker.log.reader import LogReader
from tidewater_worker.log.recover import Recovered, recover
from tidewater_worker.log.syncpool import SyncPool
from tidewater_worker.schema import HEADERS_TYPE

TOPIC_UUID = UUID("7c1d3a52-6f0e-4f6b-9a55-0d7d5d6c0001")
PARTITION = 3
INFLIGHT_BYTES_MAX = 64 * 1024 * 1024
READ_BYTES_MAX = 64 * 1024 * 1024

Batch = Sequence[bytes]
"""The payloads of one request; each becomes one frame when sent alone."""


def log_options(segment_bytes: int) -> LogOptions:
    """Return the options of a raw topic whose log rotates at `segment_bytes`."""
    options = LogOptions.of(TopicSpec(), INFLIGHT_BYTES_MAX, INFLIGHT_BYTES_MAX)
    # Smaller than a Topic may ask for, so that a test of every byte has few bytes.
    return replace(options, segment_bytes=segment_bytes)


def reopen(directory: Path) -> Recovered:
    """Recover the log as a worker does when it starts; repairs it, or raises `Corrupt`."""
    return recover(directory, TOPIC_UUID, PARTITION)


@dataclass(frozen=True)
class Acked:
    """A request that the log has acknowledged."""

    number: int
    """Its place among the requests, and its sequence."""
    offset: int


def append(
    directory: Path,
    batches: Sequence[Batch],
    *,
    segment_bytes: int = 64 * 1024 * 1024,
    producer: str = "",
    together: int = 1,
    mixed: bool = False,
    acked: list[Acked] | None = None,
) -> list[int]:
    """Recover the log, append batches, close; return their first offsets.

    Each batch is a group of its own, or `together` of them are one: one frame, or several if they
    are `mixed` (every second one comes as an Arrow batch). `acked` is filled as it goes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    recovered = reopen(directory)
    found = [] if acked is None else acked
    submissions = [
        make_submission(number, batch, producer, as_arrow=mixed and number % 2 == 1)
        for number, batch in enumerate(batches)
    ]
    asyncio.run(_append(directory, recovered, submissions, segment_bytes, together, found))
    return [each.offset for each in sorted(found, key=lambda each: each.number)]


def make_submission(
    number: int, payloads: Batch, producer: str = "", *, as_arrow: bool = False
) -> Submission:
    """Make a request of the log, with `number` as its sequence if it has a producer."""
    count = len(payloads)
    rows: Rows | pa.RecordBatch = Rows([None] * count, [None] * count, list(payloads))
    if as_arrow:
        columns = {
            names.TW_KEY: pa.nulls(count, pa.binary()),
            names.TW_HEADERS: pa.nulls(count, HEADERS_TYPE),
            names.VALUE: pa.array(payloads, pa.binary()),
        }
        rows = pa.RecordBatch.from_pydict(columns)
    request = Request(producer, number) if producer else None
    return Submission(rows, sum(len(p) for p in payloads), lambda _result: None, request)


async def _append(
    directory: Path,
    recovered: Recovered,
    submissions: Sequence[Submission],
    segment_bytes: int,
    together: int,
    acked: list[Acked],
) -> None:
    async with appending(directory, recovered, segment_bytes) as appender:

        async def offer_one(number: int) -> None:
            stored = await offer(appender, submissions[number])
            acked.append(Acked(number, stored.offset))

        for first in range(0, len(submissions), together):
            last = min(first + together, len(submissions))
            await asyncio.gather(*(offer_one(number) for number in range(first, last)))
        await appender.close()


@asynccontextmanager
async def appending(
    directory: Path, recovered: Recovered, segment_bytes: int
) -> AsyncIterator[Appender]:
    """Give the worker's own appender on a recovered log; closing it is the caller's."""
    loop = asyncio.get_running_loop()
    pool = SyncPool(loop, threads=1)
    try:
        yield Appender(
            directory,
            TOPIC_UUID,
            PARTITION,
            log_options(segment_bytes),
            recovered,
            pool,
            loop,
            SystemClock(),
            lambda _end: None,
        )
    finally:
        pool.close()


async def offer(appender: Appender, submission: Submission) -> Stored:
    """Offer a request to the log and wait for its end; raises what it was refused with."""
    outcome: asyncio.Future[Stored | TidewaterError] = asyncio.get_running_loop().create_future()
    submission.done = outcome.set_result
    appender.check(submission)
    appender.offer(submission)
    stored = await outcome
    if isinstance(stored, TidewaterError):
        raise stored
    return stored


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Give a directory in memory, for tests that sync thousands of times to no purpose."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="tidewater-") as name:
        yield Path(name)


def rows_by_reader(directory: Path, end: int) -> list[Row]:
    """Read offsets below `end` with the worker's reader, which checks every frame."""
    reader = LogReader(directory)
    try:
        start = reader.start_offset()
        rows: list[Row] = []
        offset = start if start is not None else end
        while offset < end:
            for batch in reader.read(offset, end, READ_BYTES_MAX):
                values = batch.batch.column("value").to_pylist()
                times = batch.batch.column("tw_time")
                rows.extend(
                    Row(batch.base_offset + i, value, times[i].value)
                    for i, value in enumerate(values)
                )
                offset = batch.base_offset + batch.rows
        return rows
    finally:
        reader.close()


def rows_by_checker(directory: Path) -> list[Row]:
    """Read the log with the checker's own decoder."""
    return list(read_log_side(directory).rows)


def payloads_of(rows: Sequence[Row]) -> list[bytes]:
    """Return the payloads, in order."""
    return [row.payload for row in rows]
