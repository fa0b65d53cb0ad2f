"""Which segments may go."""

from dataclasses import dataclass

import pytest

from tidewater_worker.log.deleter import Retention, plan_deletions
from tidewater_worker.log.index import SparseIndex
from tidewater_worker.log.recover import Segment

HOUR = 3_600_000_000


def segment(base: int, end: int, size: int = 100, sealed_at_us: int = 0) -> Segment:
    index = SparseIndex()
    index.end_offset, index.size = end, size
    return Segment(base, index, sealed_at_us)


@dataclass(frozen=True)
class Case:
    """What is there, and what goes."""

    why: str
    frontier: int
    retention: Retention
    now_us: int
    goes: list[int]


SEGMENTS = [segment(0, 10), segment(10, 20, sealed_at_us=HOUR), segment(20, 30), segment(30, 35)]


@pytest.mark.parametrize(
    "case",
    [
        Case("nothing is committed", 0, Retention(0, 0), 99 * HOUR, []),
        Case("committed but young and small", 35, Retention(9 * HOUR, 10**9), HOUR, []),
        Case("old, and committed in part", 15, Retention(HOUR, 10**9), 99 * HOUR, [0]),
        Case("a segment goes only as a whole", 19, Retention(HOUR, 10**9), 99 * HOUR, [0]),
        Case("an older one that stays keeps the rest", 35, Retention(HOUR, 10**9), 2 * HOUR, [0]),
        Case("too large", 35, Retention(99 * HOUR, 250), HOUR, [0, 10]),
        Case("the one being written stays", 35, Retention(0, 0), 99 * HOUR, [0, 10, 20]),
    ],
    ids=lambda case: case.why,
)
def test_plan(case: Case) -> None:
    doomed = plan_deletions(SEGMENTS, case.frontier, case.retention, case.now_us)
    assert [segment.base_offset for segment in doomed] == case.goes
