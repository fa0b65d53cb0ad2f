"""The checkers see what they are there for; needs no cluster."""

from dataclasses import replace

import pytest

from e2e import guarantees
from e2e.history import History, Message, Snapshot
from tidewater_testing.checker import AckedBatch, Range
from tidewater_testing.evidence import Evidence, Row, TableSide
from tidewater_testing.web import Answer

VALUES = (b"a", b"b", b"c")
ROWS = tuple(Row(offset, value) for offset, value in enumerate(VALUES))
GOOD = History(
    topic="shop/orders",
    acked=(AckedBatch(VALUES, (Range(0, 0, 3),)),),
    evidence=Evidence(table={0: TableSide(next=3, epoch=2, rows=ROWS)}),
    stream={0: tuple(Message(0, row.offset, row.payload) for row in ROWS)},
    snapshots=(Snapshot(1, {0: 1}), Snapshot(2, {0: 2})),
)


def _first(found: list[str]) -> str:
    assert found, "no violation was seen"
    return found[0]


def test_a_good_history_holds() -> None:
    guarantees.hold(GOOD)


def test_a_message_that_is_not_in_the_table() -> None:
    table = {0: TableSide(next=2, epoch=2, rows=ROWS[:2])}
    found = guarantees.violations(replace(GOOD, evidence=Evidence(table=table)))
    assert _first(found).startswith("G1 Durable: partition 0 offset 2")


def test_a_row_twice() -> None:
    table = {0: TableSide(next=3, epoch=2, rows=(*ROWS[:2], ROWS[1], ROWS[2]))}
    found = guarantees.violations(replace(GOOD, evidence=Evidence(table=table)))
    assert _first(found) == "G2 Once in the table: partition 0 offset 1 twice"


def test_a_message_that_is_not_read() -> None:
    stream = {0: (GOOD.stream[0][0], GOOD.stream[0][2])}
    found = guarantees.violations(replace(GOOD, stream=stream))
    assert _first(found) == "G3 One stream: partition 0 offsets 1 to 1 not seen"


def test_a_message_read_twice() -> None:
    stream = {0: (*GOOD.stream[0], GOOD.stream[0][2])}
    found = guarantees.violations(replace(GOOD, stream=stream))
    assert _first(found).startswith("G3 One stream: partition 0 offset 2 twice")


def test_another_value_read() -> None:
    stream = {0: (*GOOD.stream[0][:2], Message(0, 2, b"x"))}
    found = guarantees.violations(replace(GOOD, stream=stream))
    assert "is not what was acknowledged" in _first(found)


def test_a_zombie_commits() -> None:
    snapshots = (*GOOD.snapshots, Snapshot(3, {0: 1}))
    found = guarantees.violations(replace(GOOD, snapshots=snapshots))
    assert _first(found) == "G5 One owner: partition 0 has epoch 1 in snapshot 3, after epoch 2"


def test_deliveries() -> None:
    sent = GOOD.stream[0]
    again = [(sent[0], True), (sent[1], False), (sent[1], True), (sent[2], True)]
    assert not list(guarantees.delivered_until_acked(sent, again))
    after_ack = list(guarantees.delivered_until_acked(sent, [*again, (sent[0], True)]))
    assert after_ack[0].endswith("partition 0 offset 0 was delivered after its ack")
    missing = list(guarantees.delivered_until_acked(sent, again[:3]))
    assert missing[0].endswith("partition 0 offset 2 never delivered")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(200, {}, b"{}"), "is 200"),
        (Answer(503, {"retry-after": "1"}, b"{}"), "gives no reason"),
        (Answer(429, {}, b'{"error": {"reason": "Busy"}}'), "does not say when"),
        (Answer(429, {"retry-after": "1"}, b'{"error": {"reason": "Busy"}}'), None),
        (Answer(413, {}, b'{"error": {"reason": "TooLarge"}}'), None),
    ],
)
def test_push_back(answer: Answer, complaint: str | None) -> None:
    found = list(guarantees.pushed_back(answer))
    if complaint is None:
        assert not found
    else:
        assert complaint in " ".join(found)


def test_stopped_partitions_and_strangers() -> None:
    silent = {0: {"state": "stopped"}, 1: {"state": "stopped", "reason": "RowsLost"}}
    assert list(guarantees.stopped_with_reason(silent)) == [
        "G7 Nothing is silently skipped: partition 0 is stopped without a reason"
    ]
    assert not list(guarantees.refused_stranger(Answer(403, {}, b"")))
    assert list(guarantees.refused_stranger(Answer(200, {}, b"")))
