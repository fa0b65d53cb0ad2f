"""The checker must find each violation that is planted, and nothing in a clean history."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tidewater_testing.checker import AckedBatch, Range, make_payload, violations
from tidewater_testing.evidence import Evidence, LogSide, Row, TableSide

ROWS = 10
FRONTIER = 6


def _row(number: int, sender: str = "a") -> Row:
    return Row(number, make_payload(sender, number), 1_000 + number)


def _clean() -> Evidence:
    rows = tuple(_row(number) for number in range(ROWS))
    table = TableSide(next=FRONTIER, epoch=1, rows=rows[:FRONTIER])
    return Evidence({0: table}, {0: LogSide(rows[2:])}, ("c1", "c2"))


def _acked() -> list[AckedBatch]:
    payloads = [make_payload("a", number) for number in range(ROWS)]
    return [
        AckedBatch(tuple(payloads[first : first + 2]), (Range(0, first, 2),))
        for first in range(0, ROWS, 2)
    ]


def _table(change: Callable[[TableSide], TableSide]) -> Evidence:
    clean = _clean()
    return replace(clean, table={0: change(clean.table[0])})


def _log(change: Callable[[tuple[Row, ...]], tuple[Row, ...]]) -> Evidence:
    clean = _clean()
    return replace(clean, log={0: LogSide(change(clean.log[0].rows))})


def test_a_clean_history_has_no_violation() -> None:
    """Table and log overlap, nothing is wrong."""
    assert violations(_clean(), _acked()) == []


def test_a_drained_log_and_retention_are_clean() -> None:
    """An empty log after a flush is fine, and so are rows below `start`, kept or deleted."""
    rows = tuple(_row(number) for number in range(ROWS))
    kept = TableSide(next=ROWS, start=4, rows=rows[3:])
    later = [batch for batch in _acked() if batch.ranges[0].offset >= 4]
    assert violations(Evidence({0: kept}, {0: LogSide()}), later, flushed=True) == []


def _duplicate(table: TableSide) -> TableSide:
    rows = (*table.rows, table.rows[3])
    return replace(table, rows=tuple(sorted(rows, key=lambda row: row.offset)))


PLANTED = {
    "duplicate row": (_table(_duplicate), "G2 Once in the table: partition 0 offset 3 twice"),
    "hole in the table": (
        _table(lambda table: replace(table, rows=table.rows[:2] + table.rows[4:])),
        "G2 Once in the table: partition 0 offsets 2 to 3 are missing",
    ),
    "frontier too high": (
        _table(lambda table: replace(table, next=8)),
        "G2 Once in the table: partition 0 offsets 6 to 7 are missing before the frontier",
    ),
    "frontier too low": (
        _table(lambda table: replace(table, next=5)),
        "G2 Once in the table: partition 0 offset 5 is past the frontier 5",
    ),
    "rows before the first are gone": (
        _table(lambda table: replace(table, rows=table.rows[1:])),
        "G2 Once in the table: partition 0 offsets 0 to 0 are missing",
    ),
    "acknowledged and lost at the end": (
        _log(lambda rows: rows[:-1]),
        "G1 Durable: partition 0 offset 9, acknowledged",
    ),
    "hole in the log": (
        _log(lambda rows: rows[:5] + rows[6:]),
        "G1 Durable: partition 0: the log goes from offset 6 to 8",
    ),
    "log begins after the frontier": (
        _log(lambda rows: rows[6:]),
        "G1 Durable: partition 0 offsets 6 to 7 are neither in the table nor log",
    ),
    "log ends before the frontier": (
        _log(lambda rows: rows[:2]),
        "G1 Durable: partition 0: the log ends at 4, before the frontier 6",
    ),
    "another message at an acknowledged offset": (
        _log(lambda rows: (*rows[:-1], _row(9, "z"))),
        "G1 Durable: partition 0 offset 8 ff. does not hold what was acknowledged",
    ),
    "table and log disagree": (
        _table(lambda table: replace(table, rows=(*table.rows[:-1], _row(5, "z")))),
        "G1 Durable: partition 0 offset 5 is 'a:000000005:' in the log and 'z:000000005:'",
    ),
    "another time in the table": (
        _table(lambda table: replace(table, rows=(*table.rows[:-1], replace(_row(5), time_us=9)))),
        "G1 Durable: partition 0 offset 5 has another tw_time",
    ),
    "a re-send was stored again": (
        _log(lambda rows: (*rows, replace(_row(9), offset=10))),
        "G8 Idempotent producers: 'a:000000009:' is stored twice",
    ),
    "order turned round": (
        _log(lambda rows: (*rows[:-2], replace(_row(9), offset=8), replace(_row(8), offset=9))),
        "order within a partition: partition 0 offset 9: a number 8 after 9",
    ),
    "time goes back": (
        _log(lambda rows: (*rows[:-1], replace(rows[-1], time_us=5))),
        "order within a partition: partition 0 offset 9: tw_time goes back",
    ),
    "one commit twice": (
        replace(_clean(), commit_ids=("c1", "c1")),
        "G2 Once in the table: commit c1 is in the table twice",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str) -> None:
    """Each line quotes the promise and says where."""
    evidence, expected = PLANTED[name]
    found = violations(evidence, _acked())
    assert any(line.startswith(expected) for line in found), found


def test_a_flush_that_left_rows_in_the_log_is_found() -> None:
    """After a flush, the log alone is not enough."""
    found = violations(_clean(), _acked(), flushed=True)
    assert "G2 Once in the table: partition 0 offset 6 is not in the table after the flush" in found


def test_an_offset_given_to_two_requests_is_found() -> None:
    """Two answers must never name the same offset."""
    twice = [*_acked(), AckedBatch((make_payload("b", 0),), (Range(0, 4, 1),))]
    assert any("offset 4 was given to two requests" in line for line in violations(_clean(), twice))


def test_an_answer_with_a_wrong_count_is_found() -> None:
    """The ranges of an answer hold as many messages as were sent."""
    wrong = [AckedBatch((make_payload("a", 0),), (Range(0, 0, 2),))]
    assert violations(_clean(), wrong)[0].startswith("G1 Durable: 1 messages were answered with")


def test_a_request_over_several_partitions_is_one_set() -> None:
    """Which message went where is free; that all are there is not."""
    first = (Row(0, make_payload("a", 0), 1), Row(1, make_payload("a", 2), 1))
    evidence = Evidence({}, {0: LogSide(first), 1: LogSide((Row(0, make_payload("a", 1), 1),))})
    payloads = tuple(make_payload("a", number) for number in range(3))
    ranges = (Range(0, 0, 2), Range(1, 0, 1))
    assert violations(evidence, [AckedBatch(payloads, ranges)]) == []
    foreign = (*payloads[:2], make_payload("a", 7))
    assert violations(evidence, [AckedBatch(foreign, ranges)])[0].startswith("G1 Durable")
