"""The judge of a soak: it says "held" only of what was really tried."""

import copy
import http.client
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools import soak, soak_judge

SAMPLES = [
    {"minute": float(n), "files": 9, "snapshots": 80, "metadata_kib": 70.0} for n in range(6)
]
SEEN: dict[str, Any] = {
    "messages": 7,
    "readers": {"silent": []},
    "upkeep": {"outcomes": {"compact done": 3, "expire done": 2}, "failed": []},
    "samples": SAMPLES,
}


def test_a_sound_run_has_nothing_against_it() -> None:
    assert soak_judge.judge_work(SEEN) == []


def test_what_did_not_happen_is_told() -> None:
    """Dead readers and no compaction at all were a run that held."""
    nothing = {
        "messages": 0,
        "readers": {"silent": ["history 0", "live 1"]},
        "upkeep": {
            "outcomes": {"compact nothing-to-do": 6, "expire nothing-to-do": 6},
            "failed": ["compact: FileDamaged"],
        },
        "samples": SAMPLES,
    }
    wrong = soak_judge.judge_work(nothing, alive=2)
    for words in (
        *("2 readers", "no message", "history 0", "live 1", "0 of 6 compactions"),
        *("0 of 3 rounds expired", "upkeep failed: compact: FileDamaged"),
    ):
        assert any(words in text for text in wrong), (words, wrong)


@pytest.mark.parametrize("name", soak_judge.FLAT)
def test_growth_is_told_once_the_first_minutes_are_over(name: str) -> None:
    seen = copy.deepcopy(SEEN)
    for sample in seen["samples"]:
        sample[name] = soak_judge.FLAT[name] + 1
    assert len(soak_judge.judge_work(seen)) == sum(
        each["minute"] > soak_judge.WARM_MIN for each in SAMPLES
    )


RECORDED = json.loads((Path(soak.__file__).parents[1] / "docs" / "soak.json").read_text())


def test_the_recorded_run_is_flat() -> None:
    assert len(RECORDED["samples"]) > 10
    assert soak_judge.grown(RECORDED["samples"]) == []


@pytest.mark.parametrize("name", soak_judge.RISE)
def test_a_leak_is_told_before_it_reaches_a_bound(name: str) -> None:
    """What is lost with every commit is far below any bound after 20 minutes."""
    samples = copy.deepcopy(RECORDED["samples"])
    for sample in samples[-len(samples) // 3 :]:
        sample[name] = 2 * sample[name] + soak_judge.RISE[name]
    (told,) = [text for text in soak_judge.grown(samples) if "rose" in text]
    assert name in told


def test_a_sample_that_could_not_be_taken_is_left_out() -> None:
    samples = [{**sample, "flush_ms": None} for sample in RECORDED["samples"]]
    del samples[8]["cpu_ms_per_commit"]
    assert soak_judge.grown(samples) == []


class Driver(soak.Upkeep):
    """One that answers by a script; an exception is a kill of ours."""

    def __init__(self, *script: dict[str, Any] | None) -> None:
        super().__init__(Path(), Path())
        self.script = list(script)

    def _ask(self, word: str) -> dict[str, Any] | None:
        self._was_killed = word == "killed"
        return self.script.pop(0)


def test_what_fails_is_told_unless_we_have_killed_it() -> None:
    failed = {"job": "compact", "outcome": "failed", "message": "FileDamaged"}
    fine = {"job": "expire", "outcome": "done", "message": ""}
    script = ({"reports": [failed, fine]}, {"error": "CatalogAway"}, None)
    driver = Driver(*script, *script, {"reports": [fine]})
    answers = [driver.ask(word) for word in ("1", "2", "3", "killed", "killed", "killed", "4")]
    assert [answer is None for answer in answers] == [False, True, True] * 2 + [False]
    assert driver.failed == [
        "compact: FileDamaged",
        "CatalogAway",
        "the driver ended, or gave no answer in time",
    ]


class Answers:
    """A worker that answers by a script."""

    def __init__(self, script: list[Exception | tuple[int, Any]]) -> None:
        self.script = script
        self.reader: soak.Reader | None = None

    def get(self, _path: str) -> Any:
        said = self.script.pop(0)
        if not self.script and self.reader is not None:
            self.reader.halt.set()
        if isinstance(said, Exception):
            raise said
        status, page = said

        def read() -> Any:
            if isinstance(page, Exception):
                raise page
            return page

        return SimpleNamespace(status=status, body=b"", json=read)


def walked(*script: Exception | tuple[int, Any]) -> soak.Reader:
    worker: Any = Answers(list(script))
    reader = soak.Reader(worker, 0, live=False)
    worker.reader = reader
    reader.run()
    return reader


PAGE = (200, {"messages": [{"offset": 0}], "next_offset": 1, "end_offset": 1})


def test_a_worker_killed_in_the_middle_of_an_answer_ends_no_reader() -> None:
    cut = http.client.IncompleteRead(b"x", 10)
    reader = walked(OSError("reset"), cut, (200, ValueError("half a page")), (503, None), PAGE)
    assert (reader.wrong, reader.rounds, reader.retries) == ([], 1, 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_ends_by_itself_is_told_of() -> None:
    worker: Any = Answers([(200, {})])
    reader = soak.Reader(worker, 0, live=False)
    reader.start()
    reader.join(10)
    (text,) = reader.wrong
    assert "reader of partition 0 ended: KeyError" in text
