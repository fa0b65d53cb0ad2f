"""The small plans: which snapshots go, which manifests are merged, when to flush and retry."""

import pytest

from tidewater_worker.table.expiry import SnapshotAge, plan_expiry
from tidewater_worker.table.pace import PAUSE_S_MAX, Waiting, flush_due, pause_s
from tidewater_worker.table.tiers import (
    FANOUT,
    MERGED_FILES_MAX,
    ManifestSize,
    plan_merge,
    tier_of,
)

HOUR_MS = 3_600_000


def snapshots(count: int, step_ms: int = 1_000) -> list[SnapshotAge]:
    """Return snapshots 1 … count, the last one made now (at time 0)."""
    return [SnapshotAge(n, (n - count) * step_ms, n) for n in range(1, count + 1)]


def expire(count: int, keep: set[int], count_max: int, age_ms: int = HOUR_MS) -> list[int]:
    return plan_expiry(
        snapshots(count),
        keep=frozenset(keep),
        count_max=count_max,
        age_ms_max=age_ms,
        now_ms=0,
        removed_max=100,
    )


def test_too_many_snapshots_lose_the_oldest() -> None:
    # 10 and the one to be committed are 11; at most 5 stay: 10 (the head), 9, 8, 7 and the new one.
    assert expire(10, {10}, 5) == [1, 2, 3, 4, 5, 6]


def test_few_young_snapshots_stay() -> None:
    assert expire(4, {4}, 5) == []


def test_old_snapshots_go_but_never_the_head() -> None:
    assert expire(5, {5}, 100, age_ms=1_500) == [1, 2, 3]
    assert expire(1, {1}, 100, age_ms=0) == []


def test_tagged_and_pinned_snapshots_stay_and_take_no_place() -> None:
    assert expire(10, {10, 2, 3}, 5) == [1, 4, 5, 6]


def test_a_backlog_is_removed_in_small_steps() -> None:
    removed = plan_expiry(
        snapshots(500), keep=frozenset({500}), count_max=50, age_ms_max=HOUR_MS, now_ms=0
    )
    assert removed == list(range(1, 21))


def test_what_a_job_holds_stays_however_many_and_old() -> None:
    def left(held_from: int | None) -> list[int]:
        return plan_expiry(
            snapshots(10), keep=frozenset({10}), count_max=3, age_ms_max=1, now_ms=0,
            held_from=held_from,
        )  # fmt: skip

    assert left(4) == [1, 2, 3]
    assert left(0) == []
    assert left(None) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("files", "tier"), [(1, 0), (9, 0), (10, 1), (99, 1), (100, 2), (1000, 3)])
def test_tiers(files: int, tier: int) -> None:
    assert tier_of(files) == tier


def merge(sizes: list[int], spec_id: int = 0) -> tuple[int, ...]:
    return plan_merge([ManifestSize(size, spec_id, True) for size in sizes])


def test_ten_of_a_tier_are_merged() -> None:
    assert merge([1] * 9) == ()
    assert merge([1] * 10) == tuple(range(10))
    assert merge([500, *[1] * 10]) == tuple(range(1, 11))


def test_the_lowest_full_tier_goes_first() -> None:
    assert merge([20] * 10 + [1] * 10) == tuple(range(10, 20))


def test_large_foreign_and_delete_manifests_are_left_alone() -> None:
    assert merge([MERGED_FILES_MAX] * 20) == ()
    assert plan_merge([ManifestSize(1, n % 2, True) for n in range(10)]) == ()
    assert plan_merge([ManifestSize(1, 0, False) for _ in range(20)]) == ()


def test_a_merge_never_makes_a_manifest_that_is_too_large() -> None:
    chosen = merge([400] * 10)
    assert chosen == (0, 1)


def test_the_number_of_manifests_grows_with_the_logarithm() -> None:
    manifests: list[int] = []
    rewritten = 0
    for _ in range(5_000):
        manifests.insert(0, 1)
        chosen = plan_merge([ManifestSize(size, 0, i > 0) for i, size in enumerate(manifests)])
        if chosen:
            merged = sum(manifests[i] for i in chosen)
            rewritten += merged
            manifests = [m for i, m in enumerate(manifests) if i not in chosen] + [merged]
    assert sum(manifests) == 5_000
    assert len(manifests) <= 5_000 // MERGED_FILES_MAX + 3 * (FANOUT + 1)
    assert rewritten <= 3 * 5_000


def due(
    rows: int, nbytes: int, since: float, committed_at: float, *, backlog: bool = False
) -> float:
    return flush_due(
        Waiting(rows, nbytes, since),
        interval_s=1.0,
        rows_max=100,
        bytes_max=1_000,
        committed_at=committed_at,
        backlog=backlog,
    )


def test_a_flush_is_due_by_age_rows_or_bytes() -> None:
    assert due(1, 1, since=10.0, committed_at=9.5) == 11.0
    assert due(100, 1, since=10.0, committed_at=9.9) == pytest.approx(10.15)
    assert due(1, 1_000, since=10.0, committed_at=9.9) == pytest.approx(10.15)
    assert due(100, 1, since=10.0, committed_at=float("-inf")) == float("-inf")


def test_a_backlog_does_not_wait() -> None:
    assert due(1, 1, since=10.0, committed_at=10.2, backlog=True) == 10.2


def test_pauses_double_up_to_a_bound_and_are_spread() -> None:
    assert pause_s(1, refused=True, jitter=0.0) == pytest.approx(0.005)
    assert pause_s(2, refused=False, jitter=0.0) == pytest.approx(0.1)
    assert pause_s(3, refused=False, jitter=1.0) == pytest.approx(0.4)
    assert pause_s(1_000, refused=False, jitter=1.0) == PAUSE_S_MAX
