"""Errors, by what to do next.

    Retryable       nothing was done                        try again later; the client did so
    Overloaded      nothing was done: a limit was reached   slow down, try again
    OutcomeUnknown  no answer: it may have been done        look before doing it again
    Invalid         nothing was done: the request is wrong  change it (NotFound, Forbidden …)
    Fenced          another owner has taken over            stop
    Corrupt         stored bytes are wrong                  stop, keep the evidence

Each has `reason` (a word for programs), `message` (for people) and `retry_after_ms`. The client
repeats what is safe to repeat before it raises; the error that comes out is the last one.
"""

from tidewater_core.errors import (
    Conflict,
    Corrupt,
    Fenced,
    Forbidden,
    Invalid,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Retryable,
    TidewaterError,
    TooLarge,
    Unauthenticated,
    Unsupported,
)

PASSING = (Retryable, Overloaded, OutcomeUnknown)
"""Errors that may be gone when the same is asked again."""

__all__ = [
    "PASSING",
    "Conflict",
    "Corrupt",
    "Fenced",
    "Forbidden",
    "Invalid",
    "NotFound",
    "OutcomeUnknown",
    "Overloaded",
    "Retryable",
    "TidewaterError",
    "TooLarge",
    "Unauthenticated",
    "Unsupported",
]
