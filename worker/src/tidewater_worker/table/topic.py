"""One topic between its logs and its table: a state machine that the scheduler steps.

Calls from the link only leave notes (`Inbox`) and poke the scheduler; everything else happens in
`step`, on one thread at a time:

    open the table ─▶ wait until a flush is due ─▶ cut a batch ─▶ commit it ─▶ wait …
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tidewater_core.errors import Corrupt, Invalid, Retryable, TidewaterError
from tidewater_worker.memory import give_back
from tidewater_worker.ports import Phase
from tidewater_worker.table.commit import (
    Halted,
    Identity,
    Outcome,
    Reply,
    Wait,
    check_head,
    check_identity,
    run_commit,
)
from tidewater_worker.table.cut import Cut, SourceFailed, cut_batch
from tidewater_worker.table.files import FilePlan, plan_files
from tidewater_worker.table.frontier import UNWRITTEN, Claim, Fenced, MovedBack, Recut
from tidewater_worker.table.opening import (
    bind_table,
    load_fitting,
    open_table,
    topic_table,
)
from tidewater_worker.table.pace import Waiting, flush_due
from tidewater_worker.table.topic_base import RECHECK_S
from tidewater_worker.table.topic_joint import JointTopic
from tidewater_worker.table.view import TableView

log = logging.getLogger(__name__)

IDLE_RELEASE_S: Final = 10.0
"""An idle topic gives its memory back after this: a thousand of them must cost nothing."""
RELOAD_S: Final = 10.0
"""How often to load the table although our last commit has told its state: what others set on
`main` without moving it would be overwritten with what it was."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A batch could not be cut."""

    again: float | None
    """When to be called again."""


class TopicRun(JointTopic):
    """A topic that this worker owns partitions of."""

    # Run by the scheduler, one thread at a time.

    def step(self) -> float | None:
        """Do what is due; return when to be called again, None to wait for a poke."""
        self._absorb()
        now = self._clock.monotonic()
        try:
            if now < self._not_before:
                return self._not_before
            return self._advance(now)
        except Exception as error:
            log.exception("a step failed topic=%s", self.where.topic)
            return self._fault(error)
        finally:
            self._publish()

    def _fault(self, error: Exception) -> float:
        """Take what nobody has foreseen for a failure that may pass, and say so (G7)."""
        self._abandon_commit()
        self._view = self._plan = None
        said = f"a fault of the worker, whose log has more: {type(error).__name__}: {error}"
        fault = Retryable("WorkerFault", said[:500])
        self.offers.refuse(fault.reason, fault.message)
        return self._fail(fault)

    def _absorb(self) -> None:
        """Take in what the link has said."""
        assignment, ends = self.inbox.take()
        self._role = assignment.commits
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
        self._abandon_joint()

    def _advance(self, now: float) -> float | None:
        if self._handed is not None:
            return self._await_answer()
        if self._joint is not None:
            return self._drive_joint()
        if self._commit is not None:
            return self._drive()
        offers_due = self._joint_due(now)
        if offers_due is None:
            return self._advance_own(now)
        if offers_due <= now:
            return self._flush()
        own = self._advance_own(now)
        return offers_due if own is None else min(own, offers_due)

    def _advance_own(self, now: float) -> float | None:
        if self._partitions.opening:
            return self._open()
        if not self._partitions.mendable:
            return self._advance_running(now)
        if now >= self._recheck_at:
            return self._recheck(now)
        again = self._advance_running(now)
        return self._recheck_at if again is None else min(again, self._recheck_at)

    def _advance_running(self, now: float) -> float | None:
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
        if self.inbox.in_haste or self._is_wanted:
            return now
        writer = self.where.spec.writer
        since = self._since or now
        due = flush_due(
            Waiting(rows, int(rows * self._row_bytes), since),
            interval_s=writer.flush_interval.seconds,
            rows_max=writer.batch_rows,
            bytes_max=int(writer.batch_bytes),
            committed_at=self._commit_at,
            backlog=self._backlog,
        )
        return self._aligned(due, since)

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
        if claims and self._hands_over and not ours and not self._epochs_handed:
            self._epochs_handed = True  # what fails once is done alone
            return self._hand_over(identity, claims)
        if claims:
            return self._begin(identity, claims, view)
        return self._opened(view)

    def _opened(self, view: TableView) -> float:
        """Take the frontiers of a table that is ours."""
        self._saw(view)
        self._epochs_handed = False
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
        for run in self._partitions.values():
            run.running()  # those beside them: what kept us from looking has passed
        if self._partitions.mendable:
            self._recheck_at = self._clock.monotonic() + RECHECK_S
        self._note_waiting()
        return self._clock.monotonic()

    def _recheck(self, now: float) -> float | None:
        """Look again at what has stopped, unless other owners have it."""
        self._recheck_at = now + RECHECK_S
        for run in self._partitions.mendable:
            run.phase, run.opened, run.is_damaged = Phase.OPENING, False, False
        return self._open()

    # Flushing.

    def _flush(self) -> float | None:
        """Cut a batch from the logs and begin to commit it, or hand it over."""
        self._joint_at = self._clock.monotonic()
        taken = self.offers.take()
        failed = self._make_cut() if self._partitions.waiting else None
        if taken:
            return self._begin_joint(taken)
        if failed is not None:
            return failed.again
        if self._cut is None:  # whoever offered has gone
            return self._joint_at
        identity, claims = self._identity(), self._partitions.claims()
        if self._hands_over:
            return self._hand_over(identity, claims)
        return self._begin(identity, claims, self._view)

    def _make_cut(self) -> "_Failed | None":
        self._cut_at = self._clock.monotonic()
        writer, maintenance = self.where.spec.writer, self.where.spec.maintenance
        try:
            self._identity()
            self._cut = cut_batch(
                self._file_plan(),
                self._partitions.sources(),
                self._ids,
                bytes_max=max(int(writer.batch_bytes), int(maintenance.target_file_size)),
                memory_bytes_max=int(writer.max_memory),
            )
        except SourceFailed as failed:
            if not isinstance(failed.error, Corrupt):
                return _Failed(self._fail(failed.error))
            self._stop(failed.partition, failed.error)
            self._partitions[failed.partition].is_damaged = failed.error.reason != "LogUnreadable"
            return _Failed(self._clock.monotonic())
        except (Invalid, Corrupt) as error:
            return _Failed(self._halt(error.reason, error.message))
        except TidewaterError as error:
            return _Failed(self._fail(error))
        self._row_bytes = max(1.0, self._cut.nbytes / self._cut.prepared.rows)
        return None

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
        view = outcome.view
        nexts = {number: view.frontiers[number].next for number in cut.prepared.spans}
        self._committed(cut, nexts, view.starts, now)
        return now

    def _committed(
        self, cut: Cut, nexts: Mapping[int, int], starts: Mapping[int, int], now: float
    ) -> None:
        for number in cut.prepared.spans:
            self._partitions[number].next = nexts[number]
        for run in self._partitions.values():
            run.start = starts.get(run.number, run.start)
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
            self._snapshot_id,
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
