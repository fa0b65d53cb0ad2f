"""Errors as Flight tells them: the kind says what to do, the text begins with the reason."""

import msgspec
import pyarrow as pa
from pyarrow import flight

from tidewater_core.errors import (
    Corrupt,
    Forbidden,
    Invalid,
    NotFound,
    TidewaterError,
    Unauthenticated,
)


def to_flight(error: TidewaterError) -> Exception:
    """Return the exception that makes Flight answer with the right status.

    INVALID_ARGUMENT: change the request. NOT_FOUND: it is not there. UNAVAILABLE: not now, try
    again (the details have `retry_after_ms`). INTERNAL: damage, a person must look.
    UNAUTHENTICATED and PERMISSION_DENIED: the token, and what its user may.
    """
    text = str(error)
    details = msgspec.json.encode(error.to_body())
    if isinstance(error, Unauthenticated):
        return flight.FlightUnauthenticatedError(text, details)  # type: ignore[no-any-return]
    if isinstance(error, Forbidden):
        return flight.FlightUnauthorizedError(text, details)  # type: ignore[no-any-return]
    if isinstance(error, NotFound):
        return pa.ArrowKeyError(text)  # type: ignore[no-any-return]
    if isinstance(error, Invalid):
        return pa.ArrowInvalid(text)  # type: ignore[no-any-return]
    if isinstance(error, Corrupt):
        return flight.FlightInternalError(text, details)  # type: ignore[no-any-return]
    return flight.FlightUnavailableError(text, details)  # type: ignore[no-any-return]
