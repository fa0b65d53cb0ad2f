"""What one topic's run knows, what it tells, and what it does in trouble."""

import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

from tidewater_core.clock import Clock, IdSource
from tidewater_core.errors import TidewaterError
from tidewater_worker.ports import Phase, TopicAssignment, TopicState
from tidewater_worker.table.catalog import CommitRefused, TableCatalog
from tidewater_worker.table.commit import Identity, Outcome, Reply, Step
from tidewater_worker.table.committer import Committer
from tidewater_worker.table.cut import Cut
from tidewater_worker.table.files import FilePlan
from tidewater_worker.table.frontier import Claim
from tidewater_worker.table.history import HistoryReader
from tidewater_worker.table.inbox import Inbox
from tidewater_worker.table.offers import OfferBox
from tidewater_worker.table.opening import bound_table, topic_table
from tidewater_worker.table.pace import pause_s
from tidewater_worker.table.partition_run import PartitionSet
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.view import TableView

log = logging.getLogger(__name__)

RECHECK_S: Final = 30.0
"""How often a stopped topic looks whether a person has mended what stopped it."""
CONFLICTS_QUIET: Final = 5
"""So many conflicts in a row are ordinary; more are reported as retrying."""
ROW_BYTES_GUESS: Final = 256.0


class TopicBase:
    """A topic that this worker owns partitions of."""

    def __init__(
        self,
        assignment: TopicAssignment,
        catalog: Callable[[], TableCatalog],
        clock: Clock,
        ids: IdSource,
        notify: Callable[[TopicState], None],
        index: RangeIndex,
    ) -> None:
        self.where = topic_table(assignment)
        self.inbox = Inbox(assignment)
        self.reader = HistoryReader(
            lambda: self.where, catalog, lambda: self._view, self.inbox.pin, index
        )
        self._spec_json = assignment.spec
        self._role = assignment.commits
        self._catalog = catalog
        self._clock = clock
        self._ids = ids
        self._notify = notify
        self._partitions = PartitionSet()
        self._partitions.absorb(assignment, {})
        self._committer: Committer | None = None
        self._view: TableView | None = None
        self._plan: tuple[tuple[int, int], FilePlan] | None = None
        self._commit: Generator[Step, Reply, Outcome] | None = None
        self._claims: Mapping[int, Claim] = {}
        self._cut: Cut | None = None
        self._table_uuid = ""
        self._snapshot_id: int | None = None
        self._committed_at_us = 0
        self._failures = 0
        self._not_before = 0.0
        self._recheck_at = 0.0
        self._reload_at = 0.0
        self._since: float | None = None
        self._cut_at = 0.0
        self._commit_at = float("-inf")
        self._backlog = False
        self._row_bytes = ROW_BYTES_GUESS
        self.offers = OfferBox()
        """Files of other workers that wait to be committed here."""
        self._joint_at = float("-inf")
        """When the last commit for all owners of the topic's partitions began."""
        self.state = self._build_state()

    def __repr__(self) -> str:
        """Name the topic."""
        return f"TopicRun({self.where.topic})"

    # Asked by any thread.

    @property
    def drained(self) -> bool:
        """Say if nothing waits that could still be committed."""
        assignment, ends = self.inbox.take()
        state = self.state
        return all(
            part.state is Phase.STOPPED
            or part.next >= max(ends.get(n, 0), assignment.partitions[n].durable_end)
            for n, part in state.partitions.items()
            if n in assignment.partitions
        )

    @property
    def seen(self) -> TableView | None:
        """The newest state of the table that was seen, while the topic is not idle."""
        return self._view

    def counters(self) -> dict[str, Any]:
        """Return what has happened so far, for `stats`."""
        role = {"commits_by": self._role.value}
        if self._committer is None:
            return role
        counters = self._committer.counters
        return {**role, **{name: getattr(counters, name) for name in counters.__slots__}}

    def _identity(self) -> Identity:
        bound = self._table_uuid or bound_table(self.where)
        return Identity(str(self.where.topic), self.where.uuid, bound)

    def _get_committer(self) -> Committer:
        if self._committer is None:
            self._committer = Committer(
                self._catalog(), self.where, self._clock, self._ids, self.inbox.pinned
            )
        return self._committer

    # Trouble.

    def _fail(self, error: TidewaterError) -> float:
        """Try again later, outside of a commit."""
        self._failures += 1
        return self._retry_later(self._failures, error)

    def _retry_later(self, failures: int, error: TidewaterError) -> float:
        refused = isinstance(error, CommitRefused)
        delay = pause_s(failures, refused=refused, jitter=self._ids.jitter())
        if not refused or failures > CONFLICTS_QUIET:
            for run in self._partitions.values():
                run.retrying(error.reason, error.message)
            log.warning(
                "will try again topic=%s failures=%d in_s=%.2f %s",
                self.where.topic,
                failures,
                delay,
                error,
            )
        self._not_before = self._clock.monotonic() + delay
        return self._not_before

    def _stop(self, partition: int, error: TidewaterError) -> None:
        self._partitions[partition].stop(error.reason, error.message)
        self._recheck_at = self._clock.monotonic() + RECHECK_S
        log.error("partition stopped topic=%s partition=%d %s", self.where.topic, partition, error)

    def _halt(self, reason: str, message: str) -> float | None:
        log.error("topic stopped topic=%s reason=%s %s", self.where.topic, reason, message)
        for run in self._partitions.values():
            if run.phase is not Phase.STOPPED:
                run.stop(reason, message)
        self._view = None
        self._recheck_at = self._clock.monotonic() + RECHECK_S
        return self._recheck_at

    # What is told.

    def _saw(self, view: TableView) -> None:
        self._view = view
        self._table_uuid = view.table_uuid
        self._snapshot_id = view.snapshot_id
        self._committed_at_us = view.committed_at_us

    def _build_state(self) -> TopicState:
        return TopicState(
            topic=str(self.where.topic),
            partitions={number: run.state() for number, run in self._partitions.items()},
            table_uuid=self._table_uuid,
            snapshot_id=self._snapshot_id,
            committed_at_us=self._committed_at_us,
        )

    def _publish(self) -> None:
        state = self._build_state()
        # Whoever has just assigned may be a new edge that knows nothing yet.
        if not self.inbox.announce() and state == self.state:
            return
        with self.inbox.changed:
            self.state = state
            self.inbox.changed.notify_all()
        self._notify(state)
