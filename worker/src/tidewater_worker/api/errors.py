"""Errors as HTTP answers."""

import msgspec

from tidewater_core.errors import TidewaterError


def error_body(error: TidewaterError) -> bytes:
    """Return the JSON that says what went wrong."""
    return msgspec.json.encode(error.to_body())


def retry_after_seconds(retry_after_ms: int) -> int:
    """Round up for the Retry-After header, which knows only seconds."""
    return max(1, -(-retry_after_ms // 1000))
