"""Doing the steps of the commit protocol against a real catalog."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidewater_core import names
from tidewater_core.clock import Clock, IdSource
from tidewater_core.errors import OutcomeUnknown, Retryable, TidewaterError
from tidewater_worker.table.catalog import CommitRefused, TableCatalog
from tidewater_worker.table.commit import AddRows, Load, RaiseEpoch, Reply
from tidewater_worker.table.files import remove_files
from tidewater_worker.table.frontier import UNWRITTEN, Claim, Frontier, gap_value
from tidewater_worker.table.opening import TopicTable, load_fitting
from tidewater_worker.table.snapshot import Keeping, ManifestCache, Prepared, propose
from tidewater_worker.table.view import TableView, view_after

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What has happened to a topic's commits since this process began."""

    commits: int = 0
    rows: int = 0
    conflicts: int = 0
    """Commits that the catalog refused: another one was first."""
    unknown_outcomes: int = 0
    """Commits without an answer; each was read back."""
    errors: int = 0
    """Other errors of catalog or warehouse."""
    epoch_commits: int = 0
    offers: int = 0
    """Batches of other workers that this one was asked to commit."""
    handed_over: int = 0
    """Batches of this worker that another one has committed."""
    frontier_moved_back: int = 0
    """Times that the catalog had forgotten an acknowledged commit."""
    commit_ms_last: float = 0.0
    """Duration of the last commit call with its manifest files."""
    flush_ms_last: float = 0.0
    """Duration of the last batch, from the log to the answered commit."""


class Committer:
    """Carries out the steps of one topic's commits."""

    def __init__(
        self,
        catalog: TableCatalog,
        where: TopicTable,
        clock: Clock,
        ids: IdSource,
        pinned: Callable[[], frozenset[int]],
    ) -> None:
        self.where = where
        self.counters = Counters()
        self._catalog = catalog
        self._clock = clock
        self._ids = ids
        self._pinned = pinned
        self._pinned_elsewhere = frozenset[int]()
        self._cache = ManifestCache()

    def perform(
        self,
        step: Load | RaiseEpoch | AddRows,
        claims: Mapping[int, Claim],
        prepared: Prepared | None,
        pinned: frozenset[int] = frozenset(),
    ) -> Reply:
        """Do one step; every failure is a TidewaterError that the protocol understands.

        `pinned` are snapshots that readers of other workers need.
        """
        self._pinned_elsewhere = pinned
        try:
            match step:
                case Load():
                    return load_fitting(self._catalog, self.where)
                case RaiseEpoch(view, adopt):
                    return self._raise_epoch(view, claims, adopt)
                case AddRows(view):
                    assert prepared is not None
                    return self._add_rows(view, claims, prepared)
        except TidewaterError as error:
            self._count(error)
            return error
        except OSError as error:
            self.counters.errors += 1
            return Retryable("WarehouseUnavailable", f"writing metadata files: {error}"[:500])

    def _count(self, error: TidewaterError) -> None:
        if isinstance(error, CommitRefused):
            self.counters.conflicts += 1
        elif isinstance(error, OutcomeUnknown):
            self.counters.unknown_outcomes += 1
        else:
            self.counters.errors += 1

    def _raise_epoch(self, view: TableView, claims: Mapping[int, Claim], adopt: bool) -> TableView:
        frontiers: dict[int, Frontier] = {}
        properties: dict[str, str] = {}
        if adopt:
            # The table's epochs were counted by a topic that is gone: ours begin anew.
            frontiers = {p: Frontier(f.next, 0) for p, f in view.frontiers.items()}
            properties = {names.TOPIC_UUID: self.where.uuid}
        for partition, claim in claims.items():
            found = view.frontiers.get(partition, UNWRITTEN)
            frontiers[partition] = Frontier(max(found.next, claim.gap_end), claim.epoch)
            if claim.gap_end > found.next:
                gaps = (*view.gaps.get(partition, ()), (found.next, claim.gap_end))
                properties[names.gap_property(partition)] = gap_value(gaps)
                log.error(
                    "a gap is recorded topic=%s partition=%d offsets=%d..%d",
                    self.where.topic,
                    partition,
                    found.next,
                    claim.gap_end - 1,
                )
        prepared = Prepared(
            self._ids.snapshot_id(), self._ids.uuid(), {}, (), None, properties=properties
        )
        after = self._commit(view, prepared, frontiers)
        self.counters.epoch_commits += 1
        log.info(
            "epoch committed topic=%s epochs=%s adopted=%s snapshot=%d",
            self.where.topic,
            {p: claim.epoch for p, claim in claims.items()},
            adopt,
            prepared.snapshot_id,
        )
        return after

    def _add_rows(
        self, view: TableView, claims: Mapping[int, Claim], prepared: Prepared
    ) -> TableView:
        frontiers = {p: Frontier(s.end, claims[p].epoch) for p, s in prepared.spans.items()}
        started = self._clock.monotonic()
        after = self._commit(view, prepared, frontiers)
        self.counters.commits += 1
        self.counters.rows += prepared.rows
        self.counters.commit_ms_last = (self._clock.monotonic() - started) * 1000
        return after

    def _commit(
        self, view: TableView, prepared: Prepared, frontiers: Mapping[int, Frontier]
    ) -> TableView:
        maintenance = self.where.spec.maintenance
        keeping = Keeping(
            count_max=maintenance.keep_snapshots,
            age_ms_max=int(maintenance.snapshot_age),
            pinned=self._pinned() | self._pinned_elsewhere,
        )
        now_ms = self._clock.now_us() // 1000
        proposal = propose(view, prepared, frontiers, self._cache, keeping, now_ms)
        response = self._catalog.commit(view.table, proposal.requirements, proposal.updates)
        after = view_after(view, response)
        if any(after.frontiers.get(p) != frontier for p, frontier in frontiers.items()):
            raise OutcomeUnknown("OddAnswer", "the catalog answered with another state than ours")
        self._cache.remember(proposal.snapshot_id, proposal.manifests)
        self._prune_metadata(view, after)
        return after

    def _prune_metadata(self, before: TableView, after: TableView) -> None:
        """Delete metadata files that have fallen off the table's metadata log."""
        properties = after.metadata.properties
        if properties.get("write.metadata.delete-after-commit.enabled", "false") != "true":
            return
        kept = {entry.metadata_file for entry in after.metadata.metadata_log}
        gone = [
            e.metadata_file for e in before.metadata.metadata_log if e.metadata_file not in kept
        ]
        remove_files(after.table.io, gone)

    def release(self) -> None:
        """Give back the memory of an idle topic."""
        self._cache = ManifestCache()
