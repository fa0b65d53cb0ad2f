"""Times as Kubernetes writes them, and amounts as people read them. Pure."""

from datetime import UTC, datetime, timedelta
from typing import Final

_STEPS: Final = ((1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))


def parse_time(text: str | None) -> datetime | None:
    """Read a time such as 2026-01-31T12:00:00Z; None if it is none."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def format_time(time: datetime) -> str:
    """Write a time to the second."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(time: datetime) -> str:
    """Write a time to the microsecond, as leases and events want it."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def from_us(microseconds: int) -> datetime:
    """Return the time of a clock's microseconds."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def format_ms(ms: float | None) -> str:
    """Write a span of time with two digits or so: 0.4ms, 12ms, 3.4s, 5m."""
    if ms is None:
        return ""
    if ms <= 0:
        return "0s"
    if ms < 10:
        return f"{ms:.1f}ms"
    if ms < 1_000:
        return f"{ms:.0f}ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f}s"
    if ms < 3_600_000:
        return f"{ms / 60_000:.0f}m"
    return f"{ms / 3_600_000:.0f}h"


def format_rate(per_s: float) -> str:
    """Write a rate of messages: 0/s, 3.2/s, 120/s, 45k/s."""
    if per_s < 0.05:
        return "0/s"
    if per_s < 10:
        return f"{per_s:.1f}/s"
    if per_s < 10_000:
        return f"{per_s:.0f}/s"
    return f"{per_s / 1_000:.0f}k/s"


def format_bytes_rate(per_s: float) -> str:
    """Write a rate of bytes: 0/s, 12Ki/s, 3Mi/s."""
    for size, unit in _STEPS:
        if per_s >= size:
            return f"{per_s / size:.0f}{unit}/s"
    return f"{per_s:.0f}/s"
