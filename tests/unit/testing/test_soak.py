"""The judge of a soak: it says "held" only of what was really tried."""

import copy
import http.client
from types import SimpleNamespace
from typing import Any

import pytest
from tools import soak

SAMPLES = [
    {"minute": float(n), "files": 9, "snapshots": 80, "metadata_kib": 70.0} for n in range(6)
]
SEEN: dict[str, Any] = {
    "messages": 7,
    "readers": {"silent": []},
    "upkeep": {"outcomes": {"compact done": 3}},
    "samples": SAMPLES,
}


def test_a_sound_run_has_nothing_against_it() -> None:
    assert soak.judge_work(SEEN) == []


def test_what_did_not_happen_is_told() -> None:
    """Dead readers and no compaction at all were a run that held."""
    nothing = {
        "messages": 0,
        "readers": {"silent": ["history 0", "live 1"]},
        "upkeep": {"outcomes": {"compact nothing-to-do": 6}},
        "samples": SAMPLES,
    }
    wrong = soak.judge_work(nothing, alive=2)
    for words in ("2 readers", "no message", "history 0", "live 1", "0 of 6 compactions"):
        assert any(words in text for text in wrong), (words, wrong)


@pytest.mark.parametrize("name", soak.FLAT)
def test_growth_is_told_once_the_first_minutes_are_over(name: str) -> None:
    seen = copy.deepcopy(SEEN)
    for sample in seen["samples"]:
        sample[name] = soak.FLAT[name] + 1
    assert len(soak.judge_work(seen)) == sum(each["minute"] > soak.WARM_MIN for each in SAMPLES)


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
