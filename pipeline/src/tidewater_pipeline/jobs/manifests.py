"""manifests: joins small manifests so that planning a query reads few.

The writer merges its own manifests as it goes; if it does so while Spark rewrites them, Spark's
commit is refused. That is no failure: the next attempt, or the next run, finds fewer.
"""

from dataclasses import dataclass
from typing import Final

from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import ConflictError, Session, TopicTable
from tidewater_pipeline.state import sql_text

ATTEMPTS_MAX: Final = 3
MANIFESTS_MIN: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestOptions:
    """What a person can choose."""

    manifests_min: int = MANIFESTS_MIN
    """A table with fewer is left alone."""


def run(session: Session, table: TopicTable, options: ManifestOptions) -> Report:
    """Rewrite the manifests if there are many."""
    state = table.load()
    before = state.size
    report = Report("manifests", str(table.topic), before=before, after=before)
    if before.manifests < options.manifests_min:
        report.outcome = Outcome.NOTHING
        return report
    for attempt in range(1, ATTEMPTS_MAX + 1):
        session.progress.say(f"{table.topic}: rewriting {before.manifests} manifests")
        try:
            session.sql(
                f"CALL {session.procedure('rewrite_manifests')}"
                f"(table => {sql_text(table.name)}, use_caching => false)"
            )
        except ConflictError as error:
            report.outcome, report.message = Outcome.CONFLICT, error.message
            report.details = {"attempts": attempt}
            continue
        report.outcome, report.message = Outcome.DONE, ""
        table.settle(state)
        break
    report.after = table.load().size
    return report
