"""The judge of the attack tests: compares what was acknowledged with what is stored.

`violations` is pure: given the evidence (table and log, see `evidence`) and what the traffic
generator was promised, it returns one line per broken promise, and each line quotes the promise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidewater_testing.evidence import Evidence, LogSide, Row, TableSide, gather

G1 = "G1 Durable"
G2 = "G2 Once in the table"
G8 = "G8 Idempotent producers"
ORDER = "order within a partition"
VIOLATIONS_SHOWN_MAX = 40


@dataclass(frozen=True)
class Range:
    """`count` messages of a partition, from `offset` on."""

    partition: int
    offset: int
    count: int


@dataclass(frozen=True)
class AckedBatch:
    """A request that was acknowledged: its payloads, and where the answer says they are.

    With one range, the payloads lie there in their order. With several (keys of different
    partitions in one request), which message went where is the worker's choice; together the
    ranges hold exactly the payloads, and each range in the order of the request.
    """

    payloads: tuple[bytes, ...]
    ranges: tuple[Range, ...]


def verify(
    properties: Mapping[str, str],
    log_root: Path,
    topic: str,
    acked: Sequence[AckedBatch],
    *,
    payload: str = "value",
    flushed: bool = False,
) -> Evidence:
    """Gather the evidence and raise `AssertionError` with every violation; returns the evidence."""
    evidence = gather(properties, log_root, topic, payload)
    found = violations(evidence, acked, flushed=flushed)
    if found:
        shown = found[:VIOLATIONS_SHOWN_MAX]
        more = len(found) - len(shown)
        raise AssertionError("\n".join([*shown, f"... and {more} more"] if more else shown))
    return evidence


def violations(
    evidence: Evidence, acked: Iterable[AckedBatch], *, flushed: bool = False
) -> list[str]:
    """Return every promise that the evidence breaks; an empty list is what we want.

    `flushed`: everything acknowledged must be in the table, not only in the log.
    """
    found: list[str] = []
    stored: dict[int, dict[int, Row]] = {}
    for partition in sorted(evidence.table.keys() | evidence.log.keys()):
        table = evidence.table.get(partition, TableSide())
        log = evidence.log.get(partition, LogSide())
        found.extend(_table_alone(partition, table))
        found.extend(_log_alone(partition, log))
        found.extend(_seam(partition, table, log))
        stored[partition] = {row.offset: row for row in (*log.rows, *table.rows)}
    found.extend(_acknowledged(acked, stored, evidence.table if flushed else None))
    found.extend(_stored_once(stored))
    found.extend(_order(stored))
    found.extend(_commit_ids(evidence.commit_ids))
    return found


def _table_alone(partition: int, table: TableSide) -> Iterator[str]:
    where = f"{G2}: partition {partition}"
    expected = table.start
    for row in table.rows:
        if row.offset < table.start:
            continue  # retention raises `start` before it deletes
        if row.offset < expected:
            yield f"{where} offset {row.offset} twice"
            continue
        if row.offset > expected:
            yield f"{where} offsets {expected} to {row.offset - 1} are missing"
        if row.offset >= table.next:
            yield f"{where} offset {row.offset} is past the frontier {table.next}"
        expected = row.offset + 1
    if expected < table.next:
        yield f"{where} offsets {expected} to {table.next - 1} are missing before the frontier"


def _log_alone(partition: int, log: LogSide) -> Iterator[str]:
    for before, after in zip(log.rows, log.rows[1:], strict=False):
        if after.offset != before.offset + 1:
            yield (
                f"{G1}: partition {partition}: the log goes from offset {before.offset} "
                f"to {after.offset}"
            )


def _seam(partition: int, table: TableSide, log: LogSide) -> Iterator[str]:
    """Check that the log goes on where the table ends, and agrees where they overlap."""
    if log.start is None:
        return
    where = f"{G1}: partition {partition}"
    if log.start > table.next:
        yield f"{where} offsets {table.next} to {log.start - 1} are neither in the table nor log"
    if log.rows[-1].offset + 1 < table.next:
        yield (
            f"{where}: the log ends at {log.rows[-1].offset + 1}, before the frontier "
            f"{table.next}: the next offset would be given twice"
        )
    in_table = {row.offset: row for row in table.rows}
    for row in log.rows:
        other = in_table.get(row.offset)
        if other is not None and other.payload != row.payload:
            yield (
                f"{where} offset {row.offset} is {_short(row.payload)} in the log "
                f"and {_short(other.payload)} in the table"
            )
        elif other is not None and other.time_us != row.time_us:
            yield f"{where} offset {row.offset} has another tw_time in the table than in the log"


def _acknowledged(
    acked: Iterable[AckedBatch],
    stored: Mapping[int, Mapping[int, Row]],
    table: Mapping[int, TableSide] | None,
) -> Iterator[str]:
    given: dict[tuple[int, int], bytes] = {}
    for batch in acked:
        if sum(each.count for each in batch.ranges) != len(batch.payloads):
            yield f"{G1}: {len(batch.payloads)} messages were answered with {batch.ranges}"
            continue
        held: list[bytes] = []
        for place in batch.ranges:
            for offset in range(place.offset, place.offset + place.count):
                row = stored.get(place.partition, {}).get(offset)
                if row is None:
                    yield _lost(place.partition, offset, batch)
                    continue
                held.append(row.payload)
                first = given.setdefault((place.partition, offset), batch.payloads[0])
                if first != batch.payloads[0]:
                    yield (
                        f"{G1}: partition {place.partition} offset {offset} was given to two "
                        f"requests, of {_short(first)} and of {_short(batch.payloads[0])}"
                    )
                if table is not None and offset >= table.get(place.partition, TableSide()).next:
                    yield (
                        f"{G2}: partition {place.partition} offset {offset} is not in the table "
                        "after the flush"
                    )
        yield from _same_payloads(batch, held)


def _lost(partition: int, offset: int, batch: AckedBatch) -> str:
    return (
        f"{G1}: partition {partition} offset {offset}, acknowledged for a request that begins "
        f"with {_short(batch.payloads[0])}, is neither in the table nor in the log"
    )


def _same_payloads(batch: AckedBatch, held: list[bytes]) -> Iterator[str]:
    if len(held) != len(batch.payloads):
        return  # already said
    whole = held == list(batch.payloads)
    if whole or (len(batch.ranges) > 1 and sorted(held) == sorted(batch.payloads)):
        return
    wrong = next(pair for pair in zip(batch.payloads, held, strict=True) if pair[0] != pair[1])
    place = batch.ranges[0]
    yield (
        f"{G1}: partition {place.partition} offset {place.offset} ff. does not hold what was "
        f"acknowledged: {_short(wrong[1])} instead of {_short(wrong[0])}"
    )


def _stored_once(stored: Mapping[int, Mapping[int, Row]]) -> Iterator[str]:
    seen: dict[bytes, tuple[int, int]] = {}
    for partition, rows in stored.items():
        for offset in sorted(rows):
            payload = rows[offset].payload
            first = seen.setdefault(payload, (partition, offset))
            if first != (partition, offset):
                yield (
                    f"{G8}: {_short(payload)} is stored twice, at partition {first[0]} offset "
                    f"{first[1]} and partition {partition} offset {offset}"
                )


def _order(stored: Mapping[int, Mapping[int, Row]]) -> Iterator[str]:
    """Check that messages of one sender stay in the order sent, and times never go back."""
    for partition, rows in stored.items():
        last: dict[bytes, int] = {}
        time_us = 0
        for offset in sorted(rows):
            row = rows[offset]
            sender, number = split_payload(row.payload)
            if number <= last.get(sender, -1):
                yield (
                    f"{ORDER}: partition {partition} offset {offset}: {sender.decode()} number "
                    f"{number} after {last[sender]}"
                )
            last[sender] = number
            if row.time_us < time_us:
                yield f"{ORDER}: partition {partition} offset {offset}: tw_time goes back"
            time_us = row.time_us


def _commit_ids(commit_ids: Sequence[str]) -> Iterator[str]:
    for commit_id in sorted({each for each in commit_ids if commit_ids.count(each) > 1}):
        yield f"{G2}: commit {commit_id} is in the table twice"


def make_payload(sender: str, number: int, size: int = 0) -> bytes:
    """Make a payload that is unique and tells its sender and its place in the order sent."""
    return f"{sender}:{number:09d}:".encode().ljust(size, b".")


def split_payload(payload: bytes) -> tuple[bytes, int]:
    """Return sender and number of a payload; a foreign payload is its own sender."""
    sender, _, rest = payload.partition(b":")
    number = rest.partition(b":")[0]
    return (sender, int(number)) if number.isdigit() else (payload, 0)


def _short(payload: bytes) -> str:
    text = payload[:40].decode(errors="replace")
    return f"{text!r}..." if len(payload) > 40 else repr(text)
