"""Where time partitions begin, and times as SQL. Pure."""

from datetime import UTC, datetime, timedelta
from typing import Final

HOUR_US: Final = 3_600_000_000
DAY_US: Final = 24 * HOUR_US
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def from_us(time_us: int) -> datetime:
    """Turn microseconds since 1970 into a time."""
    return _EPOCH + timedelta(microseconds=time_us)


def to_us(time: datetime) -> int:
    """Turn a time into microseconds since 1970."""
    return (time - _EPOCH) // timedelta(microseconds=1)


def period_start(time_us: int, unit: str | None) -> int:
    """Return when the time partition of a moment began; hours where there are none."""
    if unit == "day":
        return time_us - time_us % DAY_US
    if unit in ("month", "year"):
        time = from_us(time_us)
        month = time.month if unit == "month" else 1
        return to_us(datetime(time.year, month, 1, tzinfo=UTC))
    return time_us - time_us % HOUR_US


def sql_time(time_us: int) -> str:
    """Write a moment as a SQL literal."""
    return f"TIMESTAMP '{from_us(time_us):%Y-%m-%d %H:%M:%S.%f} UTC'"
