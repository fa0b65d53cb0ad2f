"""Which worker is asked: decisions only, as tables."""

from dataclasses import dataclass
from typing import Any

import pytest

from tidewater.errors import NotFound, Overloaded, Retryable
from tidewater.origin import Origin, parse_url
from tidewater.routing import ASK_AGAIN_S, AVOID_S, REFRESH_S, Owners, Routes

BASE = parse_url("http://base:8080", token="t")
A, B = (parse_url(f"http://{name}:8080", token="t") for name in "ab")
AWAY = Retryable("Unreachable", "m")


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def now_us(self) -> int:
        return 0


def metadata(*urls: str | None) -> dict[str, Any]:
    return {"partitions": [{"partition": n, "url": url} for n, url in enumerate(urls)]}


def known(clock: Clock, *urls: str | None) -> Routes:
    routes = Routes(BASE, clock=clock)
    routes.asked(metadata(*urls))
    return routes


@pytest.mark.parametrize(
    ("urls", "partition", "expected"),
    [
        (("http://a:8080", "http://b:8080"), 0, A),
        (("http://a:8080", "http://b:8080"), 1, B),
        (("http://a:8080", "http://b:8080"), 2, BASE),
        (("http://a:8080", "http://b:8080"), None, BASE),
        (("http://a:8080", ""), 1, BASE),
        (("http://a:8080", None), 1, BASE),
        (("ftp://a", "://"), 0, BASE),
        ((), 0, BASE),
    ],
)
def test_owners_are_asked_where_they_are_known(
    urls: tuple[str | None, ...], partition: int | None, expected: Origin
) -> None:
    assert known(Clock(), *urls).origin_of(partition) == expected


def test_a_token_goes_nowhere_without_tls_once_there_was_tls() -> None:
    base = parse_url("https://base", token="t", ca=None)
    routes = Routes(base, clock=Clock())
    routes.asked(metadata("http://a:8080", "https://b:8443"))
    assert routes.origin_of(0) == base
    assert str(routes.origin_of(1)) == "https://b:8443"
    assert routes.origin_of(1).bearer == "t"


def test_an_owner_that_cannot_be_reached_is_left_out_for_a_while() -> None:
    clock = Clock()
    routes = known(clock, "http://a:8080", "http://b:8080")
    assert routes.failed(A, AWAY), "go another way at once"
    assert (routes.origin_of(0), routes.origins()) == (BASE, [BASE, B])
    clock.now += AVOID_S
    assert routes.origin_of(0) == A


@pytest.mark.parametrize(
    ("origin", "error", "elsewhere"),
    [
        (A, AWAY, True),
        (A, NotFound("UnknownTopic", "m"), True),
        (A, Overloaded("Full", "m"), False),
        (A, Retryable("PartitionMoving", "m"), False),
        (BASE, AWAY, False),
        (BASE, NotFound("UnknownTopic", "m"), False),
    ],
)
def test_errors_that_lead_another_way(origin: Origin, error: Any, elsewhere: bool) -> None:
    assert known(Clock(), "http://a:8080").failed(origin, error) is elsewhere


def asks(routes: Routes) -> bool:
    return routes.should_ask


def test_when_owners_are_asked_for() -> None:
    clock = Clock()
    routes = Routes(BASE, clock=clock)
    assert asks(routes)
    routes.asked(None)
    assert not asks(routes)
    clock.now += ASK_AGAIN_S
    assert asks(routes), "it was not told"
    routes.asked(metadata("http://a:8080"))
    clock.now += REFRESH_S - 1
    assert not asks(routes)
    routes.refused()
    assert asks(routes), "a refusal may mean that it has moved"
    routes.asked(None, NotFound("UnknownTopic", "m"))
    clock.now += ASK_AGAIN_S
    assert not asks(routes), "it would be told the same"
    assert not Routes(BASE, direct=False, clock=clock).should_ask


def test_without_direct_ways_the_partitions_are_known_all_the_same() -> None:
    routes = Routes(BASE, direct=False, clock=Clock())
    routes.asked(metadata("http://a:8080", "http://b:8080"))
    assert (routes.partitions, routes.origins()) == (2, [BASE])


def test_keys_have_the_partition_that_the_worker_gives_them() -> None:
    owners = Owners(("",) * 3)
    assert [owners.partition_of(b"k%d" % i) for i in range(6)] == [0, 1, 0, 2, 2, 1]
    assert Owners(()).partition_of(b"k") is None
