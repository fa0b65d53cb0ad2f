"""What happened, from the outside: what was acknowledged, what is read, what the table holds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyiceberg.table import Table

from e2e.kubectl import wait_for
from e2e.web import AGAIN, Door, expect, get, insist, post
from tidewater_testing.checker import AckedBatch
from tidewater_testing.evidence import Evidence, load_table, read_table_sides
from tidewater_testing.traffic import Record

PAGE = 5_000
FLUSH_S_MAX = 120.0
TABLE_S_MAX = 90.0


@dataclass(frozen=True)
class Message:
    """A message as a reader got it."""

    partition: int
    offset: int
    value: bytes


@dataclass(frozen=True)
class Snapshot:
    """One state of the table, as its history tells it."""

    snapshot_id: int
    epochs: Mapping[int, int]
    """The epoch of each partition that the snapshot's commit names."""


@dataclass(frozen=True)
class History:
    """Everything that the checkers judge a topic by."""

    topic: str
    acked: tuple[AckedBatch, ...]
    evidence: Evidence
    """The table, read through the catalog by the tests themselves."""
    stream: Mapping[int, tuple[Message, ...]]
    """Each partition, read from its first offset to its end through the worker."""
    snapshots: tuple[Snapshot, ...] = field(default=())


def gather(
    door: Door, topic: str, record: Record, catalog: Mapping[str, str], partitions: int
) -> History:
    """Flush, then read the topic through the worker and its table through the catalog."""
    flush(door, topic)
    stream = {p: tuple(read_partition(door, topic, p)) for p in range(partitions)}
    found: list[tuple[Evidence, tuple[Snapshot, ...]]] = []

    def table_read() -> bool:
        table = load_table(catalog, topic)
        found.append((Evidence(table=read_table_sides(table)), tuple(snapshots(table))))
        return True

    # A catalog that was away: the forwarded port breaks once before it leads to the new pod.
    wait_for(table_read, TABLE_S_MAX, f"the table of {topic} to be readable", interval_s=1.0)
    return History(topic, tuple(record.acked), found[-1][0], stream, found[-1][1])


def flush(door: Door, topic: str) -> int:
    """Make everything acknowledged so far visible in the table; return the snapshot's id."""
    answers: list[int] = []

    def flushed() -> bool:
        answer = post(door, f"/v1/{topic}/flush")
        if answer.status in AGAIN:  # the table process is on its way back, or the catalog is
            return False
        answers.append(int(expect(answer)["snapshot_id"] or 0))
        return True

    wait_for(flushed, FLUSH_S_MAX, f"a flush of {topic}", interval_s=0.5)
    return answers[-1]


def read_partition(door: Door, topic: str, partition: int, start: int = 0) -> list[Message]:
    """Read a partition through the worker from `start` to where it ends now."""
    messages: list[Message] = []
    offset = start
    path = f"/v1/{topic}/messages?partition={partition}&limit={PAGE}&offset="
    while True:
        page = expect(insist(lambda where=f"{path}{offset}": get(door, where)))  # type: ignore[misc]
        for each in page["messages"]:
            messages.append(Message(each["partition"], each["offset"], each["value"].encode()))
        if page["next_offset"] >= page["end_offset"] or page["next_offset"] == offset:
            return messages
        offset = page["next_offset"]


def snapshots(table: Table) -> list[Snapshot]:
    """List the snapshots that the table still has, oldest first, with the epochs they carry."""
    prefix = "tidewater.partition."
    found = []
    for snapshot in sorted(table.metadata.snapshots, key=lambda each: each.sequence_number or 0):
        summary = snapshot.summary
        extra = {} if summary is None else summary.additional_properties
        epochs = {
            int(key.removeprefix(prefix)): _epoch(value)
            for key, value in extra.items()
            if key.startswith(prefix)
        }
        found.append(Snapshot(snapshot.snapshot_id, epochs))
    return found


def _epoch(frontier: str) -> int:
    return int(json.loads(frontier)["epoch"])
