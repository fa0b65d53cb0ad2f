"""Rates and freshness from a few numbers."""

from types import SimpleNamespace
from typing import Any

from tidewater_worker.pulse import MARKS_MAX, Pulse


def log_of(end: int, base: int = 0, size: int = 0) -> Any:
    segment = SimpleNamespace(base_offset=base, index=SimpleNamespace(size=size))
    return SimpleNamespace(durable_end=end, segments=[segment] if size else [])


def test_idle_is_nothing() -> None:
    pulse = Pulse()
    pulse.begin(log_of(0), 100.0, 5.0)
    assert pulse.rates(200.0) == (0.0, 0.0)
    assert pulse.oldest_s(200.0) == pulse.freshness_s(200.0) == 0.0


def test_a_burst_is_seen_for_ten_seconds() -> None:
    pulse = Pulse()
    pulse.begin(log_of(0), 100.0, 0.0)
    pulse.durable(log_of(1000, size=50_000), 1000, 100.0)
    assert pulse.rates(110.0) == (100.0, 5000.0)
    assert pulse.rates(112.0) == (0.0, 0.0)


def test_a_steady_stream() -> None:
    pulse = Pulse()
    pulse.begin(log_of(500, size=10), 0.0, 0.0)
    for tick in range(1, 401):  # 20 s, 50 messages of 10 bytes each 50 ms, segments of 10 s
        base = 500 if tick <= 200 else 500 + 200 * 50
        size = 10 + tick * 500 if tick <= 200 else (tick - 200) * 500
        end = 500 + tick * 50
        pulse.durable(log_of(end, base, size), end, tick * 0.05)
    messages, nbytes = pulse.rates(20.0)
    assert 950 <= messages <= 1050
    assert 9_500 <= nbytes <= 10_500


def test_freshness_is_the_oldest_message_and_the_last_seconds_worst() -> None:
    pulse = Pulse()
    pulse.begin(log_of(0), 0.0, 0.0)
    pulse.durable(log_of(10, size=1), 10, 1.0)
    pulse.durable(log_of(20, size=2), 20, 2.0)
    assert pulse.oldest_s(4.0) == 3.0
    pulse.committed(10, 4.0)
    assert pulse.oldest_s(4.0) == 2.0
    assert pulse.freshness_s(4.0) == 3.0, "that is how long the first ones took"
    pulse.committed(20, 5.0)
    assert pulse.oldest_s(5.0) == 0.0
    assert pulse.freshness_s(6.0) == 3.0
    assert pulse.freshness_s(14.5) == 3.0
    assert pulse.freshness_s(20.0) == 0.0


def test_what_was_found_at_the_start_is_as_old_as_its_last_message() -> None:
    pulse = Pulse()
    pulse.begin(log_of(10, size=1), 100.0, 30.0)
    assert (pulse.is_known, pulse.oldest_s(100.0)) == (False, 0.0)
    pulse.durable(log_of(12, size=2), 12, 100.5)
    assert pulse.oldest_s(101.0) == 0.5, "of what came since it is known"
    pulse.committed(9, 101.0)
    assert (pulse.is_known, pulse.oldest_s(101.0)) == (True, 31.0)
    pulse.committed(10, 102.0)
    assert pulse.oldest_s(102.0) == 1.5
    assert pulse.freshness_s(102.0) == 32.0


def test_what_was_in_the_table_before_the_start_took_no_time() -> None:
    """A worker that comes back after an hour is not an hour behind."""
    pulse = Pulse()
    pulse.begin(log_of(10, size=1), 100.0, 3600.0)
    pulse.committed(10, 101.0)
    assert pulse.is_known
    assert pulse.oldest_s(101.0) == pulse.freshness_s(101.0) == 0.0


def test_marks_are_bounded() -> None:
    pulse = Pulse()
    for second in range(10_000):
        pulse.durable(log_of(second + 1, size=1), second + 1, float(second))
    assert len(pulse._marks) == MARKS_MAX
    assert pulse.oldest_s(10_000.0) == 10_000.0
    pulse.committed(10_000, 10_001.0)
    assert pulse.oldest_s(10_001.0) == 0.0
