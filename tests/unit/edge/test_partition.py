"""A partition between its log and its table: what it tells either side of the other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.errors import Retryable, TidewaterError
from tidewater_testing import logs
from tidewater_worker.node import Node
from tidewater_worker.partition import Partition
from tidewater_worker.ports import PartitionState
from tidewater_worker.table.frontier import Frontier
from tidewater_worker.table.partition_run import PartitionRun

RECOVERED = 9


class Both:
    """A partition whose log was recovered, seen from the edge and from the table process."""

    def __init__(self, directory: Path, appender: Any) -> None:
        self.partition = Partition("shop/orders", logs.PARTITION, directory)
        self.partition.begin(appender, 2, "session")
        appender._on_durable = self._on_durable
        topic = SimpleNamespace(partitions={logs.PARTITION: self.partition})
        self._node: Any = SimpleNamespace(
            topics={"shop/orders": topic}, link=self, _dirty={}, _dirty_timer=None,
            clock=SimpleNamespace(monotonic=lambda: 0.0),
        )  # fmt: skip
        self._assign()

    def _assign(self) -> None:
        assignment = self.partition.assignment()
        assert assignment is not None
        self.run = PartitionRun.of(logs.PARTITION, assignment)

    def _on_durable(self, end: int) -> None:
        self._node._dirty = {"shop/orders": {logs.PARTITION: end}}

    def durable(self, ends: dict[str, dict[int, int]]) -> None:
        self.run.durable_end = max(self.run.durable_end, ends["shop/orders"][logs.PARTITION])

    def catalog_is_there(self, frontier: int) -> PartitionState:
        """Let the table process open the table; tell what the edge hears."""
        Node.tell_durable(self._node)
        self._assign_again()
        self.run.open(Frontier(frontier, 1), 0)
        state = self.run.state()
        self.partition.note(state)
        Node.tell_durable(self._node)
        return state

    def _assign_again(self) -> None:
        """Let the table process hear of the partition anew, as after a restart of its own."""
        told = self.run.durable_end
        self._assign()
        self.run.durable_end = max(self.run.durable_end, told)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Give a log with messages."""
    logs.append(tmp_path, [[b"m"] * RECOVERED])
    return tmp_path


@pytest.mark.parametrize("more", [1, 5, 10])
async def test_a_log_behind_its_table_is_found_out_however_late(written: Path, more: int) -> None:
    """A volume of yesterday, and the catalog is away for longer than a log waits for it."""
    async with logs.appending(written, logs.reopen(written), 1 << 26) as appender:
        both = Both(written, appender)
        both.partition.is_open = True  # nobody told the frontier
        await logs.offer(appender, logs.make_submission(0, [b"new"] * more))
        state = both.catalog_is_there(frontier=15)
        assert state.reason == "LogBehindTable", (
            f"G2 Once in the table: acknowledged offsets {RECOVERED} to 14 never get there"
        )
        with pytest.raises(TidewaterError, match="LogBehindTable"):
            both.partition.ready()
        await appender.close()


@pytest.mark.parametrize("frontier", [0, 5, RECOVERED])
async def test_a_log_that_went_on_alone_is_committed_when_the_catalog_is_back(
    written: Path, frontier: int
) -> None:
    async with logs.appending(written, logs.reopen(written), 1 << 26) as appender:
        both = Both(written, appender)
        both.partition.is_open = True
        await logs.offer(appender, logs.make_submission(0, [b"new"] * 10))
        state = both.catalog_is_there(frontier)
        assert state.reason == ""
        assert both.partition.ready() is appender
        assert both.run.durable_end == RECOVERED + 10, "what came meanwhile is told now"
        await logs.offer(appender, logs.make_submission(0, [b"newer"]))
        Node.tell_durable(both._node)
        assert both.run.waiting == RECOVERED + 11 - frontier
        await appender.close()


async def test_a_kept_refusal_keeps_no_request_in_memory(tmp_path: Path) -> None:
    """One error is raised for every request that comes; it must not remember them (G6)."""
    async with logs.appending(tmp_path, logs.reopen(tmp_path), 1 << 26) as appender:
        partition = Partition("shop/orders", 0, tmp_path)
        partition.begin(appender, 2, "session")
        refusal = Retryable("BacklogFull", "too much waits for the table")
        appender.failure = Retryable("LogWriteFailed", "for a test")
        submission = logs.make_submission(0, [b"x"])
        for why, calls in (
            (appender.failure, [lambda: appender.check(submission), partition.ready]),
            (refusal, [partition.ready, partition.readable]),
        ):
            for _ in range(20):
                for call in calls:
                    with pytest.raises(Retryable):
                        call()
            depth, trace = 0, why.__traceback__
            while trace is not None:
                depth, trace = depth + 1, trace.tb_next
            assert depth < 5, f"G6 Bounded: {depth} frames are held"
            appender.failure, partition.refusal = None, refusal
            partition.appender = None
        await appender.close()
