"""replay: sends a range or selection of a topic's history to another topic.

Also the way back for dead letters: replay the dead-letter topic to the one they came from. Each
partition is one stream in the order of its offsets; each message says in a header where it is from.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tidewater_core.errors import Invalid
from tidewater_core.names import TW_HEADERS, TW_KEY, TW_OFFSET, TW_PARTITION, VALUE, TopicName
from tidewater_pipeline.deliver import (
    Batch,
    Sender,
    Sent,
    Target,
    cut_by_offset,
    finish,
    message_of,
    run_id_of,
    send_all,
)
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable, named_errors

ORIGIN: Final = "tw-replayed-from"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """What a person can choose."""

    to: TopicName
    url: str
    begin: int = 0
    end: int | None = None
    """Offsets [begin, end) of every partition; None: as far as the table goes now."""
    where: str | None = None
    batch_rows: int = 1000
    run_id: str | None = None


def plan_replay(options: ReplayOptions, source: str, same_partitions: bool) -> tuple[Target, bool]:
    """Decide the run's id, and whether messages keep their partition.

    Where both topics have as many partitions, a key belongs to the same one in both.
    """
    if options.begin < 0 or (options.end is not None and options.end <= options.begin):
        raise Invalid("InvalidRange", f"there is nothing in [{options.begin}, {options.end})")
    if str(options.to) == source:
        raise Invalid("SameTopic", f"{source} cannot be replayed into itself")
    run_id = options.run_id or run_id_of(
        "replay", source, options.to, options.begin, options.where, options.batch_rows
    )
    target = Target(options.url, str(options.to), options.batch_rows, f"replay-{run_id}")
    return target, same_partitions


def run(session: Session, table: TopicTable, options: ReplayOptions) -> Report:
    """Send the rows, one task a partition."""
    state = table.load()
    size = state.size
    report = Report("replay", str(table.topic), before=size, after=size)
    sender = Sender(Target(options.url, str(options.to)))
    same = sender.partitions() == len(state.frontiers)
    sender.close()
    target, keep_partition = plan_replay(options, str(table.topic), same)
    if state.snapshot_id is None:
        report.outcome = Outcome.NOTHING
        return report
    with named_errors("replay"):
        rows = table.rows(state).where(f"{TW_OFFSET} >= {options.begin}")
        if options.end is not None:
            rows = rows.where(f"{TW_OFFSET} < {options.end}")
        for partition, start in state.starts.items():
            rows = rows.where(f"NOT ({TW_PARTITION} = {partition} AND {TW_OFFSET} < {start})")
        if options.where:
            rows = rows.where(options.where)
        chosen = rows.selectExpr(
            TW_PARTITION, TW_OFFSET, TW_KEY, TW_HEADERS, f"{payload_expression(rows.columns)} AS v"
        )
        streams = max(1, len(state.frontiers))
        ordered = chosen.repartition(streams, TW_PARTITION).sortWithinPartitions(
            TW_PARTITION, TW_OFFSET
        )
        session.progress.say(f"{table.topic}: replaying to {options.to}")
        origin = str(table.topic)

        def task(part: Iterable[Any]) -> Iterator[Sent]:
            yield send_all(target, batches(part, target, origin, keep_partition))

        done = finish(target, ordered.rdd.mapPartitions(task).collect())
    report.details = totals(done, target)
    return report


def payload_expression(columns: list[str]) -> str:
    """Return the SQL of a message's payload: the bytes of a raw topic, or its columns as JSON."""
    own = [name for name in columns if not name.startswith("tw_")]
    if own == [VALUE]:
        return f"`{VALUE}`"
    return f"to_json(struct({', '.join(f'`{name}`' for name in own)}))"


def batches(
    rows: Iterable[Any], target: Target, origin: str, keep_partition: bool
) -> Iterator[Batch]:
    """Cut the rows of a task, which may hold several partitions one after the other."""
    current: int | None = None
    waiting: list[tuple[int, dict[str, Any]]] = []

    def cut() -> Iterator[Batch]:
        partition = current if keep_partition else None
        return cut_by_offset(f"{origin}/{current}", waiting, target.batch_rows, partition)

    for row in rows:
        partition, offset = row[TW_PARTITION], row[TW_OFFSET]
        full = waiting and offset // target.batch_rows != waiting[-1][0] // target.batch_rows
        if partition != current or full:
            yield from cut()
            waiting, current = [], partition
        payload = row["v"]
        headers = {**(row[TW_HEADERS] or {}), ORIGIN: f"{origin}/{partition}/{offset}"}
        value = json.loads(payload) if isinstance(payload, str) else payload
        waiting.append((offset, message_of(row[TW_KEY], headers, value)))
    yield from cut()


def totals(done: list[Sent], target: Target) -> dict[str, Any]:
    """Add up what the tasks did."""
    return {
        "id": target.run_id.partition("-")[2],
        "to": target.topic,
        "messages": sum(each.messages for each in done),
        "stored_before": sum(each.known for each in done),
        "requests": sum(each.requests for each in done),
    }
