"""What a payload is said to weigh is what its frame weighs: limits stand on it."""

import pyarrow as pa
import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import TooLarge
from tidewater_core.settings import Limits
from tidewater_worker.api.decode import TopicDecoder
from tidewater_worker.api.sizes import held_bytes
from tidewater_worker.log import frame as fmt
from tidewater_worker.log.group import Submission, encode_group
from tidewater_worker.log.ipc import QuickFrames
from tidewater_worker.schema import log_schema

ROWS = 10_000
OWN_COLUMNS_BYTES_MAX = 16 * ROWS
"""Of the time, and of padding."""


def frame_bytes(spec: TopicSpec, batch: pa.RecordBatch) -> int:
    schema = log_schema(spec)
    submission = Submission(batch, 0, lambda _: None)
    (frame,) = encode_group([submission], 0, 1, schema, QuickFrames(schema), 0)
    return frame.nbytes


@pytest.mark.parametrize("kind", ["uuid", "long", "string", "decimal(12,2)", "list<string>"])
def test_columns_that_are_absent_weigh_what_they_are_written_as(kind: str) -> None:
    fields = [{"name": "a", "type": "long"}]
    fields += [{"name": f"absent{number}", "type": kind} for number in range(10)]
    spec = TopicSpec.model_validate({"schema": {"fields": fields}})
    batch = TopicDecoder.of(spec, Limits()).batch(pa.record_batch({"a": range(ROWS)}))
    written = frame_bytes(spec, batch)
    assert written - OWN_COLUMNS_BYTES_MAX <= held_bytes(batch) <= 2 * written


def test_a_cell_cannot_hide_behind_another_buffer() -> None:
    """Offsets and values at one address: what is counted once by address is one cell of 20 MiB."""
    limits = Limits()
    spec = TopicSpec()
    size = 20 * 1024**2
    values = pa.py_buffer((0).to_bytes(4, "little") + size.to_bytes(4, "little") + bytes(size))
    cell = pa.Array.from_buffers(pa.binary(), 1, [None, values.slice(0, 8), values])
    batch = pa.record_batch({"value": cell})
    with pytest.raises(TooLarge, match="MessageTooLarge"):
        TopicDecoder.of(spec, limits).batch(batch)
    assert held_bytes(batch) >= size


def test_a_part_of_a_larger_batch_is_never_counted_for_less() -> None:
    batch = pa.record_batch({"value": [b"x" * 1000] * 100})
    assert held_bytes(batch.slice(10, 5)) >= 5_000


def test_a_frame_that_could_not_be_read_again_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fmt, "FRAME_BODY_BYTES_MAX", 4096)
    spec = TopicSpec()
    batch = TopicDecoder.of(spec, Limits()).batch(pa.record_batch({"value": [b"x" * 5000]}))
    with pytest.raises(ValueError, match="could not be read again"):
        frame_bytes(spec, batch)
