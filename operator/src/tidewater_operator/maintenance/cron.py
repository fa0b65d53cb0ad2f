"""When a cron schedule (UTC) is due. Pure.

As cron does it: where both day of month and day of week are restricted, either of them counts.
"""

from datetime import datetime, timedelta
from typing import Final

_RANGES: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_DAYS_MAX: Final = 366 * 8
"""29 February is at most eight years away."""


def next_after(schedule: str, time: datetime) -> datetime | None:
    """Return the first time after `time` that a schedule names; None if it never does."""
    fields = schedule.split()
    minutes, hours, days, months, weekdays = (
        _values(field, low, high) for field, (low, high) in zip(fields, _RANGES, strict=True)
    )
    weekdays = {day % 7 for day in weekdays}
    either = fields[2] != "*" and fields[4] != "*"
    start = time.replace(second=0, microsecond=0) + timedelta(minutes=1)
    for number in range(_DAYS_MAX):
        day = start.replace(hour=0, minute=0) + timedelta(days=number)
        in_month, in_week = day.day in days, (day.weekday() + 1) % 7 in weekdays
        if day.month not in months or not (in_month or in_week if either else in_month and in_week):
            continue
        for hour in sorted(hours):
            for minute in sorted(minutes):
                found = day.replace(hour=hour, minute=minute)
                if found >= start:
                    return found
    return None


def _values(field: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            first, last = low, high
        else:
            begin, dash, end = span.partition("-")
            first = int(begin)
            last = int(end) if dash else (high if step else first)
        found.update(range(first, last + 1, int(step or 1)))
    return found
