"""Times as SQL. Pure."""

from tidewater_core.compaction import from_us


def sql_time(time_us: int) -> str:
    """Write a moment as a SQL literal."""
    return f"TIMESTAMP '{from_us(time_us):%Y-%m-%d %H:%M:%S.%f} UTC'"
