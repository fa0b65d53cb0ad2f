"""What a worker says of its partitions while it may have been taken for dead."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_worker.partition import Partition
from tidewater_worker.ports import PartitionState, Phase
from tidewater_worker.pulse import Pulse
from tidewater_worker.report import _partition


@pytest.mark.parametrize(("is_ours", "reason"), [(True, None), (False, "SessionLost")])
def test_a_partition_whose_session_is_lost_is_not_open(is_ours: bool, reason: str | None) -> None:
    """It refuses messages: a Topic must not be called Ready by its report."""
    appender: Any = SimpleNamespace(
        may_append=lambda: is_ours, failure=None, end=5, durable_end=5, segments=[]
    )
    partition: Any = SimpleNamespace(
        number=0, epoch=1, is_open=True, refused=None, appender=appender, pulse=Pulse(),
        table=PartitionState(5, 0, 1, Phase.RUNNING), owner=None,
    )  # fmt: skip
    typed: Partition = partition
    said = _partition(typed, 0.0)
    assert (said["open"], said.get("reason")) == (is_ours, reason)
