"""What a job tells: lines of progress for people, one JSON report at the end for machines."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TextIO

from tidewater_core.errors import OutcomeUnknown, Overloaded, Retryable, TidewaterError
from tidewater_pipeline.state import Size


class Outcome(StrEnum):
    """How a job ended on one topic."""

    DONE = "done"
    NOTHING = "nothing-to-do"
    CONFLICT = "conflict"
    """The writer was faster each time: not a failure, the next run tries again."""
    REFUSED = "refused"
    """Doing it would break a promise; the message says which and what to change."""
    FAILED = "failed"
    FOUND = "violations-found"
    """An audit that found what must not be."""


GOOD = frozenset({Outcome.DONE, Outcome.NOTHING, Outcome.CONFLICT})


@dataclass(slots=True)
class Report:
    """The result of one job on one topic."""

    job: str
    topic: str
    outcome: Outcome = Outcome.DONE
    message: str = ""
    before: Size | None = None
    after: Size | None = None
    seconds: float = 0.0
    retry: bool = False
    """A failure that may be gone when the job is run again as it is."""
    is_partial: bool = False
    """A failure of a part: all else was done, and what comes next can be."""
    is_last: bool = False
    """A failure after which nothing else may be done to the topic by this run."""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return everything that is known."""
        return {
            "job": self.job,
            "topic": self.topic,
            "outcome": str(self.outcome),
            "message": self.message,
            "retry": self.retry,
            "before": self.before.to_json() if self.before else None,
            "after": self.after.to_json() if self.after else None,
            "seconds": round(self.seconds, 3),
            **self.details,
        }


def passes(error: TidewaterError) -> bool:
    """Say if an error may be gone when the same is done again."""
    return isinstance(error, (Retryable, OutcomeUnknown, Overloaded))


def summary(reports: list[Report], session_seconds: float, cores: int) -> str:
    """Return the JSON text of a whole run; `core_seconds` is its cost."""
    seconds = session_seconds + sum(report.seconds for report in reports)
    whole = {
        "ok": all(report.outcome in GOOD for report in reports),
        "session_seconds": round(session_seconds, 3),
        "seconds": round(seconds, 3),
        "cores": cores,
        "core_seconds": round(seconds * cores, 3),
        "reports": [report.to_json() for report in reports],
    }
    return json.dumps(whole, indent=2)


class Progress:
    """Lines on stderr: what is being done, and how long it has taken so far."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._quiet = quiet
        self._stream = stream if stream is not None else sys.stderr
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Write one line."""
        if not self._quiet:
            self._stream.write(f"[{time.monotonic() - self._began:6.1f} s] {text}\n")
            self._stream.flush()
