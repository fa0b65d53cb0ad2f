"""The memory tail: bounded, contiguous, and exact at its edges."""

import pyarrow as pa

from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.log.group import EncodedFrame, Rows, Submission, encode_group
from tidewater_worker.log.ipc import QuickFrames
from tidewater_worker.log.tail import COMPACT_AFTER, Tail, TailRoom
from tidewater_worker.schema import log_schema

SCHEMA = log_schema(TopicSpec())
QUICK = QuickFrames(SCHEMA)


def frames(offset: int, *values: bytes, time_us: int = 1) -> list[EncodedFrame]:
    rows = Rows([None] * len(values), [None] * len(values), list(values))
    group = [Submission(rows, 1, lambda _: None)]
    return encode_group(group, offset, time_us, SCHEMA, QUICK, offset)


def values(batches: list[pa.RecordBatch]) -> list[bytes]:
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def test_reads_from_the_frame_that_holds_the_offset() -> None:
    tail = Tail(10, 10**6)
    tail.append(frames(10, b"a", b"b"))
    tail.append(frames(12, b"c"))
    found = tail.read(11, 13, 10**6)
    assert [batch.base_offset for batch in found] == [10, 12]
    assert values([batch.batch for batch in found]) == [b"a", b"b", b"c"]


def test_nothing_below_the_start_or_at_the_end() -> None:
    tail = Tail(10, 10**6)
    tail.append(frames(10, b"a"))
    assert tail.read(9, 11, 10**6) == []
    assert tail.read(11, 99, 10**6) == []


def test_the_oldest_go_first_and_their_bytes_with_them() -> None:
    one = frames(0, b"x" * 100)[0].nbytes
    tail = Tail(0, 3 * one)
    for offset in range(COMPACT_AFTER * 2 + 5):
        tail.append(frames(offset, b"x" * 100))
        assert tail.nbytes <= 3 * one
    assert tail.end - tail.start == 3
    assert [b.base_offset for b in tail.read(tail.start, tail.end, 10**6)] == [
        tail.start,
        tail.start + 1,
        tail.start + 2,
    ]


def test_another_bound_counts_at_once() -> None:
    one = frames(0, b"x" * 100)[0].nbytes
    tail = Tail(0, 10 * one)
    for offset in range(10):
        tail.append(frames(offset, b"x" * 100))
    tail.change(3 * one)
    assert (tail.start, tail.end, tail.nbytes) == (7, 10, 3 * one)
    tail.change(5 * one)
    for offset in range(10, 20):
        tail.append(frames(offset, b"x" * 100))
    assert (tail.start, tail.end, tail.nbytes) == (15, 20, 5 * one)
    assert [b.base_offset for b in tail.read(15, 20, 10**6)] == list(range(15, 20))
    tail.change(0)
    assert (tail.start, tail.end, tail.nbytes) == (20, 20, 0)


def test_time_is_found_only_where_memory_can_be_sure() -> None:
    tail = Tail(0, 10**6)
    for offset, time_us in enumerate((100, 100, 200, 300)):
        tail.append(frames(offset, b"v", time_us=time_us))
    assert tail.offset_at(100) is None, "an earlier segment may hold that time too"
    assert tail.offset_at(101) == 2
    assert tail.offset_at(300) == 3
    assert tail.offset_at(301) == 4


def test_all_tails_of_a_worker_share_one_room() -> None:
    """Each within its own bound, a thousand partitions would take more than a worker has (G6)."""
    one = frames(0, b"x" * 100)[0].nbytes
    room = TailRoom(100 * one)
    tails = [Tail(0, 10 * one, room) for _ in range(1_000)]
    for offset in range(10):
        for number, tail in enumerate(tails):
            tail.append(frames(offset, b"x" * 100, time_us=offset * 1_000 + number))
            assert room.nbytes <= room.bytes_max
    kept = [tail for tail in tails if tail.nbytes]
    assert kept == tails[-100:], "the newest of all stay"
    assert room.nbytes == sum(tail.nbytes for tail in kept) == 100 * one
    for tail in tails:
        assert tail.end == 10
        assert [b.base_offset for b in tail.read(tail.start, 10, 10**6)] == list(
            range(tail.start, 10)
        )


def test_a_quiet_tail_makes_room_for_a_busy_one_and_comes_back() -> None:
    one = frames(0, b"x" * 100)[0].nbytes
    room = TailRoom(12 * one)
    quiet, busy = Tail(0, 15 * one, room), Tail(0, 15 * one, room)
    for offset in range(10):
        quiet.append(frames(offset, b"x" * 100, time_us=offset))
    for offset in range(5):
        busy.append(frames(offset, b"x" * 100, time_us=100 + offset))
    assert (quiet.start, busy.start) == (3, 0)
    for offset in range(5, 50):
        busy.append(frames(offset, b"x" * 100, time_us=100 + offset))
    assert (quiet.start, quiet.end, busy.start) == (10, 10, 38)
    quiet.append(frames(10, b"x" * 100, time_us=300))
    assert (quiet.start, quiet.end, busy.start) == (10, 11, 39)
    assert room.nbytes == quiet.nbytes + busy.nbytes == 12 * one


def test_a_tail_that_is_closed_or_begun_anew_gives_its_room_back() -> None:
    one = frames(0, b"x" * 100)[0].nbytes
    room = TailRoom(20 * one)
    tail = Tail(0, 10 * one, room)
    tail.append(frames(0, b"x" * 100))
    later = tail.anew(50)
    assert (room.nbytes, later.start, later.end) == (0, 50, 50)
    later.append(frames(50, b"x" * 100))
    assert room.nbytes == later.nbytes == one
    later.close()
    assert (room.nbytes, later.start, later.end) == (0, 51, 51)
