"""A topic on this worker: its partitions and which of them a message goes to."""

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import UUID

import pyarrow as pa

from tidewater_coordination.port import TopicPhase
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import NotFound, TidewaterError
from tidewater_core.names import TopicName
from tidewater_worker.log.group import Rows, nulls
from tidewater_worker.partition import Partition
from tidewater_worker.ports import Commits, TopicAssignment, TopicState

STICKY_BYTES: Final = 256 * 1024
"""Messages without a key stay on one partition for this long: that fills group commits."""

Payload: TypeAlias = "Rows | pa.RecordBatch"


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a key: CRC-32 modulo the number of partitions."""
    return zlib.crc32(key) % partitions


@dataclass(slots=True)
class Topic:
    """A topic that this worker serves."""

    name: TopicName
    uuid: UUID
    spec: TopicSpec
    spec_json: str
    partitions: dict[int, Partition]
    phase: TopicPhase = TopicPhase.ACTIVE
    refused: TidewaterError | None = None
    """Why the spec that is registered now is not the one that is served."""
    state: TopicState | None = None
    counters: Counter[str] = field(default_factory=Counter)
    is_spread: bool = False
    """Some of its partitions are not this worker's."""
    _sticky: int = 0
    _sticky_bytes: int = 0

    @property
    def is_deleting(self) -> bool:
        """Tell whether it takes no more messages because it is on its way out."""
        return self.phase is not TopicPhase.ACTIVE

    def assignment(self, commits: Commits = Commits.ALONE) -> TopicAssignment:
        """Describe it to the table process."""
        owned = {number: p.assignment() for number, p in self.partitions.items()}
        return TopicAssignment(
            str(self.name), str(self.uuid), self.spec_json,
            {number: assignment for number, assignment in owned.items() if assignment}, commits,
        )  # fmt: skip

    def note(self, state: TopicState, now: float) -> None:
        """Take what the table process says."""
        self.state = state
        for number, told in state.partitions.items():
            partition = self.partitions.get(number)
            if partition is not None:
                partition.note(told)
                if partition.frontier_known.is_set():
                    partition.pulse.committed(partition.table.next, now)

    def partition(self, number: int) -> Partition:
        """Return a partition, or raise that there is none."""
        found = self.partitions.get(number)
        if found is None:
            raise NotFound(
                "UnknownPartition",
                f"{self.name} has partitions 0 to {self.spec.partitions - 1}, not {number}",
            )
        return found

    def is_elsewhere(self, number: int) -> bool:
        """Tell whether a partition is not this worker's."""
        return self.is_spread and self.partition(number).is_elsewhere

    def unkeyed_partition(self, nbytes: int) -> int:
        """Choose for messages without a key: the same for a while, then the next that is open."""
        count = self.spec.partitions
        self._sticky_bytes += nbytes
        if self._sticky_bytes > STICKY_BYTES:
            self._sticky, self._sticky_bytes = (self._sticky + 1) % count, 0
        for step in range(count):
            number = (self._sticky + step) % count
            try:
                self.partition(number).ready()
            except TidewaterError:
                continue
            self._sticky = number
            return number
        for step in range(count):
            number = (self._sticky + step) % count
            if self.partitions[number].remote_url:
                self._sticky = number
                return number
        return self._sticky

    def route(
        self, payload: Payload, nbytes: int, asked: int | None, producer: str | None
    ) -> list[tuple[int, Payload]]:
        """Split a request over partitions; order within each is kept."""
        if asked is not None:
            self.partition(asked)
            return [(asked, payload)]
        if self.spec.partitions == 1:
            return [(0, payload)]
        keys = payload.keys if isinstance(payload, Rows) else _keys(payload)
        if keys is None or all(key is None for key in keys):
            return [(self._unkeyed(nbytes, producer), payload)]
        count = self.spec.partitions
        unkeyed = -1
        rows: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            if key is not None:
                number = zlib.crc32(key) % count
            else:
                if unkeyed < 0:
                    unkeyed = self._unkeyed(nbytes, producer)
                number = unkeyed
            rows.setdefault(number, []).append(i)
        if len(rows) == 1:
            return [(next(iter(rows)), payload)]
        return [(number, _take(payload, indices)) for number, indices in sorted(rows.items())]

    def _unkeyed(self, nbytes: int, producer: str | None) -> int:
        # A re-sent request must find its first copy: an idempotent producer always goes one way.
        if producer is not None:
            return partition_of(producer.encode(), self.spec.partitions)
        return self.unkeyed_partition(nbytes)


def _keys(batch: pa.RecordBatch) -> list[bytes | None] | None:
    column = batch.column(0)
    return None if column.null_count == batch.num_rows else column.to_pylist()


def _take(payload: Payload, indices: list[int]) -> Payload:
    if isinstance(payload, Rows):
        return Rows(
            [payload.keys[i] for i in indices],
            [payload.headers[i] for i in indices],
            [payload.values[i] for i in indices],
        )
    places = pa.array(indices, pa.int32())
    columns = [
        # Most messages have no headers, and taking rows of a map is dear.
        nulls(len(indices), column.type)
        if column.null_count == len(column)
        else column.take(places)
        for column in payload.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=payload.schema)
