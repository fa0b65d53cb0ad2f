"""The real clock and chance behave as their protocols say."""

from tidewater_core.clock import Clock, IdSource, SystemClock, SystemIds


def test_clock() -> None:
    clock: Clock = SystemClock()
    year_2020_us = 1_577_836_800_000_000
    assert clock.now_us() > year_2020_us
    assert clock.monotonic() <= clock.monotonic()


def test_ids() -> None:
    ids: IdSource = SystemIds()
    snapshots = [ids.snapshot_id() for _ in range(1_000)]
    assert all(0 < snapshot < 1 << 63 for snapshot in snapshots)
    assert len(set(snapshots)) == len(snapshots)
    assert len({ids.uuid() for _ in range(1_000)}) == 1_000
    assert all(0 <= ids.jitter() < 1 for _ in range(1_000))
