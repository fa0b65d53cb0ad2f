"""What a caller is told of acks that owners could not store: the same whoever was asked (G4)."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.errors import (
    Fenced,
    Invalid,
    OutcomeUnknown,
    Overloaded,
    Retryable,
    TidewaterError,
)
from tidewater_worker.dispatch.report import Refusal, Report
from tidewater_worker.dispatch.spread import Spread
from tidewater_worker.dispatch.subscription import Subscription

AWAY = Retryable("StoreAway", "etcd is away", 1_000)
BUSY = Overloaded("Busy", "busy", 100)
UNKNOWN = OutcomeUnknown("NoAnswer", "no answer", 500)
MOVED = Fenced("PartitionMoved", "another owner")
WRONG = Invalid("Wrong", "not an id")
DONE = {"acked": 1, "refused": []}
STALE = {"acked": 0, "refused": [{"ack_id": "1", "reason": "Stale", "message": "over"}]}


async def settle(answers: list[Any], report: Report) -> Report:
    """Ask one owner for each answer."""

    async def settle_at(url: str, *_: object) -> Any:
        said = answers[int(url)]
        if isinstance(said, TidewaterError):
            raise said
        return said

    away = {str(number): [str(number)] for number in range(len(answers))}
    fake: Any = SimpleNamespace(_settle_at=settle_at)
    return await Spread._settle(fake, report, "/ack", "acked", away, {})


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([AWAY], AWAY),
        ([AWAY, BUSY], AWAY),
        ([AWAY, UNKNOWN], UNKNOWN),  # "nothing was written" would not be true
        ([MOVED, UNKNOWN], UNKNOWN),
        ([DONE, WRONG], WRONG),
    ],
)
async def test_nothing_was_done(answers: list[Any], told: TidewaterError) -> None:
    with pytest.raises(TidewaterError) as caught:
        await settle(answers, Report())
    assert caught.value is told


@pytest.mark.parametrize(
    ("answers", "done", "refused"),
    [
        ([DONE, AWAY], 1, ["StoreAway"]),
        ([STALE, AWAY], 0, ["Stale", "StoreAway"]),
        ([MOVED], 0, ["PartitionMoved"]),  # asked again by id, it finds the new owner
        ([MOVED, AWAY], 0, ["PartitionMoved", "StoreAway"]),
    ],
)
async def test_what_some_could_not_do_is_told_by_id(
    answers: list[Any], done: int, refused: list[str]
) -> None:
    report = await settle(answers, Report())
    assert report.done == done
    assert [each.reason for each in report.refused] == refused


async def test_what_was_done_here_counts() -> None:
    report = await settle([AWAY], Report(done=1))
    assert (report.done, [each.reason for each in report.refused]) == (1, ["StoreAway"])
    stale = Refusal("0", "Stale", "over")
    report = await settle([AWAY], Report(refused=[stale]))
    assert [each.reason for each in report.refused] == ["Stale", "StoreAway"]


async def test_a_partition_that_moves_away_is_something_to_try_again() -> None:
    async def save(_items: object) -> None:
        raise MOVED

    fake: Any = SimpleNamespace(_store=SimpleNamespace(save=save), _key=id)
    part: Any = SimpleNamespace(encode=None, is_durable=True)
    with pytest.raises(Retryable, match="PartitionMoving"):
        await Subscription._save(fake, [part])
