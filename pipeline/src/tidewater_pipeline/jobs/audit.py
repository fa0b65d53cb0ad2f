"""audit: reads a whole table in parallel and proves G2, or names exactly what breaks it.

Offsets are cut into chunks; Spark sorts each chunk and reports its extent and every place where an
offset is missing, is there twice, or is earlier than the one before. The chunks, which are few, are
then joined here: `judge` is pure. A gap that is recorded in the table (a volume was lost and a
person said so) is named, apart from the findings: it breaks no promise, but nobody may forget it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import (
    LOADS_MAX,
    Session,
    SnapshotGoneError,
    TopicTable,
    named_errors,
)
from tidewater_pipeline.state import TableState

CHUNK_ROWS: Final = 1_000_000
"""Offsets of a chunk: one task sorts them in memory."""
PLACES_MAX: Final = 10_000
"""Places that one chunk names; the number of all is exact all the same."""
G2: Final = "G2 Once in the table"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions:
    """What a person can choose."""

    chunk_rows: int = CHUNK_ROWS


@dataclass(frozen=True, slots=True)
class Place:
    """Two neighbours in a chunk that should not be neighbours."""

    before: int
    offset: int
    backwards: bool
    """The later one has the earlier time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What Spark says of one chunk of a partition."""

    partition: int
    rows: int
    first: int
    last: int
    first_time_us: int | None
    last_time_us: int | None
    wrong: int = 0
    """How many places are wrong; `places` may hold fewer."""
    places: tuple[Place, ...] = ()
    missing: int = 0
    """Offsets that lie between two of its rows and are not there, whether or not listed."""
    twice: int = 0
    """Rows that have the offset of the row before."""
    untimed: tuple[int, int] | None = None
    """The first and last offset of rows without a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be: the offsets [first, last] of a partition."""

    kind: str
    """`missing`, `twice`, `before-start`, `past-frontier`, `start-past-frontier`, `time-order`,
    `no-time`, `in-gap` or `more`."""
    partition: int
    first: int
    last: int

    def __str__(self) -> str:
        """Quote the promise."""
        where = f"{G2}: partition {self.partition}"
        span = f"offset {self.first}" if self.first == self.last else _span(self.first, self.last)
        match self.kind:
            case "missing":
                return f"{where} {span} missing"
            case "twice":
                return f"{where} {span} twice"
            case "before-start":
                return f"{where} {span} before the first offset"
            case "no-time":
                return f"order of time: partition {self.partition} rows without a time in {span}"
            case "past-frontier":
                return f"{where} {span} past the frontier"
            case "start-past-frontier":
                return f"{where} {span} below the start, and not in the table yet"
            case "in-gap":
                return f"{where} {span} there, although recorded as lost"
            case "more":
                return f"{where} {span}: more places than are listed"
            case _:
                return f"order of time: partition {self.partition} {span} goes back"

    def to_json(self) -> dict[str, Any]:
        """Return the values for the report."""
        return {
            "kind": self.kind,
            "partition": self.partition,
            "first": self.first,
            "last": self.last,
            "text": str(self),
        }


def _span(first: int, last: int) -> str:
    return f"offsets {first} to {last}"


@dataclass(slots=True)
class _Walk:
    """Where the walk through a partition's chunks stands."""

    partition: int
    start: int
    end: int
    expected: int
    time_us: int | None = None
    found: list[Finding] = field(default_factory=list)

    def add(self, kind: str, first: int, last: int) -> None:
        self.found.append(Finding(kind, self.partition, first, last))

    def miss(self, first: int, last: int) -> None:
        """Note what is missing; past the frontier nothing is."""
        if first <= min(last, self.end - 1):
            self.add("missing", first, min(last, self.end - 1))


Gaps = Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Lost:
    """A recorded gap: the offsets [first, last] of a partition, lost with a volume."""

    partition: int
    first: int
    last: int

    def to_json(self) -> dict[str, int]:
        """Return the values for the report."""
        return {"partition": self.partition, "first": self.first, "last": self.last}


def recorded(gaps: Gaps, starts: Mapping[int, int], frontiers: Mapping[int, int]) -> list[Lost]:
    """Return what is recorded as lost and would be in the table otherwise."""
    return [
        Lost(partition, max(first, starts.get(partition, 0)), min(end, frontiers[partition]) - 1)
        for partition, pairs in sorted(gaps.items())
        for first, end in pairs
        if partition in frontiers
        and max(first, starts.get(partition, 0)) < min(end, frontiers[partition])
    ]


def judge(
    chunks: Iterable[Chunk],
    starts: Mapping[int, int],
    frontiers: Mapping[int, int],
    gaps: Gaps | None = None,
) -> list[Finding]:
    """Join the chunks: each partition's offsets must be [start, frontier), each once.

    Those within a recorded gap must not be there at all.
    """
    ordered = sorted(chunks, key=lambda chunk: (chunk.partition, chunk.first))
    by_partition = {p: list(group) for p, group in groupby(ordered, key=lambda c: c.partition)}
    found: list[Finding] = []
    for partition in sorted(by_partition.keys() | frontiers.keys()):
        start, end = starts.get(partition, 0), frontiers.get(partition, 0)
        there = by_partition.get(partition, [])
        walk = _Walk(partition, start, end, start)
        for chunk in there:
            _walk_chunk(walk, chunk)
        walk.miss(walk.expected, end - 1)
        for first, last in _past(there, max(start, end)):
            walk.add("past-frontier", first, last)
        if start > end:
            walk.add("start-past-frontier", end, start - 1)
        found += _apart(_joined(walk.found), (gaps or {}).get(partition, ()))
        found += _within_gaps(partition, there, (gaps or {}).get(partition, ()))
    return found


def _past(chunks: Iterable[Chunk], end: int) -> Iterator[tuple[int, int]]:
    """Find the rows at `end` and later: runs of what the chunks say is there."""
    for chunk in chunks:
        for first, last in _runs([chunk]):
            if last >= end:
                yield max(first, end), last
        if chunk.last >= end and chunk.wrong > len(chunk.places):
            yield chunk.last, chunk.last  # of what is not listed only its end is known


def _apart(found: Iterable[Finding], gaps: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    """Take recorded gaps out of what is missing: what is left on either side is a finding."""
    for each in found:
        if each.kind != "missing":
            yield each
            continue
        at = each.first
        for start, end in sorted(gaps):
            if end <= at or start > each.last:
                continue
            if start > at:
                yield Finding("missing", each.partition, at, start - 1)
            at = max(at, end)
        if at <= each.last:
            yield Finding("missing", each.partition, at, each.last)


def _within_gaps(
    partition: int, chunks: Sequence[Chunk], gaps: Sequence[tuple[int, int]]
) -> Iterator[Finding]:
    """Find rows at offsets that are recorded as lost: runs of what the chunks say is there."""
    for start, end in gaps:
        for first, last in _runs(chunks):
            low, high = max(first, start), min(last, end - 1)
            if low <= high:
                yield Finding("in-gap", partition, low, high)


def _runs(chunks: Sequence[Chunk]) -> Iterator[tuple[int, int]]:
    for chunk in chunks:
        at = chunk.first
        for place in chunk.places:
            if place.offset > place.before + 1:
                yield at, place.before
                at = place.offset
        if chunk.wrong <= len(chunk.places):  # else nobody knows where it ends
            yield at, chunk.last


def _walk_chunk(walk: _Walk, chunk: Chunk) -> None:
    if chunk.first > walk.expected:
        walk.miss(walk.expected, chunk.first - 1)
    if chunk.first < walk.start:
        walk.add("before-start", chunk.first, min(chunk.last, walk.start - 1))
    if _before(chunk.first_time_us, walk.time_us):
        walk.add("time-order", chunk.first, chunk.first)
    if chunk.untimed is not None:
        walk.add("no-time", *chunk.untimed)
    for place in chunk.places:
        if place.offset == place.before:
            walk.add("twice", place.offset, place.offset)
        elif place.offset > max(place.before + 1, walk.start):
            walk.miss(max(place.before + 1, walk.start), place.offset - 1)
        if place.backwards:
            walk.add("time-order", place.offset, place.offset)
    if chunk.wrong > len(chunk.places):
        walk.add("more", chunk.places[-1].offset if chunk.places else chunk.first, chunk.last)
    walk.expected = max(walk.expected, chunk.last + 1)
    walk.time_us = walk.time_us if chunk.last_time_us is None else chunk.last_time_us


def _before(time_us: int | None, other_us: int | None) -> bool:
    return time_us is not None and other_us is not None and time_us < other_us


def _joined(found: list[Finding]) -> Iterator[Finding]:
    """Join findings of one kind that touch: a file that was added twice is one range."""
    open_: dict[str, Finding] = {}
    for each in found:
        last = open_.get(each.kind)
        if last is not None and each.first <= last.last + 1:
            grown = Finding(each.kind, each.partition, last.first, max(last.last, each.last))
            open_[each.kind] = grown
            continue
        if last is not None:
            yield last
        open_[each.kind] = each
    yield from open_.values()


def unlisted(
    chunks: Iterable[Chunk], gaps: Gaps, frontiers: Mapping[int, int] | None = None
) -> int:
    """Count what is missing in chunks that have more places than they list.

    What a recorded gap explains is no finding: it lies behind the last place that is listed. Past
    the frontier nothing is missing; what may lie on either side is counted as far as it can be.
    """
    missing = 0
    for chunk in chunks:
        if chunk.wrong <= len(chunk.places):
            continue
        listed = [each.offset - each.before - 1 for each in chunk.places]
        after = chunk.places[-1].offset if chunk.places else chunk.first
        lost = sum(
            max(0, min(end, chunk.last) - max(start, after + 1))
            for start, end in gaps.get(chunk.partition, ())
        )
        rest = max(0, chunk.missing - sum(max(0, each) for each in listed) - lost)
        end = chunk.last if frontiers is None else frontiers.get(chunk.partition, 0)
        missing += min(rest, max(0, min(end, chunk.last) - after - 1))
    return missing


def counts(
    found: Iterable[Finding],
    chunks: Sequence[Chunk],
    gaps: Gaps,
    frontiers: Mapping[int, int] | None = None,
) -> dict[str, int]:
    """Count what breaks G2: offsets that are missing, and rows too many (of three alike, two)."""
    listed = sum(each.last - each.first + 1 for each in found if each.kind == "missing")
    return {
        "missing": listed + unlisted(chunks, gaps, frontiers),
        "twice": sum(chunk.twice for chunk in chunks),
    }


def chunk_query(table: str, snapshot_id: int, starts: Mapping[int, int], chunk_rows: int) -> str:
    """Write the query that returns one row a chunk. Rows that retention has cut do not count."""
    kept = " AND ".join(
        f"NOT (tw_partition = {partition} AND tw_offset < {start})"
        for partition, start in sorted(starts.items())
        if start > 0
    )
    return f"""
WITH numbered AS (
  SELECT tw_partition AS p, tw_offset AS o, unix_micros(tw_time) AS t,
         tw_offset DIV {chunk_rows} AS c
  FROM {table} VERSION AS OF {snapshot_id} WHERE {kept or "true"}),
neighbours AS (
  SELECT p, c, o, t, lag(o) OVER w AS po, lag(t) OVER w AS pt FROM numbered
  WINDOW w AS (PARTITION BY p, c ORDER BY o, t))
SELECT p, count(*) AS n, min(o) AS first, max(o) AS last, min_by(t, o) AS first_time,
       max_by(t, o) AS last_time, count_if(o <> po + 1 OR t < pt) AS wrong,
       coalesce(sum(greatest(o - po - 1, 0)), 0) AS missing, count_if(o = po) AS twice,
       min(CASE WHEN t IS NULL THEN o END) AS untimed_first,
       max(CASE WHEN t IS NULL THEN o END) AS untimed_last,
       slice(array_sort(collect_list(CASE WHEN o <> po + 1 OR t < pt
         THEN struct(o, po, t < pt AS back) END)), 1, {PLACES_MAX}) AS places
FROM neighbours GROUP BY p, c"""  # noqa: S608 - names are quoted


def run(session: Session, table: TopicTable, options: AuditOptions) -> Report:
    """Audit one version of a table: rows and frontiers of the same metadata."""
    state, chunks = _read(session, table, options)
    size = state.size
    report = Report("audit", str(table.topic), before=size, after=size)
    found = judge(chunks, state.starts, state.frontiers, state.gaps)
    lost = recorded(state.gaps, state.starts, state.frontiers)
    for each in lost:
        session.progress.say(
            f"{table.topic}: partition {each.partition} offsets {each.first} to {each.last}: "
            "a recorded gap, lost with a volume that was given up"
        )
    report.details = {
        "snapshot_id": state.snapshot_id,
        "rows_read": sum(chunk.rows for chunk in chunks),
        "partitions": {
            str(p): {"start": state.starts.get(p, 0), "next": end}
            for p, end in sorted(state.frontiers.items())
        },
        **counts(found, chunks, state.gaps, state.frontiers),
        "recorded_gaps": [each.to_json() for each in lost],
        "recorded_lost": sum(each.last - each.first + 1 for each in lost),
        "findings": [each.to_json() for each in found],
    }
    if found:
        report.outcome = Outcome.FOUND
        report.message = "; ".join(str(each) for each in found[:5])
    return report


def _read(
    session: Session, table: TopicTable, options: AuditOptions
) -> tuple[TableState, list[Chunk]]:
    """Read one version of the table; a later one, if it expires before Spark has found it."""
    attempts = 0
    while True:
        state, attempts = table.load(), attempts + 1
        if state.snapshot_id is None:
            return state, []
        session.progress.say(
            f"{table.topic}: auditing {state.size.rows:,} rows in {state.size.files} files"
        )
        query = chunk_query(table.full_name, state.snapshot_id, state.starts, options.chunk_rows)
        try:
            with named_errors("audit"):
                return state, [_chunk(row) for row in session.frame(query).toLocalIterator()]
        except SnapshotGoneError:
            if attempts == LOADS_MAX:
                raise


def _chunk(row: Any) -> Chunk:
    return Chunk(
        partition=row["p"],
        rows=row["n"],
        first=row["first"],
        last=row["last"],
        first_time_us=row["first_time"],
        last_time_us=row["last_time"],
        wrong=row["wrong"],
        places=tuple(Place(each["po"], each["o"], bool(each["back"])) for each in row["places"]),
        missing=row["missing"],
        twice=row["twice"],
        untimed=(
            None if row["untimed_first"] is None else (row["untimed_first"], row["untimed_last"])
        ),
    )
