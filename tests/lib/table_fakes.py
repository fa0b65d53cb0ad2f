"""Stand-ins for what surrounds the table side: logs written by hand, chosen ids, a clock."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from queue import Queue
from uuid import UUID

import numpy as np
import pyarrow as pa

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import TidewaterError
from tidewater_core.settings import CatalogSettings, WorkerSettings
from tidewater_worker.log import frame as fmt
from tidewater_worker.log.reader import segment_name
from tidewater_worker.ports import FlushResult, PartitionAssignment, TableEngine, TopicAssignment
from tidewater_worker.schema import log_schema

TOPIC_UUID = "8d7c4a52-51a3-4c57-9d2c-0d1f7f6f9a10"
TIME_US = 1_790_000_000_000_000


class CountingIds:
    """Ids that count up, different for each `seed`."""

    def __init__(self, seed: int = 1) -> None:
        self._next = seed << 40

    def uuid(self) -> UUID:
        return UUID(int=self.snapshot_id())

    def snapshot_id(self) -> int:
        self._next += 1
        return self._next

    def jitter(self) -> float:
        return 0.0


class SteppedClock:
    """A clock that moves only when told to."""

    def __init__(self, now_us: int = TIME_US) -> None:
        self._now_us = now_us
        self._seconds = 1_000.0

    def now_us(self) -> int:
        return self._now_us

    def monotonic(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds
        self._now_us += int(seconds * 1_000_000)


def message_batch(
    spec: TopicSpec,
    values: Sequence[bytes | dict[str, object]],
    *,
    time_us: int = TIME_US,
    keys: Sequence[bytes | None] | None = None,
) -> pa.RecordBatch:
    """Return a batch of the log's columns."""
    schema = log_schema(spec)
    count = len(values)
    columns: list[pa.Array] = []
    for field in schema:
        if field.name == "tw_time":
            columns.append(pa.array([time_us] * count, pa.int64()).cast(field.type))
        elif field.name == "tw_key":
            columns.append(pa.array(keys or [None] * count, field.type))
        elif field.name == "tw_headers":
            columns.append(pa.nulls(count, field.type))
        elif field.name == "tw_producer":
            columns.append(
                pa.RunEndEncodedArray.from_arrays(
                    pa.array([count], pa.int32()), pa.array([None], pa.string())
                )
            )
        elif field.name == "tw_unsynced":
            columns.append(_nothing_unsynced(count))
        elif field.name == "value" and spec.schema_ is None:
            columns.append(pa.array(values, field.type))
        else:
            columns.append(pa.array([v.get(field.name) for v in values], field.type))  # type: ignore[union-attr]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def random_batch(spec: TopicSpec, rows: int, size: int, time_us: int = TIME_US) -> pa.RecordBatch:
    """Return a batch of random values of one size, made fast."""
    ends = np.arange(0, (rows + 1) * size, size, dtype=np.int32)
    values = pa.Array.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(os.urandom(rows * size))]
    )
    schema = log_schema(spec)
    times = pa.array(np.full(rows, time_us)).cast(schema.field("tw_time").type)
    producer = pa.RunEndEncodedArray.from_arrays(
        pa.array([rows], pa.int32()), pa.array([None], pa.string())
    )
    return pa.RecordBatch.from_arrays(
        [
            times,
            pa.nulls(rows, pa.binary()),
            pa.nulls(rows, schema.field("tw_headers").type),
            values,
            producer,
            _nothing_unsynced(rows),
        ],
        schema=schema,
    )


def _nothing_unsynced(rows: int) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(
        pa.array([rows], pa.int32()), pa.array([0], pa.int64())
    )


class HandLog:
    """The log of one partition, written frame by frame."""

    def __init__(self, directory: Path, partition: int, first: int = 0) -> None:
        self.directory = directory
        self.partition = partition
        self.end = first
        self._schema: pa.Schema | None = None
        self._path: Path | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, batch: pa.RecordBatch, *, new_segment: bool = False) -> int:
        """Write a frame; return the end offset after it."""
        if self._path is None or new_segment or batch.schema != self._schema:
            self._schema = batch.schema
            self._path = self.directory / segment_name(self.end)
            self._path.write_bytes(
                fmt.encode_header(UUID(TOPIC_UUID), self.partition, self.end, batch.schema)
            )
        body = batch.serialize().to_pybytes()
        with self._path.open("ab") as file:
            file.write(fmt.encode_frame_head(self.end, body) + body)
        self.end += batch.num_rows
        return self.end

    def drop_segments_before(self, offset: int) -> None:
        """Delete the segments that hold only offsets below this."""
        bases = sorted(int(path.stem) for path in self.directory.glob("*.wal"))
        for base, following in pairwise(bases):
            if following <= offset:
                (self.directory / segment_name(base)).unlink()


def worker_settings(data: Path, **properties: str) -> WorkerSettings:
    """Return settings with an SQLite catalog and a local warehouse under `data`."""
    data.mkdir(parents=True, exist_ok=True)
    return WorkerSettings(
        worker_id="test",
        log_root=data / "log",
        run_dir=data / "run",
        coordination=str(data / "coordination.db"),
        catalog=CatalogSettings(
            properties={
                "type": "sql",
                "uri": f"sqlite:///{data / 'catalog.db'}",
                "warehouse": (data / "warehouse").as_uri(),
                **properties,
            }
        ),
    )


def assignment(
    spec: TopicSpec,
    logs: Iterable[HandLog],
    *,
    epoch: int = 1,
    topic: str = "shop/orders",
    uuid: str = TOPIC_UUID,
) -> TopicAssignment:
    """Return the assignment of a topic with these logs, durable to their ends."""
    return TopicAssignment(
        topic=topic,
        uuid=uuid,
        spec=spec.model_dump_json(by_alias=True),
        partitions={
            log.partition: PartitionAssignment(epoch, str(log.directory), log.end) for log in logs
        },
    )


def flush(engine: TableEngine, topic: str, upto: dict[int, int], timeout_s: float) -> FlushResult:
    """Flush and wait for what comes of it."""
    said: Queue[FlushResult | TidewaterError] = Queue()
    engine.flush(topic, upto, timeout_s, said.put)
    found = said.get(timeout=timeout_s + 10)
    if isinstance(found, TidewaterError):
        raise found
    return found
