"""How much is measured: three sizes of the same run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts and durations of one run. All loads are bounded by one of them."""

    name: str
    ack_rounds: int
    """Rounds in which every system takes its turn."""
    ack_count: int
    """Single messages per system, size and round."""
    flight_rounds: int
    flight_seconds: float
    bulk_rounds: int
    bulk_seconds: float
    paced_seconds: float
    """How long rows are produced at a steady rate into the table."""
    flood_rows: int
    """Rows that are produced as fast as they are taken, and then read back."""
    quiet_rounds: int
    quiet_seconds: float
    """Ack latency with and without commits: seconds of each kind per round."""
    commits: int
    read_ndjson_rows: int
    long_bytes: int
    """Payload bytes produced while memory is watched."""
    live_rounds: int
    live_seconds: float
    """Live delivery: seconds of each system per round."""
    fanout_rounds: int
    fanout_seconds: float
    idle_topics: int
    """Topics, and as many subscriptions, that do nothing."""
    idle_seconds: float
    filter_rows: int
    """Rows of history that a filtered subscription goes over."""


QUICK = Plan(
    name="quick",
    ack_rounds=4,
    ack_count=200,
    flight_rounds=2,
    flight_seconds=1.0,
    bulk_rounds=2,
    bulk_seconds=1.0,
    paced_seconds=6.0,
    flood_rows=3_000_000,
    quiet_rounds=2,
    quiet_seconds=3.0,
    commits=130,
    read_ndjson_rows=100_000,
    long_bytes=300_000_000,
    live_rounds=2,
    live_seconds=3.0,
    fanout_rounds=2,
    fanout_seconds=4.0,
    idle_topics=100,
    idle_seconds=10.0,
    filter_rows=1_000_000,
)

DEFAULT = Plan(
    name="default",
    ack_rounds=12,
    ack_count=300,
    flight_rounds=5,
    flight_seconds=2.0,
    bulk_rounds=4,
    bulk_seconds=2.5,
    paced_seconds=20.0,
    flood_rows=10_000_000,
    quiet_rounds=4,
    quiet_seconds=5.0,
    commits=1_010,
    read_ndjson_rows=500_000,
    long_bytes=3_000_000_000,
    live_rounds=4,
    live_seconds=6.0,
    fanout_rounds=3,
    fanout_seconds=8.0,
    idle_topics=1_000,
    idle_seconds=20.0,
    filter_rows=10_000_000,
)

FULL = Plan(
    name="full",
    ack_rounds=30,
    ack_count=500,
    flight_rounds=10,
    flight_seconds=3.0,
    bulk_rounds=6,
    bulk_seconds=4.0,
    paced_seconds=60.0,
    flood_rows=20_000_000,
    quiet_rounds=8,
    quiet_seconds=8.0,
    commits=1_010,
    read_ndjson_rows=1_000_000,
    long_bytes=20_000_000_000,
    live_rounds=10,
    live_seconds=10.0,
    fanout_rounds=6,
    fanout_seconds=15.0,
    idle_topics=1_000,
    idle_seconds=20.0,
    filter_rows=10_000_000,
)
