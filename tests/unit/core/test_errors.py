"""Errors keep their kind over any hop, and say what to do."""

import pickle

import pytest

from tidewater_core import errors
from tidewater_core.errors import TidewaterError

KINDS: list[tuple[type[TidewaterError], int]] = [
    (errors.Retryable, 503),
    (errors.OutcomeUnknown, 503),
    (errors.Fenced, 409),
    (errors.Overloaded, 429),
    (errors.Corrupt, 500),
    (errors.Invalid, 400),
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.TooLarge, 413),
    (errors.Unsupported, 415),
]


@pytest.mark.parametrize(("kind", "status"), KINDS)
def test_kind_survives_json_and_pickle(kind: type[TidewaterError], status: int) -> None:
    error = kind("SomeReason", "what happened", 250)
    assert error.status == status
    for copy in (TidewaterError.from_json(error.to_json()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is kind
        assert (copy.reason, copy.message, copy.retry_after_ms) == (
            "SomeReason",
            "what happened",
            250,
        )


def test_body_is_the_documented_one() -> None:
    assert errors.NotFound("UnknownTopic", "no topic a/b").to_body() == {
        "error": {"kind": "NotFound", "reason": "UnknownTopic", "message": "no topic a/b"}
    }
    assert errors.Overloaded("LogFull", "wait", 100).to_body()["error"]["retry_after_ms"] == 100
    assert str(errors.Invalid("BadJson", "line 3")) == "BadJson: line 3"


@pytest.mark.parametrize(("kind", "status"), KINDS)
def test_the_body_tells_kinds_of_one_status_apart(kind: type[TidewaterError], status: int) -> None:
    error = kind("SomeReason", "what happened", 250)
    assert type(TidewaterError.from_json(error.to_body(), status)) is kind


def test_a_class_of_one_place_travels_as_its_kind() -> None:
    class CommitRefused(errors.Retryable):
        """Known to one module only."""

    assert type(TidewaterError.from_json(CommitRefused("R", "m").to_json())) is errors.Retryable


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.Invalid),
        (404, errors.NotFound),
        (409, errors.Conflict),
        (413, errors.TooLarge),
        (415, errors.Unsupported),
        (422, errors.Invalid),
        (429, errors.Overloaded),
        (503, errors.Retryable),
        (500, errors.OutcomeUnknown),
        (None, errors.OutcomeUnknown),
    ],
)
def test_a_client_names_the_kind_by_the_status(
    status: int | None, kind: type[TidewaterError]
) -> None:
    body = {"error": {"reason": "Some", "message": "m"}}
    assert type(TidewaterError.from_json(body, status)) is kind


@pytest.mark.parametrize("body", [{}, {"error": "text"}, {"error": None}, {"kind": "NoSuch"}])
def test_a_body_of_a_stranger_is_still_an_error(body: dict[str, object]) -> None:
    assert type(TidewaterError.from_json(body)) is errors.OutcomeUnknown
