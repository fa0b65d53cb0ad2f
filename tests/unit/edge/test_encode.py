"""Few messages take another way to JSON than many; what comes out is the same."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.api import encode
from tidewater_worker.reading import SMALL_ROWS, with_offsets
from tidewater_worker.schema import log_schema, table_arrow_schema

SPEC = TopicSpec()
SCHEMA = table_arrow_schema(SPEC)
US_MAX = 253_402_300_799_999_999
"""The last microsecond of the year 9999."""

rows = st.tuples(
    st.integers(0, US_MAX),
    st.none() | st.binary(max_size=8) | st.text(max_size=8).map(str.encode),
    st.none() | st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=2),
    st.none() | st.binary(max_size=8) | st.text(max_size=8).map(str.encode),
)


def batch_of(found: list[tuple[object, ...]]) -> pa.RecordBatch:
    columns = [
        pa.array([7] * len(found), pa.int32()),
        pa.array(range(len(found)), pa.int64()),
        *(
            pa.array([row[i] for row in found], SCHEMA.field(i + 2).type)
            for i in range(len(SCHEMA) - 2)
        ),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@given(st.lists(rows, min_size=1, max_size=4))
def test_small_batches_read_the_same(found: list[tuple[object, ...]]) -> None:
    batch = batch_of(found)
    small = encode.to_messages(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "SMALL_ROWS", 0)
        assert small == encode.to_messages(batch)


@pytest.mark.parametrize("rows", [1, SMALL_ROWS, SMALL_ROWS + 1])
def test_frames_of_any_size_get_their_offsets(rows: int) -> None:
    schema = log_schema(SPEC)
    frame = pa.RecordBatch.from_arrays(
        [
            pa.array(range(rows), field.type) if pa.types.is_timestamp(field.type)
            else pa.nulls(rows, field.type)
            for field in schema
        ],
        schema=pa.schema([field.with_nullable(True) for field in schema]),
    )  # fmt: skip
    for partition in (3, 4):
        batch = with_offsets(frame, SCHEMA, partition, 100)
        assert batch.schema == SCHEMA
        assert batch.column("tw_partition").to_pylist() == [partition] * rows
        assert batch.column("tw_offset").to_pylist() == list(range(100, 100 + rows))
        assert batch.column("tw_time").view(pa.int64()).to_pylist() == list(range(rows))
    columns = pa.schema([field for field in SCHEMA if field.name != "tw_headers"])
    assert with_offsets(frame, columns, 3, 0).schema == columns
