"""The guard: verdicts, how long they count, what happens when nobody answers, and how much."""

import asyncio
import base64
import json
import logging
from typing import Any

import pytest

from tidewater_core.errors import Forbidden, Overloaded, Retryable, Unauthenticated
from tidewater_core.security import AuthSettings
from tidewater_core.units import Duration
from tidewater_testing.parts.kubernetes import FixedClock
from tidewater_worker.auth import guard as module
from tidewater_worker.auth.access import Access, User, subscription, topic
from tidewater_worker.auth.guard import Guard
from tidewater_worker.auth.tokens import TOKEN_BYTES_MAX

PRODUCE = topic("produce", "shop", "orders")
CONSUME = topic("consume", "shop", "orders")
ANN, BOB = User("ann", "1", ("staff",), (("a", ("b",)),)), User("bob")


class Judge:
    """Decides as told, and counts the questions."""

    def __init__(self) -> None:
        self.users: dict[str, User] = {"ann-token": ANN, "bob-token": BOB}
        self.allowed: set[tuple[User, Access]] = {(ANN, PRODUCE[0])}
        self.asked: list[Any] = []
        self.away: Exception | None = None
        self.hold: asyncio.Event | None = None

    async def authenticate(self, token: str) -> User | None:
        self.asked.append(token)
        await self._answer()
        return self.users.get(token)

    async def authorise(self, user: User, access: Access) -> bool:
        self.asked.append((user.name, access.verb))
        await self._answer()
        return (user, access) in self.allowed

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold.wait()
        if self.away is not None:
            raise self.away


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def clock() -> FixedClock:
    return FixedClock()


def settings(**more: Any) -> AuthSettings:
    return AuthSettings(mode="kubernetes", **more)


@pytest.fixture
async def guard(judge: Judge, clock: FixedClock) -> Guard:
    return Guard(settings(), judge, clock)


ANNS, BOBS = b"Bearer ann-token", b"Bearer bob-token"


@pytest.mark.parametrize(
    ("authorization", "needs", "refusal", "said"),
    [
        (ANNS, PRODUCE, None, ""),
        (
            None,
            PRODUCE,
            Unauthenticated,
            'no bearer token: one is needed to produce topics "orders"',
        ),
        (
            b"Bearer nobodys",
            PRODUCE,
            Unauthenticated,
            "this is no valid token: one is needed to produce topics",
        ),
        (b"Basic YTpi", PRODUCE, Unauthenticated, "Bearer TOKEN"),
        (b"", PRODUCE, Unauthenticated, "Bearer TOKEN"),
        (
            ANNS,
            CONSUME,
            Forbidden,
            'user "ann" may not consume topics "orders" in namespace "shop"',
        ),
        (
            BOBS,
            PRODUCE,
            Forbidden,
            'user "bob" may not produce topics "orders" in namespace "shop"',
        ),
        (ANNS, topic("produce", "other", "orders"), Forbidden, 'in namespace "other"'),
        (ANNS, topic("produce", "shop", "other"), Forbidden, 'topics "other"'),
        (ANNS, (*PRODUCE, *CONSUME), Forbidden, "consume"),
        (BOBS, (), None, ""),
    ],
)
async def test_verdicts(
    guard: Guard, authorization: bytes | None, needs: Any, refusal: Any, said: str
) -> None:
    for _ in range(2):  # asked, then remembered
        if refusal is None:
            assert (await guard.check(authorization, needs)).name in ("ann", "bob")
        else:
            with pytest.raises(refusal) as caught:
                await guard.check(authorization, needs)
            assert said in caught.value.message


async def test_quick_knows_what_was_asked_and_nothing_else(guard: Guard, judge: Judge) -> None:
    assert guard.quick(ANNS, PRODUCE) is None
    assert await guard.check(ANNS, PRODUCE) == ANN
    assert guard.quick(ANNS, PRODUCE) == ANN
    assert guard.quick(ANNS, CONSUME) is None
    assert guard.quick(BOBS, PRODUCE) is None
    assert judge.asked == ["ann-token", ("ann", "produce")]
    with pytest.raises(Forbidden):
        await guard.check(ANNS, CONSUME)
    with pytest.raises(Forbidden):
        guard.quick(ANNS, CONSUME)
    with pytest.raises(Unauthenticated):
        guard.quick(None, PRODUCE)
    with pytest.raises(Unauthenticated):
        await guard.check(b"Bearer x", PRODUCE)
    with pytest.raises(Unauthenticated):
        guard.quick(b"Bearer x", PRODUCE)


@pytest.mark.parametrize(
    ("after_s", "asked"),
    [(0.0, []), (6.9, []), (10.0, [("ann", "produce")]), (60.0, ["ann-token", ("ann", "produce")])],
)
async def test_how_long_a_permission_counts(
    guard: Guard, judge: Judge, clock: FixedClock, after_s: float, asked: list[Any]
) -> None:
    await guard.check(ANNS, PRODUCE)
    judge.asked.clear()
    clock.monotonic_s += after_s
    await guard.check(ANNS, PRODUCE)
    assert judge.asked == asked


async def test_a_permission_in_use_is_renewed_before_it_ends(
    guard: Guard, judge: Judge, clock: FixedClock
) -> None:
    await guard.check(ANNS, PRODUCE)
    judge.asked.clear()
    for _ in range(20):
        clock.monotonic_s += 7.5
        assert guard.quick(ANNS, PRODUCE) == ANN, "nobody waits"
        await asyncio.sleep(0.001)
    assert judge.asked.count(("ann", "produce")) == 20
    assert judge.asked.count("ann-token") == 3


async def test_a_withdrawn_permission_ends_with_its_time(
    guard: Guard, judge: Judge, clock: FixedClock
) -> None:
    await guard.check(ANNS, PRODUCE)
    judge.allowed.clear()
    assert guard.quick(ANNS, PRODUCE) == ANN
    clock.monotonic_s += 8
    guard.quick(ANNS, PRODUCE)  # asks in the background
    await asyncio.sleep(0.001)
    with pytest.raises(Forbidden):
        guard.quick(ANNS, PRODUCE)
    judge.allowed.add((ANN, PRODUCE[0]))
    clock.monotonic_s += 5
    assert await guard.check(ANNS, PRODUCE) == ANN, "a refusal counts for deny_ttl"


async def test_a_token_never_counts_past_its_end(
    guard: Guard, judge: Judge, clock: FixedClock
) -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": clock.now_us() / 1e6 + 20}).encode())
    token = f"e30.{claims.decode().rstrip('=')}.sig"
    judge.users[token] = ANN
    header = f"Bearer {token}".encode()
    await guard.check(header, PRODUCE)
    del judge.users[token]
    clock.monotonic_s += 13.9
    await guard.check(header, PRODUCE)
    clock.monotonic_s += 6.1
    with pytest.raises(Unauthenticated):
        await guard.check(header, PRODUCE)


async def test_without_an_answer_nothing_is_allowed(
    guard: Guard, judge: Judge, clock: FixedClock
) -> None:
    judge.away = Retryable("OwnerUnreachable", "refused", 1)
    for _ in range(2):
        with pytest.raises(Retryable, match="AuthUnavailable") as caught:
            await guard.check(ANNS, PRODUCE)
        assert caught.value.status == 503
        assert caught.value.retry_after_ms == 1_000
    judge.away = None
    await guard.check(ANNS, PRODUCE)
    judge.away = Retryable("OwnerUnreachable", "refused", 1)
    clock.monotonic_s += 9.9
    assert await guard.check(ANNS, PRODUCE) == ANN, "what is known counts to its end"
    await asyncio.sleep(0.001)
    clock.monotonic_s += 0.1
    with pytest.raises(Retryable, match="AuthUnavailable"):
        await guard.check(ANNS, PRODUCE)


async def test_nobody_who_is_away_is_asked_over_and_over(
    guard: Guard, judge: Judge, clock: FixedClock
) -> None:
    await guard.check(ANNS, PRODUCE)
    judge.away = Retryable("TooManyRequests", "429", 1)
    judge.asked.clear()
    clock.monotonic_s += 7.5
    for _ in range(50):
        assert guard.quick(ANNS, PRODUCE) == ANN
        await asyncio.sleep(0.001)
    assert judge.asked == [("ann", "produce")], "what is known still counts; one question is enough"


async def test_a_slow_answer_is_none(judge: Judge, clock: FixedClock) -> None:
    guard = Guard(settings(review_timeout=Duration("20ms")), judge, clock)
    judge.hold = asyncio.Event()
    with pytest.raises(Retryable, match="no answer within"):
        await guard.check(ANNS, PRODUCE)


async def test_one_question_however_many_wait(guard: Guard, judge: Judge) -> None:
    judge.hold = asyncio.Event()
    waiting = [asyncio.ensure_future(guard.check(ANNS, PRODUCE)) for _ in range(50)]
    await asyncio.sleep(0.001)
    waiting[0].cancel()
    judge.hold.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [ANN] * 49
    assert judge.asked == ["ann-token", ("ann", "produce")]


async def test_a_flood_of_strangers(
    judge: Judge, clock: FixedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 20)
    monkeypatch.setattr(module, "STRANGERS_MAX", 20)
    guard = Guard(settings(), judge, clock)
    await guard.check(ANNS, PRODUCE)
    judge.hold = asyncio.Event()
    flood = [asyncio.ensure_future(guard.check(b"Bearer x%d" % n, PRODUCE)) for n in range(50)]
    await asyncio.sleep(0.001)
    clock.monotonic_s += 55  # the token is known, its permission is not: it goes another way
    mine = asyncio.ensure_future(guard.check(ANNS, PRODUCE))
    await asyncio.sleep(0.001)
    asked = len(judge.asked)
    judge.hold.set()
    assert await mine == ANN
    refused = await asyncio.gather(*flood, return_exceptions=True)
    kinds = [type(error) for error in refused]
    assert kinds == [Unauthenticated] * 20 + [Overloaded] * 30
    assert asked <= 2 + module.REVIEWS_MAX + 2, "few at a time"
    assert len(guard._strangers) <= 20
    assert guard.quick(ANNS, PRODUCE) == ANN, "nobody who is known was pushed out"


async def test_either_of_two(guard: Guard, judge: Judge) -> None:
    assert await guard.check_any(ANNS, (CONSUME, PRODUCE)) == ANN
    with pytest.raises(Forbidden, match="consume"):
        await guard.check_any(BOBS, (CONSUME, PRODUCE))
    with pytest.raises(Unauthenticated):
        await guard.check_any(None, (CONSUME, PRODUCE))


async def test_what_a_list_shows(guard: Guard, judge: Judge) -> None:
    judge.allowed = {(ANN, Access("consume", "topics", "shop", ""))}
    for _ in range(2):
        assert await guard.visible(ANNS, ["shop", "other", "shop"]) == {"shop"}
        assert await guard.visible(BOBS, ["shop", "other"]) == frozenset()
    with pytest.raises(Unauthenticated):
        await guard.visible(b"Bearer x", ["shop"])


async def test_a_subscription_needs_its_topic_too(guard: Guard, judge: Judge) -> None:
    needs = subscription("consume", "shop", "orders", "billing")
    judge.allowed = {(ANN, needs[1])}
    with pytest.raises(Forbidden, match=r"topics \\?\"orders"):
        await guard.check(ANNS, needs)
    judge.allowed = {(BOB, needs[0])}
    with pytest.raises(Forbidden, match=r"subscriptions \\?\"billing"):
        await guard.check(BOBS, needs)


async def test_what_goes_on_for_long_ends_with_the_permission(
    judge: Judge, clock: FixedClock
) -> None:
    guard = Guard(settings(allow_ttl=Duration("10ms")), judge, clock)
    ended: list[str] = []

    async def stream() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cut")

    running = asyncio.ensure_future(guard.while_allowed(ANNS, PRODUCE, stream()))
    for _ in range(4):
        await asyncio.sleep(0.012)
        clock.monotonic_s += 0.012
    assert not running.done()
    judge.allowed.clear()
    clock.monotonic_s += 1
    with pytest.raises(Forbidden):
        await running
    assert ended == ["cut"]


async def test_refusals_are_logged_but_not_without_end(
    guard: Guard, clock: FixedClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(module.AUDIT_BURST + 100):
            with pytest.raises(Forbidden):
                await guard.check(BOBS, PRODUCE)
        assert len(caplog.records) == module.AUDIT_BURST
        clock.monotonic_s += 1
        with pytest.raises(Forbidden):
            await guard.check(BOBS, PRODUCE)
    last = caplog.records[-1].getMessage()
    assert 'user "bob" may not produce topics "orders"' in last
    assert "100 more" in last
    assert "bob-token" not in caplog.text, "a token is never logged"


async def test_what_nobody_knows_takes_little_memory(guard: Guard, judge: Judge) -> None:
    """G6: anybody may send anything, and much of it."""
    token = b"Bearer " + b"x" * TOKEN_BYTES_MAX
    with pytest.raises(Unauthenticated):
        await guard.check(token, PRODUCE)
    assert len(judge.asked) == 1
    with pytest.raises(Unauthenticated):
        guard.quick(token, PRODUCE)
    assert {len(key) for key in guard._strangers._entries} == {32}
    for too_long in (token + b"x", b"Bearer " + b" " * 60_000 + b"x"):
        with pytest.raises(Unauthenticated):
            guard.quick(too_long, PRODUCE)
        with pytest.raises(Unauthenticated):
            await guard.check(too_long, PRODUCE)
    assert len(judge.asked) == 1
    assert len(guard._strangers) == 1


async def test_one_token_has_one_spelling(guard: Guard, judge: Judge) -> None:
    """G6: a user who spells a token in many ways pushes nobody out."""
    await guard.check(ANNS, PRODUCE)
    for spaces in range(2, 100):
        with pytest.raises(Unauthenticated):
            await guard.check(b"Bearer" + b" " * spaces + b"bob-token", ())
    assert len(guard._users) == 1
    assert "bob-token" not in judge.asked
