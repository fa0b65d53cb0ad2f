"""What a request over several partitions is told when they do not end alike."""

from itertools import permutations

import pytest

from tidewater_core.errors import OutcomeUnknown, Retryable, TidewaterError
from tidewater_worker.api.produce import Answer
from tidewater_worker.log.producers import Stored

UNKNOWN = OutcomeUnknown("OwnerSilent", "it may be stored")
FULL = Retryable("LogDiskFull", "nothing was stored")


@pytest.mark.parametrize(
    "results", list(permutations([UNKNOWN, FULL, Retryable("Busy", "not now")]))
)
def test_what_may_be_stored_is_never_called_safe_to_send_again(
    results: tuple[TidewaterError, ...],
) -> None:
    told: list[Answer] = []
    answer = Answer(len(results), told.append)
    for number, result in enumerate(results):
        answer.one(number, result)
    (only,) = told
    assert only.error is UNKNOWN, "G8: sent again without an id it would be stored twice"


@pytest.mark.parametrize("results", list(permutations([FULL, Stored(5, 1)])))
def test_partly_stored_is_unknown(results: tuple[Stored | TidewaterError, ...]) -> None:
    answer = Answer(len(results), lambda _: None)
    for number, result in enumerate(results):
        answer.one(number, result)
    assert isinstance(answer.error, OutcomeUnknown)
