"""Which small files of a table are worth joining: one rule for the job and for the table's health.

Were there two, health would ask for jobs that find nothing to do, again and again. Files belong
together if they are in one partition of the table, by whatever it is partitioned, and in one period
of time: the hour, unless the table's partitions are longer ones. Pure.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

HOUR_US: Final = 3_600_000_000
DAY_US: Final = 24 * HOUR_US
UNITS: Final = frozenset({"hour", "day", "month", "year"})
"""Iceberg's transforms of time."""
TIME_MIN_US: Final = -62_135_596_800_000_000
TIME_MAX_US: Final = 253_402_300_799_999_999
"""The first and last microsecond of the years 1 to 9999: what is unknown may be anything between,
so a file without bounds is never old."""

SMALL_SHARE: Final = 0.75
"""A file below this share of the target is small (Iceberg's own default)."""
EVEN_SHARE: Final = 0.8
"""Even files have this share of the target at least: joined, bytes compress a little better."""
SPREAD_MAX: Final = 1.1
"""Files may be larger than the target by this, where a further one would be small."""
FILES_MIN: Final = 5
"""A period that closed just now is left alone with fewer small files: more may come, late."""
LATENESS_US: Final = 10 * 60 * 1_000_000
"""A period is closed this long after its end."""
SETTLED_US: Final = DAY_US
"""A period that has been closed for this long gets nothing more: two files are joined, too. Else
a topic of few messages an hour would have more small files with every hour, for ever."""
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


def is_small(nbytes: int, target_bytes: int) -> bool:
    """Say if a file is worth joining with others."""
    return nbytes < SMALL_SHARE * target_bytes


def files_made(nbytes: int, target_bytes: int) -> int:
    """Return how many files Iceberg makes of so many bytes: not each is as large as the target.

    What would be as many as before is left alone, or it would be rewritten again and again.
    """
    whole, rest = divmod(nbytes, target_bytes)
    if whole == 0:
        return 1
    spread = rest <= SMALL_SHARE * target_bytes and nbytes < SPREAD_MAX * whole * target_bytes
    return whole if spread else whole + 1


def even_share(nbytes: int, target_bytes: int) -> int:
    """Return what size each file should get where that many bytes become a few.

    Filled one after the other, the last one gets the rest, and tasks that work side by side wait
    for the first. Even shares are made unless they came out near what counts as small.
    """
    share = -(-nbytes // files_made(nbytes, target_bytes))
    return share if EVEN_SHARE * target_bytes <= share < target_bytes else target_bytes


def is_due(
    files: int,
    nbytes: int,
    newest_us: int,
    *,
    target_bytes: int,
    now_us: int,
    unit: str | None,
    files_min: int = FILES_MIN,
    lateness_us: int = LATENESS_US,
    include_open: bool = False,
) -> bool:
    """Say if the small files of one partition and period are to be joined.

    `newest_us` is the time of their newest row, or any other in the period.
    """
    if files <= files_made(nbytes, target_bytes):
        return False
    if newest_us >= period_start(now_us - lateness_us, unit) and not include_open:
        return False
    settled = newest_us < period_start(now_us - lateness_us - SETTLED_US, unit)
    return settled or files >= files_min or nbytes >= target_bytes
