"""Which segments may go."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidewater_worker.log.deleter import (
    Retention,
    cool_segment,
    plan_cooling,
    plan_deletions,
)
from tidewater_worker.log.index import SparseIndex
from tidewater_worker.log.reader import segment_name
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


@pytest.mark.parametrize(
    ("frontier", "keep", "goes"),
    [
        (35, 0, [0, 10, 20]),
        (35, 1, [0, 10]),
        (35, 150, [0]),
        (35, 10**9, []),
        (25, 0, [0, 10]),
        (25, 100, [0]),  # what is not in the table stays anyway, and does not count
        (0, 0, []),
    ],
)
def test_what_need_not_be_in_memory(frontier: int, keep: int, goes: list[int]) -> None:
    found = plan_cooling(SEGMENTS, frontier, keep)
    assert [each.base_offset for each in found] == goes


def test_each_leaves_memory_once() -> None:
    segments = [segment(number, number + 1) for number in range(6)]
    for count in range(2, 7):
        for each in plan_cooling(segments[:count], 6, 100):
            assert each.is_cached
            each.is_cached = False
    assert [each.is_cached for each in segments] == [False] * 4 + [True, True]


def test_a_cooled_segment_is_still_there(tmp_path: Path) -> None:
    path = tmp_path / segment_name(7)
    data = bytes(range(256)) * mmap.PAGESIZE
    path.write_bytes(data)
    cool_segment(tmp_path, 7)
    assert path.read_bytes() == data
    with pytest.raises(FileNotFoundError):
        cool_segment(tmp_path, 8)
