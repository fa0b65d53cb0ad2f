"""Errors as HTTP answers, and what else than JSON a body may be."""

from typing import TypeVar

import msgspec

from tidewater_core.errors import Invalid, TidewaterError

T = TypeVar("T")


def error_body(error: TidewaterError) -> bytes:
    """Return the JSON that says what went wrong."""
    return msgspec.json.encode(error.to_body())


def retry_after_seconds(retry_after_ms: int) -> int:
    """Round up for the Retry-After header, which knows only seconds."""
    return max(1, -(-retry_after_ms // 1000))


def read_json(body: bytes, kind: type[T], reason: str) -> T:
    """Read JSON that anybody may have sent."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(reason, str(error)) from None
    except RecursionError:
        raise Invalid(reason, "JSON that is nested too deeply") from None
