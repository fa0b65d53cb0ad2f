"""Every offset once: what was passed over and what was read, together."""

import numpy as np
import pytest

from tidewater_core.errors import Corrupt
from tidewater_worker.table.cover import Span, check_cover, covered_to
from tidewater_worker.table.ranges import OFFSET_MAX, Bounds


@pytest.mark.parametrize(
    ("spans", "read"),
    [
        ([(0, 10)], []),
        ([], [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        ([], [[9, 3, 5, 7, 1], [0, 2, 4, 6, 8]]),
        ([(0, 4), (6, 10)], [[5, 4]]),
        ([(2, 5), (7, 99)], [[0, 1], [6, 5]]),
    ],
)
def test_whole(spans: list[Span], read: list[list[int]]) -> None:
    check_cover(0, 0, 10, spans, [np.array(each, np.int64) for each in read])


@pytest.mark.parametrize(
    ("spans", "read", "reason", "offset"),
    [
        ([], [], "RowsMissing", 0),
        ([(1, 10)], [], "RowsMissing", 0),
        ([(0, 9)], [], "RowsMissing", 9),
        ([(0, 4), (5, 10)], [], "RowsMissing", 4),
        ([(0, 4), (6, 10)], [[5]], "RowsMissing", 4),
        ([(0, 4), (6, 10)], [[4]], "RowsMissing", 5),
        ([(0, 5), (4, 10)], [], "RowsDoubled", 4),
        ([(0, 5), (5, 10)], [[7]], "RowsDoubled", 7),
        ([(0, 10)], [[0]], "RowsDoubled", 0),
        ([(0, 8)], [[9, 8, 9]], "RowsDoubled", 9),
        ([(0, 8), (0, 8)], [[8, 9]], "RowsDoubled", 0),
    ],
)
def test_broken(spans: list[Span], read: list[list[int]], reason: str, offset: int) -> None:
    with pytest.raises(Corrupt, match=f"offset {offset} of partition 3") as caught:
        check_cover(3, 0, 10, spans, [np.array(each, np.int64) for each in read])
    assert caught.value.reason == reason


def test_how_far() -> None:
    assert covered_to(3, []) == 3
    assert covered_to(3, [(0, 5), (5, 7), (8, 9)]) == 7
    assert covered_to(3, [(4, 5)]) == 3


def test_only_rows_whose_offsets_are_certain_are_passed_over_unread() -> None:
    def span(
        partitions: Span, offsets: Span, rows: int, times: Span = (0, OFFSET_MAX)
    ) -> Span | None:
        return Bounds(partitions, offsets, times).span(1, rows)

    assert span((1, 1), (10, 19), 10) == (10, 20)
    assert span((1, 1), (10, 19), 9) is None, "one is missing, or elsewhere"
    assert span((1, 1), (10, 19), 11) is None, "one is there twice"
    assert span((0, 1), (10, 19), 10) is None, "some may be another partition's"
    assert span((2, 2), (10, 19), 10) is None
    assert span((-1, 7), (0, OFFSET_MAX), 10) is None, "nobody has written bounds"
