"""The comparison of compaction counts only what was done."""

from typing import Any

import pytest
from tools import bench_compact

from tidewater_pipeline.report import Outcome, Report


@pytest.mark.parametrize(
    ("outcome", "left", "is_whole"),
    [
        (Outcome.DONE, 0, True),
        (Outcome.DONE, 2, False),
        (Outcome.CONFLICT, 0, False),
        (Outcome.FAILED, 0, False),
    ],
)
def test_a_rewrite_that_was_not_done_is_not_compared(
    outcome: Outcome, left: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the quickest of all."""
    report = Report("compact", "a/b", outcome=outcome, details={"left_ranges": left})
    monkeypatch.setattr("tidewater_pipeline.jobs.compact.run", lambda *_: report)
    nothing: Any = None
    if is_whole:
        bench_compact.ours(nothing, nothing)
    else:
        with pytest.raises(RuntimeError, match="compact: "):
            bench_compact.ours(nothing, nothing)
