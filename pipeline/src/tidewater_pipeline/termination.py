"""The message that a finished container leaves for who started it: at most 4 KiB of JSON. Pure.

    message := {"version": 1, "ok": …, "retry": …, "seconds": …, "core_seconds": …, "topics": [topic …]}
    topic   := {"topic", "outcome", "retry", "message", "seconds", "before", "after", "removed",
                "steps": [{"job", "outcome", "seconds", "message"?} …]}

`before` and `after` are files, bytes, rows, snapshots, manifests and delete_files of the table.
`retry` says of a failure whether the same run may succeed later. What does not fit is cut: texts
first, then steps, then topics. The report on stdout or in a file says all of it.
"""  # noqa: E501 - the grammar

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.state import Size
from tidewater_pipeline.upkeep import Verdict

VERSION: Final = 1
BYTES_MAX: Final = 4096
"""Kubernetes keeps no more."""
_TEXT_LIMITS: Final = (400, 120, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicResult:
    """What became of one topic."""

    topic: str
    verdict: Verdict
    steps: Sequence[Report] = ()
    before: Size | None = None
    after: Size | None = None
    seconds: float = 0.0

    @property
    def removed(self) -> dict[str, int]:
        """What the steps took away, by kind."""
        compacted = [
            each
            for step in self.steps
            if step.job == "compact"
            for each in step.details.get("ranges", [])
        ]
        names = {"expire": "expired_snapshots", "orphans": "removed", "retention": "removed_files"}
        by_job = {
            step.job: int(step.details.get(names.get(step.job, ""), 0)) for step in self.steps
        }
        return {
            "rewritten_files": sum(each["rewritten_files"] for each in compacted),
            "added_files": sum(each["added_files"] for each in compacted),
            "expired_snapshots": by_job.get("expire", 0),
            "orphans": by_job.get("orphans", 0),
            "retired_files": by_job.get("retention", 0),
        }

    def to_json(self, text_max: int = 400, with_steps: bool = True) -> dict[str, Any]:
        """Return the values, texts cut to `text_max` characters."""
        whole: dict[str, Any] = {
            "topic": self.topic,
            "outcome": str(self.verdict.outcome),
            "retry": self.verdict.retry,
            "message": self.verdict.message[: max(text_max, 80)],
            "seconds": round(self.seconds, 1),
            "before": self.before.to_json() if self.before else None,
            "after": self.after.to_json() if self.after else None,
            "removed": self.removed,
        }
        if with_steps:
            whole["steps"] = [_step(each, text_max) for each in self.steps]
        return whole


def _step(report: Report, text_max: int) -> dict[str, Any]:
    step = {
        "job": report.job,
        "outcome": str(report.outcome),
        "seconds": round(report.seconds, 1),
    }
    return step | ({"message": report.message[:text_max]} if report.message and text_max else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What became of a run."""

    topics: tuple[TopicResult, ...] = ()
    seconds: float = 0.0
    core_seconds: float = 0.0
    error: Verdict | None = field(default=None)
    """Why no topic could be looked at."""

    @property
    def verdicts(self) -> list[Verdict]:
        """All there are."""
        return [*([self.error] if self.error else []), *(each.verdict for each in self.topics)]

    @property
    def ok(self) -> bool:
        """Say if nothing failed; refusing to break a promise is no failure."""
        return all(each.outcome is not Outcome.FAILED for each in self.verdicts)

    @property
    def retry(self) -> bool:
        """Say if what failed may succeed when it is run again as it is."""
        failed = [each for each in self.verdicts if each.outcome is Outcome.FAILED]
        return bool(failed) and all(each.retry for each in failed)

    def report(self) -> str:
        """Write all of it."""
        return self._write(sys.maxsize, with_steps=True)

    def message(self) -> str:
        """Write the message, as much of it as fits."""
        for text_max in _TEXT_LIMITS:
            text = self._write(text_max, with_steps=True)
            if len(text.encode()) <= BYTES_MAX:
                return text
        text = self._write(0, with_steps=False)
        shown = len(self.topics)
        while len(text.encode()) > BYTES_MAX and shown:
            shown -= 1
            text = self._write(0, with_steps=False, shown=shown)
        return text

    def _write(self, text_max: int, *, with_steps: bool, shown: int | None = None) -> str:
        whole: dict[str, Any] = {
            "version": VERSION,
            "ok": self.ok,
            "retry": self.retry,
            "seconds": round(self.seconds, 1),
            "core_seconds": round(self.core_seconds, 1),
        }
        if self.error is not None:
            whole["message"] = self.error.message[: max(text_max, 400)]
        listed = self.topics if shown is None else self.topics[:shown]
        whole["topics"] = [each.to_json(text_max, with_steps) for each in listed]
        if len(listed) < len(self.topics):
            whole["left_out"] = len(self.topics) - len(listed)
        return json.dumps(whole, separators=(",", ":"), ensure_ascii=False)
