"""The judge of an audit: planted gaps, duplicates and times that go back, without Spark."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tidewater_pipeline.jobs.audit import (
    Chunk,
    Finding,
    Lost,
    Place,
    chunk_query,
    counts,
    judge,
    recorded,
    unlisted,
)


def chunks_of(rows: list[tuple[int, int]], size: int, partition: int = 0) -> list[Chunk]:
    """Do what the query does: cut, sort, and compare neighbours."""
    by_chunk: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        by_chunk.setdefault(row[0] // size, []).append(row)
    made = []
    for cut in by_chunk.values():
        cut.sort()
        places = tuple(
            Place(before[0], after[0], after[1] < before[1])
            for before, after in pairwise(cut)
            if after[0] != before[0] + 1 or after[1] < before[1]
        )
        made.append(
            Chunk(
                partition, len(cut), cut[0][0], cut[-1][0], cut[0][1], cut[-1][1],
                len(places), places,
            )
        )  # fmt: skip
    random.Random(1).shuffle(made)
    return made


def rows(*offsets: int) -> list[tuple[int, int]]:
    return [(offset, offset) for offset in offsets]


def test_a_whole_table_has_no_findings() -> None:
    assert judge(chunks_of(rows(*range(50)), 7), {0: 0}, {0: 50}) == []
    assert judge([], {}, {}) == []
    assert judge([], {0: 0}, {0: 0}) == []


def test_gaps_are_named_exactly_also_across_chunks() -> None:
    found = judge(chunks_of(rows(*range(3), *range(25, 40)), 7), {0: 0}, {0: 45})
    assert found == [Finding("missing", 0, 3, 24), Finding("missing", 0, 40, 44)]
    assert str(found[0]) == "G2 Once in the table: partition 0 offsets 3 to 24 missing"


def test_missing_from_the_start_and_an_empty_partition() -> None:
    assert judge(chunks_of(rows(5, 6), 7), {0: 3}, {0: 7}) == [Finding("missing", 0, 3, 4)]
    assert judge([], {1: 2}, {1: 4}) == [Finding("missing", 1, 2, 3)]


def test_duplicates_are_one_range() -> None:
    found = judge(chunks_of(rows(*range(20), *range(5, 9)), 7), {0: 0}, {0: 20})
    assert found == [Finding("twice", 0, 5, 8)]


def test_rows_past_the_frontier_and_of_an_unknown_partition() -> None:
    assert judge(chunks_of(rows(*range(9)), 7), {0: 0}, {0: 7}) == [
        Finding("past-frontier", 0, 7, 8)
    ]
    assert judge(chunks_of(rows(0, 1), 7, 3), {}, {}) == [Finding("past-frontier", 3, 0, 1)]


def test_a_row_far_past_the_frontier_makes_nothing_missing() -> None:
    """It made two million offsets missing that nobody had given yet."""
    near, far = Chunk(0, 100, 0, 99, 0, 99), Chunk(0, 1, 2_000_000, 2_000_000, 100, 100)
    found = judge([near, far], {0: 0}, {0: 100})
    assert found == [Finding("past-frontier", 0, 2_000_000, 2_000_000)]
    assert counts(found, [near, far], {}, {0: 100}) == {"missing": 0, "twice": 0}
    within = Chunk(0, 3, 0, 9, 0, 9, 2, (Place(0, 4, False), Place(4, 9, False)), missing=7)
    assert judge([within], {0: 0}, {0: 3}) == [
        Finding("past-frontier", 0, 4, 4),
        Finding("missing", 0, 1, 2),
        Finding("past-frontier", 0, 9, 9),
    ]
    cut = Chunk(0, 4, 0, 99, 0, 9, 3, (Place(0, 4, False),), missing=96)
    found = judge([cut], {0: 0}, {0: 6})
    assert Finding("past-frontier", 0, 99, 99) in found
    assert counts(found, [cut], {}, {0: 6})["missing"] == 3 + 1


def test_a_start_past_the_frontier_is_a_finding_of_its_own() -> None:
    below = Chunk(0, 100, 0, 99, 0, 99)
    assert judge([], {0: 150}, {0: 100}) == [Finding("start-past-frontier", 0, 100, 149)]
    kinds = {each.kind for each in judge([below], {0: 150}, {0: 100})}
    assert kinds == {"before-start", "start-past-frontier"}
    assert "below the start" in str(Finding("start-past-frontier", 0, 100, 149))


def test_time_that_goes_back_also_across_chunks() -> None:
    inside = [(0, 5), (1, 4), (2, 6)]
    assert judge(chunks_of(inside, 7), {}, {0: 3}) == [Finding("time-order", 0, 1, 1)]
    across = [(6, 9), (7, 8)]
    assert judge(chunks_of(across, 7), {0: 6}, {0: 8}) == [Finding("time-order", 0, 7, 7)]


def test_a_chunk_that_names_too_few_places_says_so() -> None:
    chunk = Chunk(0, 3, 0, 9, 0, 9, wrong=2, places=(Place(0, 5, False),))
    assert [each.kind for each in judge([chunk], {}, {0: 10})] == ["missing", "more"]


def test_a_row_before_the_first_offset_is_found() -> None:
    """One at offset -1 was passed over: nothing seemed to be missing."""
    found = judge(chunks_of(rows(-1, 0, 1), 7), {0: 0}, {0: 2})
    assert found == [Finding("before-start", 0, -1, -1)]
    assert str(found[0]) == "G2 Once in the table: partition 0 offset -1 before the first offset"
    apart = judge([Chunk(0, 2, -5, 1, 0, 1, 1, (Place(-5, 1, False),))], {0: 0}, {0: 2})
    assert apart == [Finding("before-start", 0, -5, -1), Finding("missing", 0, 0, 0)]


def test_rows_without_a_time_are_a_finding() -> None:
    """They ended the audit with a TypeError."""
    untimed = Chunk(0, 3, 0, 2, None, None, untimed=(0, 2))
    after = Chunk(0, 2, 3, 4, 9, 9)
    assert judge([untimed, after], {0: 0}, {0: 5}) == [Finding("no-time", 0, 0, 2)]
    assert "without a time" in str(Finding("no-time", 0, 0, 2))


def test_counts_are_exact_past_the_places_that_are_listed() -> None:
    """Of (0 … 100, every tenth) one place is listed; 60 to 69 were given up with a volume."""
    listed = (Place(0, 10, False),)
    chunk = Chunk(0, 11, 0, 100, 0, 9, wrong=10, places=listed, missing=90, twice=0)
    assert unlisted([chunk], {}) == 81
    assert unlisted([chunk], {0: ((61, 70),)}) == 72
    found = judge([chunk], {0: 0}, {0: 101}, {0: ((61, 70),)})
    assert [each.kind for each in found] == ["missing", "more"], "what is not listed is no row"
    doubled = Chunk(0, 9, 0, 2, 0, 9, wrong=6, places=(Place(0, 0, False),), twice=6)
    found = judge([doubled], {0: 0}, {0: 3})
    assert counts(found, [doubled], {}) == {"missing": 0, "twice": 6}
    assert unlisted([Chunk(0, 2, 0, 9, 0, 9, 1, (Place(0, 9, False),), missing=8)], {}) == 0


def test_an_offset_that_is_there_three_times_is_two_rows_too_many() -> None:
    """It counted as one: the ranges of findings were summed."""
    again = (Place(1, 1, False),) * 2
    chunk = Chunk(0, 5, 0, 2, 0, 9, wrong=2, places=again, twice=2)
    found = judge([chunk], {0: 0}, {0: 3})
    assert found == [Finding("twice", 0, 1, 1)]
    assert counts(found, [chunk], {}) == {"missing": 0, "twice": 2}


def test_what_retention_cut_is_not_read() -> None:
    query = chunk_query("t", 7, {0: 0, 1: 40}, 10)
    assert "NOT (tw_partition = 1 AND tw_offset < 40)" in query
    assert "tw_partition = 0" not in query


@given(
    st.sets(st.integers(0, 59)),
    st.lists(st.integers(0, 59), max_size=6),
    st.integers(1, 30),
)
def test_every_planted_gap_and_duplicate_is_found(
    lost: set[int], doubled: list[int], size: int
) -> None:
    kept = [offset for offset in range(60) if offset not in lost]
    extra = [offset for offset in doubled if offset not in lost]
    found = judge(chunks_of(rows(*kept, *extra), size), {0: 0}, {0: 60})
    named = {"missing": set[int](), "twice": set[int]()}
    for each in found:
        named[each.kind] |= set(range(each.first, each.last + 1))
    assert named == {"missing": lost, "twice": set(extra)}


def test_a_recorded_gap_is_no_finding_but_its_neighbours_are() -> None:
    """Offsets 10 to 19 were given up with a volume; 8, 9 and 20 to 24 simply are not there."""
    kept = rows(*range(8), *range(25, 40))
    gaps = {0: ((10, 20),)}
    assert judge(chunks_of(kept, 7), {0: 0}, {0: 40}, gaps) == [
        Finding("missing", 0, 8, 9),
        Finding("missing", 0, 20, 24),
    ]
    assert recorded(gaps, {0: 0}, {0: 40}) == [Lost(0, 10, 19)]


def test_gaps_at_the_frontier_below_the_start_and_of_other_partitions() -> None:
    gaps = {0: ((2, 4), (7, 10)), 1: ((0, 5),), 9: ((0, 3),)}
    assert judge(chunks_of(rows(4, 5, 6), 7), {0: 3}, {0: 10, 1: 5}, gaps) == []
    assert recorded(gaps, {0: 3}, {0: 10, 1: 5}) == [Lost(0, 3, 3), Lost(0, 7, 9), Lost(1, 0, 4)]


def test_a_row_within_a_recorded_gap_is_a_finding() -> None:
    found = judge(
        chunks_of(rows(*range(6), 8, *range(10, 20)), 7), {0: 0}, {0: 20}, {0: ((6, 10),)}
    )
    assert found == [Finding("in-gap", 0, 8, 8)]
    assert "recorded as lost" in str(found[0])


@given(
    st.sets(st.integers(0, 59)),
    st.lists(st.tuples(st.integers(0, 59), st.integers(1, 9)), max_size=3),
    st.integers(1, 30),
)
def test_what_is_missing_outside_recorded_gaps_is_found(
    lost: set[int], drawn: list[tuple[int, int]], size: int
) -> None:
    spans = tuple(sorted((start, min(60, start + length)) for start, length in drawn))
    given_up = {offset for start, end in spans for offset in range(start, end)}
    kept = [offset for offset in range(60) if offset not in lost]
    found = judge(chunks_of(rows(*kept), size), {0: 0}, {0: 60}, {0: spans})
    named = {"missing": set[int](), "in-gap": set[int]()}
    for each in found:
        named[each.kind] |= set(range(each.first, each.last + 1))
    assert named == {"missing": lost - given_up, "in-gap": given_up - lost}
