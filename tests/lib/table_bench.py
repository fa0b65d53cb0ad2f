"""A table side driven by hand: one topic, real SQLite catalog, chosen time."""

from pathlib import Path

from pyiceberg.table import Table

from table_fakes import CountingIds, HandLog, SteppedClock, assignment, worker_settings
from tidewater_core.crd.topic import TopicSpec
from tidewater_worker.ports import Phase, TopicAssignment, TopicState
from tidewater_worker.table.catalog import TableCatalog, open_catalog
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.topic import TopicRun


class Bench:
    """One topic's table side on a work bench."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.settings = worker_settings(data)
        self.catalog: TableCatalog = open_catalog(self.settings.catalog)
        self.clock = SteppedClock()
        self.states: list[TopicState] = []
        self._seed = 0

    def log(self, partition: int = 0, first: int = 0) -> HandLog:
        return HandLog(self.data / "log" / "shop" / "orders" / str(partition), partition, first)

    def start(self, assigned: TopicAssignment) -> TopicRun:
        self._seed += 1
        return TopicRun(
            assigned,
            lambda: self.catalog,
            self.clock,
            CountingIds(self._seed),
            self.states.append,
            RangeIndex(),
        )

    def topic(self, spec: TopicSpec, *logs: HandLog, epoch: int = 1) -> TopicRun:
        run = self.start(assignment(spec, logs, epoch=epoch))
        self.settle(run)
        return run

    def settle(self, run: TopicRun) -> None:
        """Run until all is committed or stopped."""
        for _ in range(200):
            again = run.step()
            if again is not None:
                self.clock.advance(max(0.0, again - self.clock.monotonic()))
            phases = {part.state for part in run.state.partitions.values()}
            if Phase.OPENING not in phases and run.drained:
                return
        raise AssertionError(f"never settled: {run.state}")

    def flush(self, run: TopicRun, *logs: HandLog) -> None:
        run.inbox.durable({log.partition: log.end for log in logs})
        self.settle(run)

    def table(self, name: str = "shop.orders") -> Table:
        return self.catalog.load(tuple(name.split(".")))
