"""One topic between its logs and its table: a state machine that the scheduler steps.

Calls from the link only leave notes (`Inbox`) and poke the scheduler; everything else happens in
`step`, on one thread at a time:

    open the table ─▶ wait until a flush is due ─▶ cut a batch ─▶ commit it ─▶ wait …
"""

import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

from tidewater_core.clock import Clock, IdSource
from tidewater_core.errors import Corrupt, Invalid, TidewaterError
from tidewater_worker.ports import Phase, TopicAssignment, TopicState
from tidewater_worker.table.catalog import CommitRefused, TableCatalog
from tidewater_worker.table.commit import (
    Halted,
    Identity,
    Outcome,
    Reply,
    Step,
    Wait,
    check_head,
    check_identity,
    run_commit,
)
from tidewater_worker.table.committer import Committer
from tidewater_worker.table.cut import Cut, SourceFailed, cut_batch
from tidewater_worker.table.files import FilePlan, plan_files
from tidewater_worker.table.frontier import UNWRITTEN, Claim, Fenced, MovedBack, Recut
from tidewater_worker.table.history import HistoryReader
from tidewater_worker.table.inbox import Inbox
from tidewater_worker.table.memory import give_back
from tidewater_worker.table.opening import (
    bind_table,
    bound_table,
    load_fitting,
    open_table,
    topic_table,
)
from tidewater_worker.table.pace import Waiting, flush_due, pause_s
from tidewater_worker.table.partition_run import PartitionSet
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.view import TableView

log = logging.getLogger(__name__)

IDLE_RELEASE_S: Final = 10.0
"""An idle topic gives its memory back after this: a thousand of them must cost nothing."""
RECHECK_S: Final = 30.0
"""How often a stopped topic looks whether a person has mended what stopped it."""
RELOAD_S: Final = 10.0
"""How often to load the table although our last commit has told its state: what others set on
`main` without moving it would be overwritten with what it was."""
CONFLICTS_QUIET: Final = 5
"""So many conflicts in a row are ordinary; more are reported as retrying."""
ROW_BYTES_GUESS: Final = 256.0


class TopicRun:
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

    def counters(self) -> dict[str, Any]:
        """Return what has happened so far, for `stats`."""
        if self._committer is None:
            return {}
        counters = self._committer.counters
        return {name: getattr(counters, name) for name in counters.__slots__}

    # Run by the scheduler, one thread at a time.

    def step(self) -> float | None:
        """Do what is due; return when to be called again, None to wait for a poke."""
        self._absorb()
        now = self._clock.monotonic()
        try:
            if now < self._not_before:
                return self._not_before
            return self._advance(now)
        finally:
            self._publish()

    def _absorb(self) -> None:
        """Take in what the link has said."""
        assignment, ends = self.inbox.take()
        changed = self._partitions.absorb(assignment, ends)
        if assignment.spec != self._spec_json:
            # The table may have to gain columns before the next row.
            self._spec_json = assignment.spec
            self.where = topic_table(assignment)
            self._plan = None
            if self._committer is not None:
                self._committer.where = self.where
            self._partitions.reopen()
            changed = True
        if changed:
            self._abandon_commit()
            self._view = None
            self._not_before = self._recheck_at = 0.0
        self._note_waiting()

    def _note_waiting(self) -> None:
        if self._since is None and self._partitions.waiting:
            self._since = self._clock.monotonic()

    def _abandon_commit(self) -> None:
        """Give up an attempt and begin again at the table: its frontier tells what landed.

        The files stay, since the outcome may be unknown.
        """
        if self._commit is not None:
            self._commit.close()
        self._commit, self._cut = None, None

    def _advance(self, now: float) -> float | None:
        if self._commit is not None:
            return self._drive()
        if self._partitions.opening:
            return self._open()
        if self._partitions.stopped:
            return self._recheck(now)
        due = self._due(now)
        if due is not None:
            return due if due > now else self._flush()
        if now - self._commit_at >= IDLE_RELEASE_S:
            self._release()
            return None
        return self._commit_at + IDLE_RELEASE_S

    def _due(self, now: float) -> float | None:
        """Return when to flush; None if nothing waits."""
        rows = self._partitions.waiting
        if rows == 0:
            self._since = None
            return None
        if self.inbox.in_haste or any(
            run.waiting and run.next < self.inbox.wanted(number)
            for number, run in self._partitions.items()
        ):
            return now
        writer = self.where.spec.writer
        return flush_due(
            Waiting(rows, int(rows * self._row_bytes), self._since or now),
            interval_s=writer.flush_interval.seconds,
            rows_max=writer.batch_rows,
            bytes_max=int(writer.batch_bytes),
            committed_at=self._commit_at,
            backlog=self._backlog,
        )

    def _release(self) -> None:
        if self._view is not None:
            self._view, self._plan = None, None
            if self._committer is not None:
                self._committer.release()
            give_back()

    # Opening.

    def _open(self) -> float | None:
        opening = self._partitions.opening
        try:
            self._get_committer()
            starts = {run.number: run.log.start_offset() for run in opening}
            epochs = {run.number: run.epoch for run in opening}
            log_start = max((start for start in starts.values() if start is not None), default=None)
            view = open_table(self._catalog(), self.where, epochs, log_start)
            identity = self._identity()
        except (Invalid, Corrupt) as error:
            return self._halt(error.reason, error.message)
        except TidewaterError as error:
            return self._fail(error)
        self._failures = 0
        ours = check_identity(view, identity)
        problem = ours if isinstance(ours, Halted) else check_head(view, epochs)
        if problem is not None:
            return self._halt(problem.reason, problem.message)
        # An empty log learns its first offset from the table: nobody may move it afterwards, so
        # our epoch goes first. Where there is a log, it can wait for the first rows.
        claims = {
            run.number: run.claim
            for run in opening
            if ours
            or (starts[run.number] is None and run.must_go_first(view.frontiers.get(run.number)))
        }
        if claims:
            return self._begin(identity, claims, view)
        return self._opened(view)

    def _opened(self, view: TableView) -> float:
        """Take the frontiers of a table that is ours."""
        self._saw(view)
        for run in self._partitions.opening:
            found = view.frontiers.get(run.number, UNWRITTEN)
            try:
                bind_table(self.where, view)
                run.gaps = view.gaps.get(run.number, ())
                run.open(found, view.starts.get(run.number, 0))
                if found.next == 0:
                    # Written by nobody, or the property was lost: rows would be added twice.
                    self.reader.check_nothing_from(view, run.number, 0)
            except Corrupt as error:
                self._stop(run.number, error)
            except TidewaterError as error:
                run.opened = False
                return self._fail(error)
            log.info(
                "partition opened topic=%s partition=%d next=%d epoch=%d state=%s %s",
                self.where.topic,
                run.number,
                run.next,
                run.epoch,
                run.phase.value,
                run.message,
            )
        self._note_waiting()
        return self._clock.monotonic()

    def _identity(self) -> Identity:
        bound = self._table_uuid or bound_table(self.where)
        return Identity(str(self.where.topic), self.where.uuid, bound)

    def _get_committer(self) -> Committer:
        if self._committer is None:
            self._committer = Committer(
                self._catalog(), self.where, self._clock, self._ids, self.inbox.pinned
            )
        return self._committer

    def _recheck(self, now: float) -> float | None:
        """Look again at a stopped topic, unless other owners have it."""
        mendable = [run for run in self._partitions.values() if run.reason != "Fenced"]
        if not mendable:
            return None
        if now < self._recheck_at:
            return self._recheck_at
        self._recheck_at = now + RECHECK_S
        for run in mendable:
            run.phase, run.opened = Phase.OPENING, False
        return self._open()

    # Flushing.

    def _flush(self) -> float | None:
        """Cut a batch from the logs and begin to commit it."""
        self._cut_at = self._clock.monotonic()
        writer, maintenance = self.where.spec.writer, self.where.spec.maintenance
        try:
            identity = self._identity()
            self._cut = cut_batch(
                self._file_plan(),
                self._partitions.sources(),
                self._ids,
                bytes_max=max(int(writer.batch_bytes), int(maintenance.target_file_size)),
                memory_bytes_max=int(writer.max_memory),
            )
        except SourceFailed as failed:
            if not isinstance(failed.error, Corrupt):
                return self._fail(failed.error)
            self._stop(failed.partition, failed.error)
            return self._clock.monotonic()
        except (Invalid, Corrupt) as error:
            return self._halt(error.reason, error.message)
        except TidewaterError as error:
            return self._fail(error)
        self._row_bytes = max(1.0, self._cut.nbytes / self._cut.prepared.rows)
        return self._begin(identity, self._partitions.claims(), self._view)

    def _file_plan(self) -> FilePlan:
        if self._view is None or self._cut_at >= self._reload_at:
            # Only for the schema: what may be committed is decided by the protocol.
            self._view = load_fitting(self._catalog(), self.where)
            self._reload_at = self._cut_at + RELOAD_S
        metadata = self._view.metadata
        key = (metadata.current_schema_id, metadata.default_spec_id)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, plan_files(self._view.table))
        return self._plan[1]

    def _begin(
        self, identity: Identity, claims: Mapping[int, Claim], view: TableView | None
    ) -> float | None:
        spans = self._cut.prepared.spans if self._cut is not None else {}
        self._claims = claims
        self._commit = run_commit(identity, claims, spans, view)
        return self._drive()

    def _drive(self) -> float | None:
        """Go on with the commit under way until it ends or has to wait."""
        assert self._commit is not None
        committer = self._get_committer()
        prepared = self._cut.prepared if self._cut is not None else None
        reply: Reply = None
        while True:
            try:
                step = self._commit.send(reply)
            except StopIteration as done:
                self._commit = None
                return self._finish(done.value)
            if isinstance(step, Wait):
                return self._retry_later(step.failures, step.error)
            reply = committer.perform(step, self._claims, prepared)

    def _finish(self, outcome: Outcome) -> float | None:
        """Act on how a commit ended."""
        now = self._clock.monotonic()
        cut, self._cut = self._cut, None
        self._failures = 0
        self._view = outcome.view
        match outcome.verdict:
            case Halted(reason, message):
                return self._halt(reason, message)
            case Fenced(partitions):
                for number, epoch in partitions.items():
                    self._partitions[number].fence(epoch)
                    log.warning(
                        "fenced topic=%s partition=%d epoch=%d", self.where.topic, number, epoch
                    )
                return now
            case MovedBack(partitions):
                assert outcome.view is not None
                return self._rewind(outcome.view, partitions)
            case Recut(partitions):
                log.info("rows were there already topic=%s next=%s", self.where.topic, partitions)
                for number, found in partitions.items():
                    self._partitions[number].next = found
                return now
        assert outcome.view is not None
        self._saw(outcome.view)
        if cut is None:
            return self._opened(outcome.view)
        self._committed(cut, outcome.view, now)
        return now

    def _committed(self, cut: Cut, view: TableView, now: float) -> None:
        for number in cut.prepared.spans:
            self._partitions[number].next = view.frontiers[number].next
        for run in self._partitions.values():
            run.start = view.starts.get(run.number, 0)
            run.running()
        self._commit_at = now
        self._backlog = not cut.complete
        self._since = self._cut_at if self._partitions.waiting else None
        counters = self._get_committer().counters
        counters.flush_ms_last = (now - self._cut_at) * 1000
        log.debug(
            "committed topic=%s rows=%d files=%d snapshot=%s ms=%.0f",
            self.where.topic,
            cut.prepared.rows,
            len(cut.prepared.files),
            view.snapshot_id,
            counters.flush_ms_last,
        )

    def _rewind(self, view: TableView, partitions: Mapping[int, tuple[int, int]]) -> float:
        """Go back to where the catalog stands, and commit again from the log."""
        counters = self._get_committer().counters
        for number, (known, found) in partitions.items():
            counters.frontier_moved_back += 1
            run = self._partitions[number]
            try:
                self.reader.check_nothing_from(view, number, found)
                run.rewind(found)
            except Corrupt as error:
                self._stop(number, error)
            except TidewaterError as error:
                return self._fail(error)
            log.error(
                "the catalog has forgotten a commit topic=%s partition=%d next=%d was=%d state=%s",
                self.where.topic,
                number,
                found,
                known,
                run.phase.value,
            )
        return self._clock.monotonic()

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
