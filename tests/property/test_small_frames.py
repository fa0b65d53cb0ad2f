"""The quick encoder writes what pyarrow writes, byte for byte."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.log.group import Rows, Submission, encode_group
from tidewater_worker.log.ipc import ROWS_MAX, SmallFrames
from tidewater_worker.log.producers import Request
from tidewater_worker.schema import log_schema

SCHEMA = log_schema(TopicSpec())
SMALL = SmallFrames(SCHEMA)


class NoSmallFrames(SmallFrames):
    """Leaves everything to pyarrow."""

    def encode(self, *_: object) -> None:
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
    quick = encode_group(group, offset, time_us, SCHEMA, SMALL, offset - unsynced)
    none = NoSmallFrames(SCHEMA)
    slow = encode_group(group, offset, time_us, SCHEMA, none, offset - unsynced)
    assert [frame.body.to_pybytes() for frame in quick] == [f.body.to_pybytes() for f in slow]
    assert [frame.head for frame in quick] == [frame.head for frame in slow]


def test_the_quick_way_is_taken() -> None:
    message = SMALL.encode(7, [None], [b"value"], [1], [None], 0)
    assert message is not None
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
    assert batch.column("value").to_pylist() == [b"value"]
