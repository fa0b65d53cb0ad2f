"""The commit protocol against a catalog that fails in every way, drawn by hypothesis."""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog

from table_fakes import (
    CountingIds,
    HandLog,
    SteppedClock,
    assignment,
    message_batch,
    worker_settings,
)
from table_faults import Fault, FaultyCatalog
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.ports import Phase, TopicState
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.topic import TopicRun

SPEC = TopicSpec()
PARTITIONS = 2
STEPS_MAX = 400
TOO_SLOW = HealthCheck.too_slow
PASSING = [fault for fault in Fault if fault not in (Fault.DROPPED, Fault.REPLACED)]


class World:
    """A topic with two partitions, its logs, a faulty catalog, and a clock that we move."""

    def __init__(self, data: Path) -> None:
        self.settings = worker_settings(data)
        self.catalog = FaultyCatalog(self.settings)
        self.clock = SteppedClock()
        self.logs = [
            HandLog(data / "log" / "shop" / "orders" / str(p), p) for p in range(PARTITIONS)
        ]
        self.epoch = 1
        self.states: list[TopicState] = []
        self._seeds = itertools.count(1)
        self.others: list[TopicRun] = []
        """Earlier processes that nobody has told to stop."""
        self.run = self.start()
        self.catalog.interloper = self.interlope

    def start(self) -> TopicRun:
        catalog = TableCatalog(self.catalog)  # type: ignore[arg-type]
        return TopicRun(
            assignment(SPEC, self.logs, epoch=self.epoch),
            lambda: catalog,
            self.clock,
            CountingIds(next(self._seeds)),
            self.states.append,
            RangeIndex(),
        )

    def interlope(self) -> None:
        """Let the earlier processes work, with the log as it is now."""
        ends = {log.partition: log.end for log in self.logs}
        for other in self.others:
            other.inbox.durable(ends)
            for _ in range(6):
                other.step()
                self.clock.advance(0.3)

    def append(self, partition: int, rows: int) -> None:
        log = self.logs[partition]
        values = [f"{partition}:{log.end + i}".encode() for i in range(rows)]
        log.append(message_batch(SPEC, values, time_us=self.clock.now_us()))
        self.run.inbox.durable({partition: log.end})

    def step(self) -> None:
        """Let the topic do one thing, and time pass until it wants the next."""
        again = self.run.step()
        if again is not None:
            self.clock.advance(max(0.0, again - self.clock.monotonic()))

    def settle(self) -> None:
        """Run until everything durable is in the table, or the topic has stopped."""
        for _ in range(STEPS_MAX):
            self.step()
            phases = {part.state for part in self.run.state.partitions.values()}
            if phases == {Phase.STOPPED} or (self.run.drained and phases == {Phase.RUNNING}):
                return
        pytest.fail(f"G2 Once in the table: never settled: {self.run.state}")

    def check(self) -> None:
        """Judge from the table and the logs alone."""
        properties: dict[str, Any] = dict(self.settings.catalog.properties)
        catalog = SqlCatalog("tidewater", **properties)
        try:
            rows = catalog.load_table("shop.orders").scan().to_arrow()
        finally:
            catalog.close()
        for log in self.logs:
            found = sorted(
                (offset, value)
                for partition, offset, value in zip(
                    rows["tw_partition"].to_pylist(),
                    rows["tw_offset"].to_pylist(),
                    rows["value"].to_pylist(),
                    strict=True,
                )
                if partition == log.partition
            )
            offsets = [offset for offset, _ in found]
            assert offsets == list(range(log.end)), (
                f"G2 Once in the table: partition {log.partition} has offsets {offsets}, "
                f"the log has {log.end}"
            )
            for offset, value in found:
                assert value == f"{log.partition}:{offset}".encode(), (
                    f"G1 Durable: partition {log.partition} offset {offset} is {value!r}"
                )


@contextmanager
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="tidewater-") as directory:
        made = World(Path(directory))
        try:
            yield made
        finally:
            made.catalog.close()


class Event(StrEnum):
    """What happens to the process before a round."""

    NOTHING = "nothing"
    RESTART = "restart"
    TWIN = "restart, and the old process lives on"
    OWNER = "new owner"
    ZOMBIE = "new owner, and the old process lives on"


def happen(w: World, event: Event) -> None:
    if event is Event.NOTHING:
        return
    w.others = [w.run] if event in (Event.TWIN, Event.ZOMBIE) else []
    if event in (Event.OWNER, Event.ZOMBIE):
        w.epoch += 1
    w.run = w.start()


ROUNDS = st.lists(
    st.tuples(
        st.sampled_from(Event),
        st.tuples(*(st.integers(0, 3) for _ in range(PARTITIONS))),
        st.lists(st.sampled_from(PASSING), max_size=3),
        st.sampled_from([0, 1, 2, 3, STEPS_MAX]),
    ),
    min_size=1,
    max_size=6,
)


def check_rounds(rounds: list[tuple[Event, tuple[int, ...], list[Fault], int]]) -> None:
    with world() as w:
        for event, appends, faults, steps in rounds:
            happen(w, event)
            for partition, rows in enumerate(appends):
                if rows:
                    w.append(partition, rows)
            w.catalog.script = list(faults)
            if steps == STEPS_MAX:
                w.settle()
            else:
                for _ in range(steps):
                    w.step()
        w.catalog.script = []
        # What a fault left for a later call (a late commit, a forgotten one) happens now.
        w.interlope()
        for _ in range(2):
            w.append(0, 1)
            w.append(1, 1)
            w.settle()
        w.check()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[TOO_SLOW])
@given(rounds=ROUNDS)
@pytest.mark.timeout(300)
def test_every_row_lands_once_whatever_fails(
    rounds: list[tuple[Event, tuple[int, ...], list[Fault], int]],
) -> None:
    check_rounds(rounds)


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("event", Event)
def test_each_fault_meets_each_kind_of_process(event: Event, fault: Fault) -> None:
    check_rounds(
        [
            (Event.NOTHING, (2, 2), [], STEPS_MAX),
            (event, (1, 2), [fault, Fault.INTERLOPED], 3),
            (Event.NOTHING, (1, 1), [fault], STEPS_MAX),
        ]
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    before=st.lists(st.sampled_from([Fault.OK, Fault.LANDED, Fault.REFUSED]), max_size=3),
    end=st.sampled_from([Fault.DROPPED, Fault.REPLACED]),
)
@pytest.mark.timeout(120)
def test_a_dropped_or_replaced_table_stops_the_topic(before: list[Fault], end: Fault) -> None:
    with world() as w:
        w.append(0, 2)
        w.settle()
        w.catalog.script = [*before, end]
        for _ in range(len(before) + 2):
            w.append(0, 1)
            w.append(1, 1)
            w.settle()
        assert w.catalog.gone
        reason = "TableMissing" if end is Fault.DROPPED else "TableReplaced"
        for part in w.run.state.partitions.values():
            assert (part.state, part.reason) == (Phase.STOPPED, reason), (
                f"G7 Nothing is silently skipped: {part}"
            )
        # Not even a new process makes it again, or writes to the stranger.
        w.epoch += 1
        w.run = w.start()
        w.settle()
        assert {part.reason for part in w.run.state.partitions.values()} == {reason}
        exists = w.catalog.real.table_exists("shop.orders")
        assert exists == (end is Fault.REPLACED), "G7: a dropped table was made again"
        if exists:
            table = w.catalog.real.load_table("shop.orders")
            assert table.current_snapshot() is None, "G7: rows were written to a replaced table"


def test_a_zombie_with_an_older_epoch_commits_nothing() -> None:
    with world() as w:
        w.append(0, 3)
        w.settle()
        zombie = w.run
        w.epoch = 2
        w.run = w.start()
        w.append(0, 2)
        w.settle()
        # The zombie has seen the same log, and believes it still owns it.
        zombie.inbox.durable({0: w.logs[0].end})
        w.append(1, 2)
        zombie.inbox.durable({1: w.logs[1].end})
        for _ in range(20):
            again = zombie.step()
            if again is not None:
                w.clock.advance(max(0.0, again - w.clock.monotonic()))
        for part in zombie.state.partitions.values():
            assert (part.state, part.reason) == (Phase.STOPPED, "Fenced"), f"G5 One owner: {part}"
        w.settle()
        w.check()


def test_rows_that_are_nowhere_stop_the_partition() -> None:
    """A catalog forgets a commit, and the log has dropped the rows."""
    with world() as w:
        for _ in range(3):
            log = w.logs[0]
            values = [f"0:{log.end + i}".encode() for i in range(2)]
            log.append(message_batch(SPEC, values), new_segment=True)
            w.run.inbox.durable({0: log.end})
            w.settle()
        w.catalog.script = [Fault.FORGETS]
        w.append(0, 1)
        w.settle()
        w.logs[0].append(message_batch(SPEC, [b"0:7"]), new_segment=True)
        w.logs[0].drop_segments_before(7)
        w.run.inbox.durable({0: w.logs[0].end})
        for _ in range(20):
            w.step()
        part = w.run.state.partitions[0]
        assert (part.state, part.reason) == (Phase.STOPPED, "RowsLost"), f"G7: {part}"
        assert "6 to 6" in part.message
