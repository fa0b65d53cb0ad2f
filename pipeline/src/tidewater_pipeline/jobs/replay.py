"""replay: sends a range or selection of a topic's history to another topic.

Also the way back for dead letters: replay the dead-letter topic to the one they came from. Each
partition is one stream in the order of its offsets; each message says in a header where it is from.

The first run writes down, in a property of the source's table, which offsets it reads and where
their messages go. A later run of that id keeps to it, whatever has grown since; where retention has
taken some of these offsets it is refused, since what is left would be cut into other requests.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from tidewater_core.errors import Corrupt, Invalid, NotFound
from tidewater_core.names import (
    REPLAY_PREFIX,
    TW_HEADERS,
    TW_KEY,
    TW_OFFSET,
    TW_PARTITION,
    VALUE,
    TopicName,
)
from tidewater_pipeline.deliver import (
    NOBODY,
    TASKS_AT_ONCE,
    Access,
    Batch,
    Sent,
    Target,
    cut_by_offset,
    finish,
    message_of,
    route,
    run_id_of,
    send_all,
    topic_info,
)
from tidewater_pipeline.records import Hold, Record, unheld
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import Session, TopicTable, named_errors
from tidewater_pipeline.state import TableState, quoted, sql_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JSON_OPTIONS: Final = {
    # Spark's own formats cut times to milliseconds.
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
EMPTY: Final = "there is no message in this range yet"
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
    access: Access = NOBODY


def ends_of(options: ReplayOptions, frontiers: Mapping[int, int]) -> dict[int, int]:
    """Return where each partition's range ends: as asked, or where the table ends now."""
    asked = options.end
    return {p: n if asked is None else min(n, asked) for p, n in sorted(frontiers.items())}


def plan_replay(
    options: ReplayOptions, source: str, ends: Mapping[int, int], *, typed: bool = False
) -> Target:
    """Check the options and name the run.

    Where it ends is part of its name: a longer range is another run, which sends all of it.
    """
    if options.begin < 0 or (options.end is not None and options.end <= options.begin):
        raise Invalid("InvalidRange", f"there is nothing in [{options.begin}, {options.end})")
    if str(options.to) == source:
        raise Invalid("SameTopic", f"{source} cannot be replayed into itself")
    run_id = options.run_id or run_id_of(
        *("replay", source, options.to, options.begin, options.where, options.batch_rows),
        *sorted(ends.items()),
    )
    to = str(options.to)
    return Target(options.url, to, options.batch_rows, f"replay-{run_id}", options.access, typed)


@dataclass(frozen=True, slots=True)
class Begun:
    """What a replay keeps to whenever it goes on, as it is written down."""

    what: str
    """What tells its options from others."""
    partitions: int
    """Of the target, when the replay began."""
    keeps_partition: bool
    """Whether source and target had as many: a key then belongs to the same one in both."""
    ranges: Mapping[int, tuple[int, int]]
    """Source partition to its offsets [first, end)."""
    done: bool = False

    def to_json(self) -> str:
        """Write the property."""
        whole = {
            "what": self.what,
            "partitions": self.partitions,
            "keeps_partition": self.keeps_partition,
            "ranges": {str(p): list(span) for p, span in self.ranges.items()},
            "done": self.done,
        }
        return json.dumps(whole, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Begun":
        """Read the property."""
        try:
            found = json.loads(text)
            ranges = {int(p): (int(low), int(end)) for p, (low, end) in found["ranges"].items()}
            return cls(
                str(found["what"]),
                int(found["partitions"]),
                bool(found["keeps_partition"]),
                ranges,
                bool(found["done"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt("ReplayDamaged", f"the record of a replay is {text[:80]!r}") from error


def begin_replay(
    options: ReplayOptions,
    source: str,
    counts: tuple[int | None, int],
    starts: Mapping[int, int],
    ends: Mapping[int, int],
) -> Begun:
    """Decide what a first run reads; `counts` are the partitions of source and target.

    Of a source that is no topic any more nobody knows how many it had: its rows go by their keys.
    """
    what = run_id_of(
        source, options.to, options.begin, options.end, options.where, options.batch_rows
    )
    ranges = {p: (max(options.begin, starts.get(p, 0)), end) for p, end in ends.items()}
    wanted = {p: span for p, span in ranges.items() if span[0] < span[1]}
    return Begun(what, counts[1], counts[0] == counts[1], wanted)


def go_on(stored: str, new: Begun, starts: Mapping[int, int]) -> Begun:
    """Keep to what was written down; raise if that is another replay, or is no longer there."""
    known = Begun.from_json(stored)
    if known.what != new.what:
        raise Invalid("IdTaken", "this id has replayed something else: choose another --id")
    if known.done:
        return known
    for partition, (first, _) in sorted(known.ranges.items()):
        if (start := starts.get(partition, 0)) > first:
            raise Invalid(
                "SourceGone",
                f"partition {partition} begins at {start} by now; this replay began at {first} and "
                "is not known to have sent what is gone. What is there is another replay: with "
                "--begin, or another --id, which sends all of it",
            )
    return known


def chosen_rows(ranges: Mapping[int, tuple[int, int]]) -> str:
    """Return the condition for the offsets of a replay."""
    return " OR ".join(
        f"({TW_PARTITION} = {p} AND {TW_OFFSET} >= {first} AND {TW_OFFSET} < {end})"
        for p, (first, end) in sorted(ranges.items())
    )


def run(
    session: Session,
    table: TopicTable,
    options: ReplayOptions,
    hold: Hold = unheld,
) -> Report:
    """Send the rows, one task a partition; one run of an id at a time."""
    state = table.load()
    size = state.size
    report = Report("replay", str(table.topic), before=size, after=size)
    to = topic_info(options.url, str(options.to), options.access)
    counts = (_partitions(table, options), to.partitions)
    ends = ends_of(options, state.frontiers)
    target = plan_replay(options, str(table.topic), ends, typed=to.typed)
    if state.snapshot_id is None:
        return _nothing(report, target, EMPTY)
    with named_errors("replay"):
        _chosen(table, state, options)  # what is refused is not written down
    new = begin_replay(options, str(table.topic), counts, state.starts, ends)
    with hold(f"replay/{table.topic}/{id_of(target)}"):
        record = Record(table, f"{REPLAY_PREFIX}{id_of(target)}")
        if record.text is None and not new.ranges:
            return _nothing(report, target, EMPTY)
        begun = go_on(record.begin(new.to_json()), new, state.starts)
        target = replace(target, partitions=begun.partitions)
        if begun.done:
            return _nothing(report, target, "done by an earlier run: another --id sends it again")
        with named_errors("replay"):
            done = _send(session, table, state, options, target, begun)
        record.write(replace(begun, done=True).to_json())
    report.details = totals(done, target)
    return report


def _nothing(report: Report, target: Target, why: str) -> Report:
    report.outcome, report.message = Outcome.NOTHING, why
    report.details = totals([], target)
    return report


def _chosen(
    table: TopicTable, state: TableState, options: ReplayOptions, ranges: str = "true"
) -> "DataFrame":
    rows = table.rows(state).where(ranges)
    return rows.where(options.where) if options.where else rows


def _send(
    session: Session,
    table: TopicTable,
    state: TableState,
    options: ReplayOptions,
    target: Target,
    begun: Begun,
) -> list[Sent]:
    rows = _chosen(table, state, options, chosen_rows(begun.ranges))
    chosen = rows.selectExpr(
        TW_PARTITION, TW_OFFSET, TW_KEY, TW_HEADERS, f"{payload_expression(rows.columns)} AS v"
    )
    streams = min(len(begun.ranges), TASKS_AT_ONCE)
    ordered = chosen.repartition(streams, TW_PARTITION).sortWithinPartitions(
        TW_PARTITION, TW_OFFSET
    )
    end = max(end for _, end in begun.ranges.values())
    session.progress.say(
        f"{table.topic}: replaying to {options.to}, up to {end} (id {id_of(target)})"
    )
    origin, keeps_partition = str(table.topic), begun.keeps_partition

    def task(part: Iterable[Any]) -> Iterator[Sent]:
        yield send_all(target, batches(part, target, origin, keeps_partition))

    return finish(target, ordered.rdd.mapPartitions(task).collect())


def _partitions(table: TopicTable, options: ReplayOptions) -> int | None:
    """Count the source's partitions; None: its table is all that is left.

    That one names those alone that had a message.
    """
    try:
        return topic_info(options.url, str(table.topic), options.access).partitions
    except NotFound:
        return None


def payload_expression(columns: list[str]) -> str:
    """Return the SQL of a message's payload: the bytes of a raw topic, or its columns as JSON."""
    own = [name for name in columns if not name.startswith("tw_")]
    return quoted(own) if own == [VALUE] else json_expression(own)


def json_expression(columns: Iterable[str]) -> str:
    """Return the SQL of columns as one JSON object, with all digits of times and decimals.

    They are named by whoever wrote the file or table: never SQL.
    """
    own = ", ".join(quoted([name]) for name in columns)
    options = ", ".join(f"{sql_text(k)}, {sql_text(v)}" for k, v in JSON_OPTIONS.items())
    return f"to_json(struct({own}), map({options}))"


def batches(
    rows: Iterable[Any], target: Target, origin: str, keep_partition: bool
) -> Iterator[Batch]:
    """Cut the rows of a task, which may hold several partitions one after the other."""
    for partition, group in groupby(rows, key=lambda row: row[TW_PARTITION]):
        stream = f"{origin}/{partition}"
        to = route(target, stream)
        messages = (
            (
                row[TW_OFFSET],
                partition if keep_partition else to(row[TW_KEY]),
                _message(row, origin, target.typed),
            )
            for row in group
        )
        yield from cut_by_offset(stream, messages, target.batch_rows)


def _message(row: Any, origin: str, typed: bool) -> bytes:
    """Write a row as a message that says where it is from.

    Headers without a value, which older tables hold, are no longer taken, and go.
    """
    place = f"{origin}/{row[TW_PARTITION]}/{row[TW_OFFSET]}"
    own = {name: text for name, text in (row[TW_HEADERS] or {}).items() if text is not None}
    return message_of(row[TW_KEY], {**own, ORIGIN: place}, row["v"], typed)


def id_of(target: Target) -> str:
    """Return a run's id as `--id` names it."""
    return target.run_id.partition("-")[2]


def totals(done: list[Sent], target: Target) -> dict[str, Any]:
    """Add up what the tasks did."""
    return {
        "id": id_of(target),
        "to": target.topic,
        "messages": sum(each.messages for each in done),
        "stored_before": sum(each.known for each in done),
        "requests": sum(each.requests for each in done),
    }
