"""What a frontier allows: a table of cases."""

import pytest

from tidewater_core.errors import Corrupt
from tidewater_worker.table.frontier import (
    Claim,
    EpochFirst,
    Fenced,
    Frontier,
    Go,
    Landed,
    MovedBack,
    Recut,
    Span,
    Verdict,
    decide,
    gap_value,
    parse_frontiers,
    parse_gaps,
    parse_starts,
)

CASES: list[tuple[str, dict[int, tuple[int, int]], dict[int, Claim], dict[int, Span], Verdict]] = [
    ("exactly there", {0: (5, 1)}, {0: Claim(1, 5)}, {0: Span(5, 9)}, Go()),
    ("nothing to write", {0: (5, 1)}, {0: Claim(1, 5)}, {}, Go()),
    ("first owner ever", {}, {0: Claim(1, None)}, {0: Span(0, 3)}, EpochFirst((0,))),
    ("epoch 0 needs no commit", {}, {0: Claim(0, 0)}, {0: Span(0, 3)}, Go()),
    ("new owner", {0: (5, 1)}, {0: Claim(2, 5)}, {0: Span(5, 9)}, EpochFirst((0,))),
    ("new owner, no rows", {0: (5, 1)}, {0: Claim(2, 5)}, {}, EpochFirst((0,))),
    (
        "only some epochs are low",
        {0: (5, 2), 1: (7, 1)},
        {0: Claim(2, 5), 1: Claim(2, 7)},
        {0: Span(5, 6)},
        EpochFirst((1,)),
    ),
    ("fenced", {0: (5, 3)}, {0: Claim(2, 5)}, {0: Span(5, 9)}, Fenced({0: 3})),
    ("fenced without rows", {0: (5, 3)}, {0: Claim(2, 5)}, {}, Fenced({0: 3})),
    ("fenced, although landed", {0: (9, 3)}, {0: Claim(2, 5)}, {0: Span(5, 9)}, Fenced({0: 3})),
    (
        "one of two fenced",
        {0: (5, 2), 1: (7, 3)},
        {0: Claim(2, 5), 1: Claim(2, 7)},
        {0: Span(5, 6), 1: Span(7, 8)},
        Fenced({1: 3}),
    ),
    ("all landed", {0: (9, 1)}, {0: Claim(1, 5)}, {0: Span(5, 9)}, Landed()),
    ("landed, and more by a twin", {0: (12, 1)}, {0: Claim(1, 5)}, {0: Span(5, 9)}, Landed()),
    ("landed under the old epoch", {0: (9, 1)}, {0: Claim(2, 5)}, {0: Span(5, 9)}, Landed()),
    ("some landed", {0: (7, 1)}, {0: Claim(1, 5)}, {0: Span(5, 9)}, Recut({0: 7})),
    (
        "one of two landed",
        {0: (9, 1), 1: (7, 1)},
        {0: Claim(1, 5), 1: Claim(1, 7)},
        {0: Span(5, 9), 1: Span(7, 8)},
        Recut({0: 9}),
    ),
    ("moved back", {0: (3, 1)}, {0: Claim(1, 5)}, {0: Span(5, 9)}, MovedBack({0: (5, 3)})),
    ("moved back to nothing", {}, {0: Claim(1, 5)}, {0: Span(5, 9)}, MovedBack({0: (5, 0)})),
    (
        "another partition moved back",
        {0: (5, 1), 1: (2, 1)},
        {0: Claim(1, 5), 1: Claim(1, 7)},
        {0: Span(5, 9)},
        MovedBack({1: (7, 2)}),
    ),
    (
        "fenced before moved back",
        {0: (3, 9)},
        {0: Claim(1, 5)},
        {0: Span(5, 9)},
        Fenced({0: 9}),
    ),
    (
        "others' partitions do not matter",
        {0: (5, 1), 4: (100, 99)},
        {0: Claim(1, 5)},
        {0: Span(5, 9)},
        Go(),
    ),
]


@pytest.mark.parametrize(
    ("found", "claims", "batch", "verdict"),
    [pytest.param(*case[1:], id=case[0]) for case in CASES],
)
def test_decide(
    found: dict[int, tuple[int, int]],
    claims: dict[int, Claim],
    batch: dict[int, Span],
    verdict: Verdict,
) -> None:
    assert decide({p: Frontier(*f) for p, f in found.items()}, claims, batch) == verdict


def test_frontiers_come_back_from_properties() -> None:
    properties = {
        "tidewater.partition.0": Frontier(7, 2).to_property(),
        "tidewater.partition.12": '{"next": 1, "epoch": 0}',
        "tidewater.start.12": "1",
        "tidewater.partition.x": "not ours",
        "write.format": "parquet",
    }
    assert parse_frontiers(properties) == {0: Frontier(7, 2), 12: Frontier(1, 0)}
    assert parse_starts(properties) == {12: 1}


@pytest.mark.parametrize(
    "text", ["", "7", "{}", '{"next": 1}', '{"next": -1, "epoch": 0}', '{"next": "1", "epoch": 0}',
             '{"next": true, "epoch": 0}', "[1,2]", '{"next": 1.5, "epoch": 0}']
)  # fmt: skip
def test_a_damaged_frontier_is_refused(text: str) -> None:
    with pytest.raises(Corrupt, match=r"tidewater.partition.3"):
        parse_frontiers({"tidewater.partition.3": text})


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "²"])
def test_a_damaged_start_is_refused(text: str) -> None:
    with pytest.raises(Corrupt, match=r"tidewater.start.3"):
        parse_starts({"tidewater.start.3": text})


@pytest.mark.parametrize(
    "text", ["", "7", "null", '[{"start":1}]', '[{"start":"1","end":2}]', '[{"start":-1,"end":2}]',
             '[{"start":5,"end":2}]']
)  # fmt: skip
def test_a_damaged_gap_is_refused(text: str) -> None:
    """The worker took negative offsets and texts for numbers, where the jobs refused the table."""
    with pytest.raises(Corrupt, match=r"tidewater.gap.3"):
        parse_gaps({"tidewater.gap.3": text})


def test_gaps_are_in_order() -> None:
    gaps = ((2, 4), (9, 12))
    assert parse_gaps({"tidewater.gap.1": gap_value(gaps[::-1])}) == {1: gaps}
