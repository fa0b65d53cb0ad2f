"""Which snapshots a job holds: a value that is none, or a job that is long gone, holds nothing."""

import json

import pytest

from tidewater_core.hold import HOLD_MS_MAX, Hold, held_from
from tidewater_core.names import HOLD

NOW_MS = 1_700_000_000_000


def held(text: str) -> int | None:
    return held_from({HOLD: text}, NOW_MS)


def test_what_is_written_is_read() -> None:
    hold = Hold(7, NOW_MS + 1)
    assert Hold.parse(hold.to_property()) == hold
    assert held(hold.to_property()) == 7


@pytest.mark.parametrize("ahead_ms", [-HOLD_MS_MAX, 0, HOLD_MS_MAX + 1, 10**15])
def test_a_hold_that_ran_out_or_ends_too_late_counts_for_nothing(ahead_ms: int) -> None:
    assert held(Hold(7, NOW_MS + ahead_ms).to_property()) is None


@pytest.mark.parametrize(
    "value",
    [None, 7, [], {}, {"sequence": 1}, {"sequence": "1", "until_ms": NOW_MS + 1},
     {"sequence": True, "until_ms": NOW_MS + 1}, {"sequence": 1, "until_ms": 1e400}],
)  # fmt: skip
def test_what_nobody_can_read_holds_nothing(value: object) -> None:
    assert held(json.dumps(value)) is None
    assert held("nonsense {") is None
    assert held("[" * 100_000) is None
    assert held_from({}, NOW_MS) is None
