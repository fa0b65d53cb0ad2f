"""Errors, named by what the caller must do next.

    TidewaterError          500  (never raised itself)
    ├── Retryable           503  nothing was written: try again, later
    ├── OutcomeUnknown      503  it may have been written: read back before trying again
    ├── Fenced              409  another owner has taken over: stop
    ├── Overloaded          429  a limit was reached: slow down, then try again
    ├── Corrupt             500  stored bytes are wrong: stop and keep the evidence
    └── Invalid             400  a person must change the request
        ├── Unauthenticated 401  no token, or one that is not valid
        ├── Forbidden       403  the user may not
        ├── NotFound        404
        ├── Conflict        409
        ├── TooLarge        413
        └── Unsupported     415

`reason` is a CamelCase word for machines (metrics, conditions, tests); `message` is for people.
`kind` is a name from this tree: two kinds share a status, and whether to try again hangs on it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class TidewaterError(Exception):
    """The root: an error with a reason for machines and a message for people."""

    status: ClassVar[int] = 500
    """The HTTP status that this kind of error becomes."""

    def __init__(self, reason: str, message: str, retry_after_ms: int | None = None) -> None:
        """Keep the three parts; `retry_after_ms` is a hint for when to try again."""
        super().__init__(reason, message, retry_after_ms)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        """Read as `Reason: message`."""
        return f"{self.reason}: {self.message}"

    @property
    def kind(self) -> str:
        """The name in the tree, also of an error whose class is known in one place only."""
        return next(base.__name__ for base in type(self).__mro__ if base.__name__ in _NAMES)

    def to_json(self) -> dict[str, Any]:
        """Return everything, for another part of Tidewater."""
        return self._parts()

    def to_body(self) -> dict[str, Any]:
        """Return the body of an HTTP answer: `{"error": {"kind", "reason", "message", …}}`."""
        return {"error": self._parts()}

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "kind": self.kind, "reason": self.reason, "message": self.message,
        }  # fmt: skip
        if self.retry_after_ms is not None:
            parts["retry_after_ms"] = self.retry_after_ms
        return parts

    @staticmethod
    def from_json(data: Mapping[str, Any], status: int | None = None) -> "TidewaterError":
        """Rebuild an error from `to_json`, or from `to_body` and the HTTP status.

        An error nobody can name becomes OutcomeUnknown: the careful thing to assume.
        """
        parts = data.get("error", data)
        if not isinstance(parts, Mapping):
            parts = {}
        reason = str(parts.get("reason", "Unknown"))
        message = str(parts.get("message", "no message"))
        kind = _KINDS.get(str(parts.get("kind", "")))
        if kind is None:
            kind = _kind_of_status(status, reason)
        retry_after_ms = parts.get("retry_after_ms")
        return kind(reason, message, None if retry_after_ms is None else int(retry_after_ms))


class Retryable(TidewaterError):
    """Nothing was written; the same call may succeed later."""

    status = 503


class OutcomeUnknown(TidewaterError):
    """No answer came: it may or may not have happened. Read back before trying again."""

    status = 503


class Fenced(TidewaterError):
    """Another owner has a higher epoch; this one must stop."""

    status = 409


class Overloaded(TidewaterError):
    """A limit was reached and nothing was written; slow down."""

    status = 429


class Corrupt(TidewaterError):
    """Stored bytes are not what was written; stop, and keep the evidence."""

    status = 500


class Invalid(TidewaterError):
    """The request cannot succeed until a person changes it."""

    status = 400


class Unauthenticated(Invalid):
    """Nobody knows who asks: there is no token, or it is not valid (any more)."""

    status = 401


class Forbidden(Invalid):
    """Who asks is known, and may not."""

    status = 403


class NotFound(Invalid):
    """The named thing does not exist."""

    status = 404


class Conflict(Invalid):
    """The request contradicts what is already there."""

    status = 409


class TooLarge(Invalid):
    """The request is over a size limit."""

    status = 413


class Unsupported(Invalid):
    """The content type is not one that can be read."""

    status = 415


_KINDS: dict[str, type[TidewaterError]] = {
    kind.__name__: kind
    for kind in (
        Retryable,
        OutcomeUnknown,
        Fenced,
        Overloaded,
        Corrupt,
        Invalid,
        Unauthenticated,
        Forbidden,
        NotFound,
        Conflict,
        TooLarge,
        Unsupported,
    )
}


_NAMES: frozenset[str] = frozenset({*_KINDS, TidewaterError.__name__})


def _kind_of_status(status: int | None, reason: str) -> type[TidewaterError]:
    """Name the kind of an error whose class did not travel with it."""
    if reason in _KINDS:
        return _KINDS[reason]
    exact: dict[int, type[TidewaterError]] = {
        401: Unauthenticated,
        403: Forbidden,
        404: NotFound,
        409: Conflict,
        413: TooLarge,
        415: Unsupported,
        429: Overloaded,
        503: Retryable,
    }
    if status in exact:
        return exact[status]
    if status is not None and 400 <= status < 500:
        return Invalid
    return OutcomeUnknown
