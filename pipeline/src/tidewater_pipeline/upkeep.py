"""maintain: everything that keeps a table healthy, in one session and in the right order.

The order has reasons. Retention comes first: rows that leave need not be rewritten. Compaction
adds manifests, which are joined next; expiry then lets go of what both have replaced, and last
orphans finds what no version of the table names. What is to be done comes from the Topic's spec,
as the registry has it; options win over it. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidewater_core.compaction import FILES_MIN
from tidewater_core.crd.topic import TopicSpec
from tidewater_core.names import ORPHANS_AT
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.jobs.compact import BUDGET, LATENESS, CompactOptions
from tidewater_pipeline.jobs.expire import RETAIN_LAST, ExpireOptions
from tidewater_pipeline.jobs.manifests import MANIFESTS_MIN, ManifestOptions
from tidewater_pipeline.jobs.orphans import GRACE, SETTLE, OrphanOptions
from tidewater_pipeline.jobs.retention import RetentionOptions
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.subscribers import Subscribers

STEPS: Final = ("retention", "compact", "manifests", "expire", "orphans")
ORPHANS_EVERY: Final = Duration("6h")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpkeepOptions:
    """What a person or the operator can choose; None: what the Topic says, else the default."""

    keep: Duration | None = None
    force: bool | None = None
    target: ByteSize | None = None
    older_than: Duration | None = None
    retain_last: int = RETAIN_LAST
    lateness: Duration = LATENESS
    files_min: int = FILES_MIN
    include_open: bool = False
    budget: Duration = BUDGET
    manifests_min: int = MANIFESTS_MIN
    grace: Duration = GRACE
    settle: Duration = SETTLE
    orphans_every: Duration = ORPHANS_EVERY
    """Looking for orphans lists every file of the table: not at each run."""
    pins: frozenset[int] = frozenset()
    skip: frozenset[str] = frozenset()
    """Steps that are left out."""


@dataclass(frozen=True, slots=True)
class UpkeepPlan:
    """The options of each step; None: the step has nothing to do."""

    retention: RetentionOptions | None
    compact: CompactOptions
    manifests: ManifestOptions
    expire: ExpireOptions
    orphans: OrphanOptions

    def option(self, step: str) -> Any:
        """Return the options of a step."""
        return getattr(self, step)


def plan_upkeep(options: UpkeepOptions, known: Subscribers) -> UpkeepPlan:
    """Decide what each step does, from the Topic's spec and the options."""
    spec = known.spec or TopicSpec()
    kept = spec.retention
    keep = options.keep or (kept.time if kept is not None else None)
    force = options.force if options.force is not None else (kept is not None and kept.force)
    retention = None
    if keep is not None:
        retention = RetentionOptions(keep=keep, cursors=known.cursors, force=force)
    target = options.target or (spec.maintenance.target_file_size if known.spec else None)
    return UpkeepPlan(
        retention=retention,
        compact=CompactOptions(
            target=target,
            files_min=options.files_min,
            lateness=options.lateness,
            include_open=options.include_open,
            budget=options.budget,
        ),
        manifests=ManifestOptions(manifests_min=options.manifests_min),
        expire=ExpireOptions(
            older_than=options.older_than or spec.maintenance.snapshot_age,
            retain_last=options.retain_last,
            pins=options.pins,
            cursors=known.cursors,
        ),
        orphans=OrphanOptions(grace=options.grace, settle=options.settle, delete=True),
    )


def orphans_due(properties: Mapping[str, str], every: Duration, now_ms: int) -> bool:
    """Say if it is time to look for orphans again."""
    text = properties.get(ORPHANS_AT, "")
    return not text.isdigit() or now_ms - int(text) >= every.ms


def skipped(job: str, topic: str, why: str) -> Report:
    """Report a step that had no reason to run."""
    return Report(job, topic, outcome=Outcome.NOTHING, message=why)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a topic's upkeep ended as a whole."""

    outcome: Outcome
    retry: bool
    message: str


def verdict(reports: list[Report]) -> Verdict:
    """Judge the steps together: a failure first, then what was refused, then what was done."""
    for report in reports:
        if report.outcome is Outcome.FAILED:
            return Verdict(Outcome.FAILED, report.retry, f"{report.job}: {report.message}")
    for wanted in (Outcome.REFUSED, Outcome.CONFLICT, Outcome.DONE):
        for report in reports:
            if report.outcome is wanted:
                text = f"{report.job}: {report.message}" if report.message else ""
                return Verdict(wanted, False, text)
    return Verdict(Outcome.NOTHING, False, "")
