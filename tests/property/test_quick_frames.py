"""The quick encoder writes what pyarrow writes, byte for byte."""

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.log.group import Rows, Submission, encode_group
from tidewater_worker.log.ipc import ROWS_MAX, QuickFrames
from tidewater_worker.log.producers import Request
from tidewater_worker.schema import HEADERS_TYPE, log_schema

SCHEMA = log_schema(TopicSpec())
QUICK = QuickFrames(SCHEMA)


class NoQuickFrames(QuickFrames):
    """Leaves everything to pyarrow."""

    def rows(self, *_: object) -> None:
        """Encode nothing."""

    def batch(self, *_: object) -> None:
        """Encode nothing."""


rows = st.builds(
    lambda key, values: Rows([key] * len(values), [None] * len(values), values),
    st.none() | st.binary(max_size=20),
    st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=ROWS_MAX // 2),
)
requests = st.none() | st.builds(
    Request, st.text("abcü-", min_size=1, max_size=9), st.integers(0, 2**63 - 1)
)
submissions = st.lists(
    st.builds(lambda r, q: Submission(r, 1, lambda _: None, q), rows, requests),
    min_size=1,
    max_size=6,
)


@given(submissions, st.integers(0, 2**62), st.integers(0, 2**60), st.integers(0, 2**40))
def test_same_bytes_as_pyarrow(
    group: list[Submission], offset: int, time_us: int, unsynced: int
) -> None:
    quick = encode_group(group, offset, time_us, SCHEMA, QUICK, offset - unsynced)
    none = NoQuickFrames(SCHEMA)
    slow = encode_group(group, offset, time_us, SCHEMA, none, offset - unsynced)
    assert [frame.body().to_pybytes() for frame in quick] == [f.body().to_pybytes() for f in slow]
    assert [frame.head for frame in quick] == [frame.head for frame in slow]


def batch_of(keys: list[bytes | None], values: list[bytes | None], cut: int) -> pa.RecordBatch:
    """Make a batch as a client may send it: a slice of one that is larger by `cut`, too."""
    more: list[bytes | None] = [b"more"] * cut
    columns = [
        pa.array([*more, *keys, *more], pa.binary()),
        pa.nulls(len(keys) + 2 * cut, HEADERS_TYPE),
        pa.array([*more, *values, *more], pa.binary()),
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=["tw_key", "tw_headers", "value"])
    return batch.slice(cut, len(keys))


keyed = st.lists(
    st.tuples(st.binary(max_size=9), st.binary(max_size=99)), min_size=1, max_size=2 * ROWS_MAX
).map(lambda cells: ([k for k, _ in cells], [v for _, v in cells]))
unkeyed = keyed.map(lambda columns: ([None] * len(columns[1]), columns[1]))
some = st.lists(
    st.tuples(st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=99)), min_size=1
).map(lambda cells: ([k for k, _ in cells], [v for _, v in cells]))


@given(keyed | unkeyed | some, st.integers(0, 2), requests, st.integers(0, 2**60))
def test_same_bytes_as_pyarrow_for_batches(
    columns: tuple[list[bytes | None], list[bytes | None]],
    cut: int,
    request_: Request | None,
    time_us: int,
) -> None:
    batch = batch_of(*columns, cut)
    group = [Submission(batch, 1, lambda _: None, request_)]
    quick = QuickFrames(SCHEMA)
    (slow,) = encode_group(group, 7, time_us, SCHEMA, NoQuickFrames(SCHEMA), 7)
    for _ in range(3):  # the first one of a size is pyarrow's
        (frame,) = encode_group(group, 7, time_us, SCHEMA, quick, 7)
        assert frame.body().to_pybytes() == slow.body().to_pybytes()
        assert frame.head == slow.head


def test_the_quick_way_is_taken_for_batches() -> None:
    quick = QuickFrames(SCHEMA)
    batch = batch_of([None] * 1000, [b"value"] * 1000, 0)
    quick.batch(7, batch, [1000], [None], 0)  # the first one of a size is pyarrow's
    message = quick.batch(7, batch, [1000], [None], 0)
    assert message is not None
    back = pa.ipc.read_record_batch(pa.py_buffer(b"".join(message)), SCHEMA)
    back.validate(full=True)
    assert back.column("value").equals(batch.column("value"))


@pytest.mark.parametrize("padding", [0, 1_000_000])
def test_large_values_are_written_from_where_they_are_unless_that_keeps_more(padding: int) -> None:
    text = pa.py_buffer(b"v" * 100_000 + b"p" * padding).slice(0, 100_000)
    ends = pa.py_buffer(struct.pack("<1001i", *range(0, 100_001, 100)))
    values = pa.Array.from_buffers(pa.binary(), 1000, [None, ends, text])
    batch = pa.RecordBatch.from_arrays(
        [pa.nulls(1000, pa.binary()), pa.nulls(1000, HEADERS_TYPE), values],
        names=["tw_key", "tw_headers", "value"],
    )
    group = [Submission(batch, 1, lambda _: None)]
    quick = QuickFrames(SCHEMA)
    (slow,) = encode_group(group, 7, 9, SCHEMA, NoQuickFrames(SCHEMA), 7)
    encode_group(group, 7, 9, SCHEMA, quick, 7)  # the first one of a size is pyarrow's
    (frame,) = encode_group(group, 7, 9, SCHEMA, quick, 7)
    where = [pa.py_buffer(piece).address for piece in frame.pieces]
    assert (text.address in where) == (padding == 0)
    assert frame.head == slow.head
    assert frame.nbytes == len(frame.head) + sum(map(len, frame.pieces))
    assert frame.body().to_pybytes() == slow.body().to_pybytes()
    assert frame.body().address == frame.body().address, "joined once"


def test_typed_topics_are_left_to_pyarrow() -> None:
    spec = TopicSpec.model_validate({"schema": {"fields": [{"name": "value", "type": "string"}]}})
    schema = log_schema(spec)
    quick = QuickFrames(schema)
    batch = pa.RecordBatch.from_arrays(
        [pa.nulls(2, pa.binary()), pa.nulls(2, HEADERS_TYPE), pa.array(["a", "b"])],
        names=["tw_key", "tw_headers", "value"],
    )
    for _ in range(3):
        frames = encode_group([Submission(batch, 1, lambda _: None)], 0, 1, schema, quick, 0)
        back = pa.ipc.read_record_batch(frames[0].body(), schema)
        assert back.column("value").to_pylist() == ["a", "b"]


def test_the_quick_way_is_taken() -> None:
    message = QUICK.rows(7, [None], [b"value"], [1], [None], 0)
    assert message is not None
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
    assert batch.column("value").to_pylist() == [b"value"]
