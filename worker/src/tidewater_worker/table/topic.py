"""One topic between its logs and its table: a state machine that the scheduler steps.

Calls from the link only note what they say (under the lock) and poke the scheduler; everything
else happens in `step`, on one thread at a time:

    open the table ─▶ wait until a flush is due ─▶ cut a batch ─▶ commit it ─▶ wait …
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final

from tidewater_core.clock import Clock, IdSource
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Invalid, TidewaterError
from tidewater_core.names import TopicName
from tidewater_worker.ports import FlushResult, Phase, TopicAssignment, TopicState
from tidewater_worker.table.catalog import CommitRefused, TableCatalog
from tidewater_worker.table.commit import (
    Halted,
    Identity,
    Outcome,
    Reply,
    Step,
    Wait,
    check_identity,
    run_commit,
)
from tidewater_worker.table.committer import Committer
from tidewater_worker.table.cut import Cut, Source, SourceFailed, cut_batch
from tidewater_worker.table.files import FilePlan, plan_files
from tidewater_worker.table.flushing import flush_problem
from tidewater_worker.table.frontier import UNWRITTEN, Claim, Fenced, MovedBack, Recut
from tidewater_worker.table.history import HistoryReader
from tidewater_worker.table.opening import (
    TopicTable,
    bind_table,
    bound_table,
    load_fitting,
    open_table,
)
from tidewater_worker.table.pace import Waiting, flush_due, pause_s
from tidewater_worker.table.partition_run import PartitionRun
from tidewater_worker.table.ranges import RangeIndex
from tidewater_worker.table.view import TableView

log = logging.getLogger(__name__)

IDLE_RELEASE_S: Final = 30.0
"""An idle topic gives its metadata back after this: a thousand of them must cost nothing."""
RECHECK_S: Final = 30.0
"""How often a stopped topic looks whether a person has mended what stopped it."""
CONFLICTS_QUIET: Final = 5
"""So many conflicts in a row are ordinary; more are reported as retrying."""
ROW_BYTES_GUESS: Final = 256


class TopicRun:
    """A topic that this worker owns partitions of."""

    def __init__(
        self,
        assignment: TopicAssignment,
        where: TopicTable,
        catalog: Callable[[], TableCatalog],
        clock: Clock,
        ids: IdSource,
        notify: Callable[[TopicState], None],
        index: RangeIndex,
    ) -> None:
        self.where = where
        self.changed = threading.Condition()
        """Guards what the link writes; notified when the state changes."""
        self._assignment = assignment
        self._spec_json = assignment.spec
        self._ends: dict[int, int] = {}
        self._flush_upto: dict[int, int] = {}
        self._hurry = False
        self._announce = True
        self._pins: Counter[int] = Counter()
        self._catalog = catalog
        self._clock = clock
        self._ids = ids
        self._notify = notify
        self._partitions = {
            number: PartitionRun.of(number, part) for number, part in assignment.partitions.items()
        }
        self._committer: Committer | None = None
        self._view: TableView | None = None
        self._plan: FilePlan | None = None
        self._plan_key: tuple[int, int] | None = None
        self._commit: Generator[Step, Reply, Outcome] | None = None
        self._claims: Mapping[int, Claim] = {}
        self._cut: Cut | None = None
        self._table_uuid = ""
        self._snapshot_id: int | None = None
        self._committed_at_us = 0
        self._failures = 0
        self._not_before = 0.0
        self._since: float | None = None
        self._cut_at = 0.0
        self._commit_at = float("-inf")
        self._backlog = False
        self._row_bytes = float(ROW_BYTES_GUESS)
        self.reader = HistoryReader(
            lambda: self.where, catalog, lambda: self._view, self.pin, index
        )
        self.state = self._build_state()

    def __repr__(self) -> str:
        """Name the topic."""
        return f"TopicRun({self.where.topic})"

    # What the link tells; any thread.

    def update(self, assignment: TopicAssignment) -> None:
        """Take a newer assignment of the same topic."""
        with self.changed:
            self._assignment = assignment
            self._announce = True

    def durable(self, ends: Mapping[int, int]) -> None:
        """Note how far partitions are durable."""
        with self.changed:
            self._ends.update(ends)

    def hurry(self) -> None:
        """Flush whatever waits from now on at once: the process is closing."""
        with self.changed:
            self._hurry = True

    def want(self, upto: Mapping[int, int]) -> None:
        """Ask for a flush."""
        with self.changed:
            for partition, end in upto.items():
                self._flush_upto[partition] = max(end, self._flush_upto.get(partition, 0))

    def flushed(self, upto: Mapping[int, int]) -> FlushResult | None:
        """Return the result once all of `upto` is in the table; raise if it cannot get there."""
        state = self.state
        problem = flush_problem(state, upto)
        if problem is not None:
            raise problem
        frontier = {number: part.next for number, part in state.partitions.items()}
        if any(frontier[number] < end for number, end in upto.items()):
            return None
        return FlushResult(snapshot_id=state.snapshot_id, frontier=frontier)

    @property
    def drained(self) -> bool:
        """Say if nothing waits that could still be committed."""
        with self.changed:
            return not any(
                max(run.durable_end, self._ends.get(number, 0)) > run.next
                for number, run in self._partitions.items()
                if run.phase is not Phase.STOPPED
            )

    def pin(self, snapshot_id: int, count: int) -> None:
        """Keep a snapshot while it is read (count 1), or let go of it (count -1)."""
        with self.changed:
            self._pins[snapshot_id] += count
            if self._pins[snapshot_id] <= 0:
                del self._pins[snapshot_id]

    def pinned(self) -> frozenset[int]:
        """Return the snapshots that live readers need."""
        with self.changed:
            return frozenset(self._pins)

    def counters(self) -> dict[str, Any]:
        """Return what has happened so far, for `stats`."""
        committer = self._committer
        if committer is None:
            return {}
        counters = committer.counters
        return {name: getattr(counters, name) for name in counters.__slots__}

    # What the scheduler runs; one thread at a time.

    def step(self) -> float | None:
        """Do what is due."""
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
        with self.changed:
            assignment, ends = self._assignment, self._ends
            self._ends = {}
        changed = self._take_spec(assignment)
        for number, part in assignment.partitions.items():
            run = self._partitions.get(number)
            if run is None or run.epoch != part.epoch or run.directory != part.directory:
                if run is not None:
                    run.log.close()
                self._partitions[number] = PartitionRun.of(number, part)
                changed = True
            else:
                run.durable_end = max(run.durable_end, part.durable_end)
        for number in [n for n in self._partitions if n not in assignment.partitions]:
            self._partitions.pop(number).log.close()
            changed = True
        for number, end in ends.items():
            if number in self._partitions:
                run = self._partitions[number]
                run.durable_end = max(run.durable_end, end)
        if changed:
            # Begin again at the table: whatever an attempt under way does, its frontier tells.
            self._abandon_commit()
            self._view = None
            self._not_before = 0.0
        if self._since is None and any(run.waiting for run in self._partitions.values()):
            self._since = self._clock.monotonic()

    def _take_spec(self, assignment: TopicAssignment) -> bool:
        """Take a changed spec: the table may have to gain columns before the next row."""
        if assignment.spec == self._spec_json:
            return False
        self._spec_json = assignment.spec
        self.where = topic_table(assignment)
        self._plan = None
        if self._committer is not None:
            self._committer.where = self.where
        for run in self._partitions.values():
            run.opened = False
            if run.phase is not Phase.STOPPED:
                run.phase = Phase.OPENING
        return True

    def _advance(self, now: float) -> float | None:
        if self._commit is not None:
            return self._drive()
        if any(r.phase is not Phase.STOPPED and not r.opened for r in self._partitions.values()):
            return self._open()
        if self._partitions and all(r.phase is Phase.STOPPED for r in self._partitions.values()):
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
        rows = sum(run.waiting for run in self._partitions.values())
        if rows == 0:
            self._since = None
            return None
        with self.changed:
            wanted = dict(self._flush_upto)
            hurry = self._hurry
        if hurry or any(
            run.waiting and run.next < wanted.get(number, 0)
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

    # Opening.

    def _open(self) -> float | None:
        opening = [r for r in self._partitions.values() if r.phase is not Phase.STOPPED]
        opening = [run for run in opening if not run.opened]
        try:
            committer = self._get_committer()
            starts = [run.log.start_offset() for run in opening]
            epochs = {run.number: run.epoch for run in opening}
            log_start = max((start for start in starts if start is not None), default=None)
            view = open_table(self._catalog(), self.where, epochs, log_start)
            identity = self._identity()
        except (Invalid, Corrupt) as error:
            return self._halt(error.reason, error.message)
        except TidewaterError as error:
            self._failures += 1
            return self._retry_later(self._failures, error)
        self._failures = 0
        ours = check_identity(view, identity)
        if isinstance(ours, Halted):
            return self._halt(ours.reason, ours.message)
        committer.where = self.where
        # An empty log learns its first offset from the table: nobody may move it afterwards.
        fresh = {
            run.number: Claim(run.epoch, None)
            for run, start in zip(opening, starts, strict=True)
            if start is None and view.frontiers.get(run.number, UNWRITTEN).epoch < run.epoch
        }
        if ours or fresh:
            everyone = {run.number: Claim(run.epoch, None) for run in opening} if ours else fresh
            return self._begin(identity, everyone, None, view)
        self._opened(view)
        return self._clock.monotonic()

    def _opened(self, view: TableView) -> None:
        """Take the frontiers of a table that is ours."""
        self._saw(view)
        bind_table(self.where, view)
        for run in self._partitions.values():
            if run.phase is not Phase.STOPPED and not run.opened:
                found = view.frontiers.get(run.number, UNWRITTEN)
                run.open(found, view.starts.get(run.number, 0))
                log.info(
                    "partition opened topic=%s partition=%d next=%d epoch=%d state=%s reason=%s",
                    self.where.topic,
                    run.number,
                    run.next,
                    run.epoch,
                    run.phase.value,
                    run.reason or "-",
                )
        if self._since is None and any(run.waiting for run in self._partitions.values()):
            self._since = self._clock.monotonic()

    def _identity(self) -> Identity:
        return Identity(str(self.where.topic), self.where.uuid, bound_table(self.where))

    def _get_committer(self) -> Committer:
        if self._committer is None:
            self._committer = Committer(
                self._catalog(), self.where, self._clock, self._ids, self.pinned
            )
        return self._committer

    def _recheck(self, now: float) -> float | None:
        """Look again at a stopped topic, unless another owner has it."""
        again = [r for r in self._partitions.values() if r.reason != "Fenced"]
        if not again:
            return None
        for run in again:
            run.phase, run.opened = Phase.OPENING, False
        self._open()
        return max(now + RECHECK_S, self._not_before)

    # Flushing.

    def _flush(self) -> float | None:
        """Cut a batch from the logs and begin to commit it."""
        self._cut_at = self._clock.monotonic()
        sources = [
            Source(run.number, run.log, run.next, run.durable_end)
            for run in self._partitions.values()
            if run.waiting
        ]
        try:
            identity = self._identity()
            plan = self._file_plan()
            writer = self.where.spec.writer
            self._cut = cut_batch(
                plan,
                sources,
                self._ids,
                bytes_max=max(
                    int(writer.batch_bytes), int(self.where.spec.maintenance.target_file_size)
                ),
                memory_bytes_max=int(writer.max_memory),
            )
        except SourceFailed as failed:
            if not isinstance(failed.error, Corrupt):
                self._failures += 1
                return self._retry_later(self._failures, failed.error)
            self._stop_partition(failed.partition, failed.error.reason, failed.error.message)
            return self._clock.monotonic()
        except (Invalid, Corrupt) as error:
            return self._halt(error.reason, error.message)
        except TidewaterError as error:
            self._failures += 1
            return self._retry_later(self._failures, error)
        rows = self._cut.prepared.rows
        self._row_bytes = max(1.0, self._cut.nbytes / rows)
        claims = {n: run.claim for n, run in self._partitions.items() if run.active}
        return self._begin(identity, claims, self._cut, self._view)

    def _file_plan(self) -> FilePlan:
        if self._view is None:
            # Only for the schema: what may be committed is decided by the protocol.
            self._view = load_fitting(self._catalog(), self.where)
        metadata = self._view.metadata
        key = (metadata.current_schema_id, metadata.default_spec_id)
        if self._plan is None or self._plan_key != key:
            self._plan, self._plan_key = plan_files(self._view.table), key
        return self._plan

    def _begin(
        self,
        identity: Identity,
        claims: Mapping[int, Claim],
        cut: Cut | None,
        view: TableView | None,
    ) -> float | None:
        spans = cut.prepared.spans if cut is not None else {}
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
        match outcome.verdict:
            case Halted(reason, message):
                return self._halt(reason, message)
            case Fenced(partitions):
                for number, epoch in partitions.items():
                    run = self._partitions[number]
                    run.fence(epoch)
                    log.warning(
                        "fenced topic=%s partition=%d %s", self.where.topic, number, run.message
                    )
                self._view = None
                return now
            case MovedBack(partitions):
                self._rewind(partitions)
                self._view = outcome.view
                return now
            case Recut(partitions):
                log.info("rows were there already topic=%s next=%s", self.where.topic, partitions)
                for number, found in partitions.items():
                    self._partitions[number].next = found
                self._view = outcome.view
                return now
        assert outcome.view is not None
        self._saw(outcome.view)
        if cut is None:
            self._opened(outcome.view)
            return now
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
        self._since = self._cut_at if any(r.waiting for r in self._partitions.values()) else None
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

    def _rewind(self, partitions: Mapping[int, tuple[int, int]]) -> None:
        counters = self._get_committer().counters
        for number, (known, found) in partitions.items():
            counters.frontier_moved_back += 1
            run = self._partitions[number]
            run.rewind(found)
            log.error(
                "the catalog has forgotten a commit topic=%s partition=%d next=%d was=%d state=%s",
                self.where.topic,
                number,
                found,
                known,
                run.phase.value,
            )

    # Trouble.

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

    def _halt(self, reason: str, message: str) -> float | None:
        log.error("topic stopped topic=%s reason=%s %s", self.where.topic, reason, message)
        for run in self._partitions.values():
            if run.phase is not Phase.STOPPED:
                run.stop(reason, message)
        self._view = None
        return self._clock.monotonic() + RECHECK_S

    def _stop_partition(self, number: int, reason: str, message: str) -> None:
        log.error(
            "partition stopped topic=%s partition=%d reason=%s %s",
            self.where.topic,
            number,
            reason,
            message,
        )
        self._partitions[number].stop(reason, message)

    def _abandon_commit(self) -> None:
        """Give up an attempt; its files stay, since its outcome may be unknown."""
        if self._commit is not None:
            self._commit.close()
        self._commit, self._cut = None, None

    def _release(self) -> None:
        self._view, self._plan, self._plan_key = None, None, None
        if self._committer is not None:
            self._committer.release()

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
        with self.changed:
            # Whoever has just assigned may be a new edge that knows nothing yet.
            if state == self.state and not self._announce:
                return
            self.state = state
            self._announce = False
            self.changed.notify_all()
        self._notify(state)


def topic_table(assignment: TopicAssignment) -> TopicTable:
    """Read what an assignment says of the topic and its table."""
    first = next(iter(assignment.partitions.values()))
    return TopicTable(
        topic=TopicName.parse(assignment.topic),
        uuid=assignment.uuid,
        spec=TopicSpec.model_validate_json(assignment.spec),
        directory=Path(first.directory).parent,
    )
