"""What is remembered: never past its time, never too much."""

from tidewater_worker.auth.cache import Cache, Quota


def test_values_run_out() -> None:
    cache: Cache[str, int] = Cache(10)
    cache.put("a", 1, 5.0)
    assert (cache.get("a", 4.999), cache.get("a", 5.0), cache.get("b", 0.0)) == (1, None, None)
    cache.put("a", 2, 9.0)
    assert cache.get("a", 8.0) == 2
    cache.drop("a")
    cache.drop("a")
    assert cache.get("a", 8.0) is None


def test_the_oldest_go() -> None:
    cache: Cache[int, int] = Cache(3)
    for number in range(3):
        cache.put(number, number, 100.0)
    cache.put(0, 0, 100.0)  # used again: no more the oldest
    cache.put(3, 3, 100.0)
    assert [cache.get(number, 0.0) for number in range(4)] == [0, None, 2, 3]
    for number in range(10_000):
        cache.put(number, number, 100.0)
    assert len(cache) == 3


def test_a_quota_counts_what_it_refuses() -> None:
    quota = Quota(per_second=2.0, burst=3)
    assert [quota.take(100.0) for _ in range(5)] == [0, 0, 0, None, None]
    assert quota.take(100.4) is None
    assert quota.take(100.5) == 3
    assert quota.take(200.0) == 0
