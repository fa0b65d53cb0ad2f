"""What a log goes on from after a hand-over, wherever its worker died."""

from pathlib import Path
from uuid import UUID

import pytest

from tidewater_worker.cluster.handover import Handover, receive, resume
from tidewater_worker.log.ipc import RAW_SCHEMA
from tidewater_worker.log.producers import Producers
from tidewater_worker.log.recover import recover
from tidewater_worker.log.segment import SegmentWriter

TOPIC = UUID(int=7)
END, TIME_US = 41, 1_700_000_000_000_000


@pytest.mark.parametrize("has_segment", [False, True])
def test_times_never_go_back(tmp_path: Path, has_segment: bool) -> None:
    """Also if it died when its first segment was made and no message was in it."""
    receive(tmp_path, END, Handover(END, TIME_US, Producers().to_bytes()))
    if has_segment:
        SegmentWriter.create(tmp_path, TOPIC, 0, END, RAW_SCHEMA).close()
    resumed = resume(tmp_path, recover(tmp_path, TOPIC, 0))
    assert resumed.last_time_us == TIME_US
