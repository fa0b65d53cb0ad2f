"""The arithmetic of acknowledged ranges against a plain set of numbers (G4)."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewater_core.errors import Corrupt, Invalid
from tidewater_worker.dispatch.ackid import AckId
from tidewater_worker.dispatch.cursor import (
    FAILURES_MAX,
    Cursor,
    Progress,
    decode_failures,
    decode_progress,
    decode_ranges,
    encode_failures,
    encode_ranges,
)

TOP = 64
offsets = st.integers(0, TOP - 1)
add = st.tuples(st.just("add"), offsets, st.integers(0, 12))
remove = st.tuples(st.just("remove"), offsets, st.just(1))
steps = st.lists(st.one_of(add, add, remove), max_size=40)


def run(start: int, script: list[tuple[str, int, int]]) -> tuple[Cursor, set[int]]:
    cursor, model = Cursor(start), set(range(start))
    for op, offset, count in script:
        if op == "add":
            new = set(range(offset, offset + count))
            assert cursor.add(offset, offset + count) == (not new <= model)
            model |= new
        else:
            assert cursor.remove(offset) == (offset in model)
            model.discard(offset)
        check(cursor, model)
    return cursor, model


def check(cursor: Cursor, model: set[int]) -> None:
    """Everything that a cursor says is what the set says, and it is written the one way."""
    first_open = next(i for i in range(TOP * 2) if i not in model)
    assert cursor.next == first_open
    at = cursor.next
    for start, end in cursor.ranges:
        assert at < start < end, "sorted, not empty, not touching"
        at = end
    assert {i for i in range(TOP * 2) if i in cursor} == {i for i in model if i < TOP * 2}


@settings(max_examples=400)
@given(st.integers(0, 20), steps, offsets, offsets)
def test_a_cursor_is_a_set(
    start: int, script: list[tuple[str, int, int]], low: int, high: int
) -> None:
    cursor, model = run(start, script)
    wanted = {i for i in range(low, high) if i not in model}
    got = [i for a, b in cursor.open_ranges(low, high) for i in range(a, b)]
    assert got == sorted(wanted)
    assert cursor.count_open(high) == sum(i not in model for i in range(high))
    first = next(i for i in range(low, TOP * 2) if i not in model)
    assert cursor.acknowledged_from(low) == first
    twin = cursor.copy()
    twin.add(TOP * 2, TOP * 2 + 1)
    check(cursor, model)


@settings(max_examples=200)
@given(st.integers(0, 2**62), steps)
def test_what_is_stored_is_read_back(base: int, script: list[tuple[str, int, int]]) -> None:
    cursor = Cursor(base)
    for op, offset, count in script:
        if op == "add":
            cursor.add(base + offset, base + offset + count)
        else:
            cursor.remove(base + offset)
    progress = Progress("s", "t", cursor.next, encode_ranges(cursor), 3, "token")
    read = decode_progress(msgspec.json.encode(progress))
    assert read == progress
    again = decode_ranges(read.next, read.beyond)
    assert (again.next, again.ranges) == (cursor.next, cursor.ranges)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"subscription":"s","topic":"t","next":1,"v":2}',
        b'{"subscription":"s","topic":"t","next":"x"}',
    ],
)
def test_a_cursor_that_cannot_be_read_is_corrupt(data: bytes) -> None:
    """G7: it is never taken for "nothing acknowledged yet"."""
    with pytest.raises(Corrupt):
        decode_progress(data)


@pytest.mark.parametrize(("start", "numbers"), [(0, [1]), (0, [0, 1]), (0, [1, -1]), (-1, [])])
def test_impossible_ranges_are_corrupt(start: int, numbers: list[int]) -> None:
    with pytest.raises(Corrupt):
        decode_ranges(start, numbers)


numbers64 = st.integers(0, 2**63 - 1)


@given(numbers64, st.integers(0, 2**31 - 1), numbers64, numbers64, numbers64)
def test_ack_ids_are_read_back(
    epoch: int, partition: int, generation: int, offset: int, lease: int
) -> None:
    ack_id = AckId(epoch, partition, generation, offset, lease)
    assert AckId.parse(str(ack_id)) == ack_id


@given(st.text(max_size=60))
def test_other_texts_are_refused(text: str) -> None:
    try:
        ack_id = AckId.parse(text)
    except Invalid as error:
        assert error.reason == "InvalidAckId"  # noqa: PT017  (hypothesis draws both kinds)
    else:
        assert all(number >= 0 for number in ack_id)


@given(st.integers(0, 100), st.dictionaries(st.integers(100, 10**12), st.integers(1, 50)))
def test_failures_are_read_as_they_were_written(next_offset: int, failures: dict[int, int]) -> None:
    stored = encode_failures(next_offset, failures)
    assert decode_failures(next_offset, stored) == failures


def test_failures_are_bounded() -> None:
    """G6: past the bound the messages that failed most are remembered."""
    failures = {offset: 1 + (offset % 7 == 0) for offset in range(2 * FAILURES_MAX)}
    kept = decode_failures(0, encode_failures(0, failures))
    assert len(kept) == FAILURES_MAX
    assert {offset for offset, times in failures.items() if times == 2} <= kept.keys()


@pytest.mark.parametrize("numbers", [[1], [-1, 1], [0, 0], [1, 1, 1]])
def test_impossible_failures_stop_the_partition(numbers: list[int]) -> None:
    with pytest.raises(Corrupt):
        decode_failures(5, numbers)
