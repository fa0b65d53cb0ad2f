"""The checkers see what they are there for; needs no cluster."""

from dataclasses import replace
from typing import Any

import pytest

from e2e import guarantees, truth
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


# ---- conditions

LEADER = "operator-a"
SECONDS = range(0, 120, 2)
TOLD = {
    "topic/watched": {"Ready": "True", "Assigned": "True", "Committing": "True",
                      "FreshnessMet": "True", "Maintained": "Unknown", "Degraded": "False",
                      "Paused": "False"},
    "subscription/watcher": {"Ready": "True", "Active": "True", "LagBounded": "True",
                             "Paused": "False"},
    "pool/default": {"Ready": "True", "Scaling": "False", "Degraded": "False",
                     "VolumeGrown": "True", "Paused": "False"},
}  # fmt: skip


def _object(kind: str, told: dict[str, str], generation: int = 1) -> dict[str, Any]:
    conditions = [
        {"type": type_, "status": status, "reason": "Why", "observedGeneration": 1,
         "lastTransitionTime": "1970-01-01T00:00:00Z"}
        for type_, status in told.items()
    ]  # fmt: skip
    return {
        "kind": kind,
        "metadata": {"generation": generation},
        "spec": {"replicas": 1},
        "status": {"conditions": conditions, "observedGeneration": 1},
    }


def _seen(
    told: dict[str, str] | None = None,
    *,
    name: str = "topic/watched",
    holders: tuple[str, ...] = (LEADER,),
    generation: int = 1,
    frontier: bool = True,
    sent: int = 200,
) -> truth.Seen:
    """Return two minutes in which all was well but for what is given."""
    says = {**TOLD, name: {**TOLD[name], **(told or {})}}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    objects = {each: _object(each, said, generation) for each, said in says.items()}
    objects["pod/tidewater-default-0"] = {"metadata": {}, "status": ready}
    objects["statefulset/tidewater-default"] = {"spec": {"replicas": 1}}
    report = {"topics": {"watched": {"0": "running", "1": "running", "2": "running"}},
              "subscriptions": ["watcher"]}  # fmt: skip
    looks = [truth.Look(at, objects, holders[at // 20 % len(holders)], at, at) for at in SECONDS]
    rounds = [
        truth.Round(at, {"0": report}, [(sent, "", at if sent == 200 else None)] * 3, pulled=True)
        for at in SECONDS
    ]
    place = {at: at + 1 if frontier else 0 for at in SECONDS}
    frontiers = [truth.Frontier(at + 1, dict.fromkeys(range(3), place[at])) for at in SECONDS]
    return truth.Seen(looks, rounds, frontiers)


def test_true_conditions_hold() -> None:
    assert truth.violations(_seen()) == []
    assert truth.judged(_seen()) == sum(at >= truth.DELAY_S for at in SECONDS)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("topic/watched", {"Ready": "False"}),
        ("topic/watched", {"Ready": "Unknown"}),
        ("topic/watched", {"Assigned": "False"}),
        ("topic/watched", {"Committing": "False"}),
        ("topic/watched", {"FreshnessMet": "Unknown"}),
        ("topic/watched", {"Maintained": "False"}),
        ("topic/watched", {"Degraded": "True"}),
        ("subscription/watcher", {"Active": "False"}),
        ("subscription/watcher", {"LagBounded": "False"}),
        ("pool/default", {"Ready": "False"}),
        ("pool/default", {"Scaling": "True"}),
        ("pool/default", {"VolumeGrown": "False"}),
    ],
)
def test_a_condition_that_lies(name: str, told: dict[str, str]) -> None:
    ((type_, status),) = told.items()
    claim = f"{truth.CLAIM}: {name} {type_}={status} (Why) while"
    assert _first(truth.violations(_seen(told, name=name))).startswith(claim)


def test_a_table_that_stands_still_and_messages_that_are_refused() -> None:
    found = "\n".join(truth.violations(_seen(frontier=False)))
    assert "Committing=True" in found
    assert "FreshnessMet=True" in found
    assert "Ready=True" in _first(truth.violations(_seen(sent=503)))


def test_a_generation_that_is_not_observed() -> None:
    assert "observed generation 1 of 2" in _first(truth.violations(_seen(generation=2)))


def test_while_nobody_leads_conditions_may_be_old() -> None:
    seen = _seen({"Ready": "False"}, holders=(LEADER, "operator-b"))
    assert truth.violations(seen) == []
    assert truth.judged(seen) == 0


def test_a_change_that_is_dated_wrongly() -> None:
    before, after = _seen().looks, _seen({"Ready": "False"}).looks
    seen = truth.Seen([*before[:30], *after[30:]], ())
    (found,) = truth.transitions(seen)
    assert "topic/watched Ready changed between" in found
