"""The guard: is the token valid, and may its user do this? Asks the API server, and remembers.

    Authorization ──▶ user       TokenReview, kept for token_ttl, never past the token's own end
    user, access  ──▶ yes | no   SubjectAccessReview, kept for allow_ttl | deny_ttl

`quick` answers from memory in two look-ups and does not wait: the hot path. What is used goes on
being asked for in the background shortly before it runs out, so that nobody waits for it. Without
an answer of the API server nothing is allowed (503): it fails closed.

One question is asked once at a time, however many wait for its answer; questions at a time and
those that wait are bounded, and so is all that is remembered. Good and bad answers are kept apart:
a flood of wrong tokens pushes out no right one.
"""

import asyncio
import hashlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final, Protocol

from tidewater_core.clock import Clock
from tidewater_core.errors import Forbidden, Unauthenticated
from tidewater_core.security import AuthSettings
from tidewater_worker.auth.access import CONSUME, GROUP, TOPICS, Access, User
from tidewater_worker.auth.cache import Cache, Quota
from tidewater_worker.auth.lane import Lane
from tidewater_worker.auth.tokens import HEADER_BYTES_MAX, expiry_s, token_of

USERS_MAX: Final = 10_000
STRANGERS_MAX: Final = 10_000
VERDICTS_MAX: Final = 100_000
REVIEWS_MAX: Final = 16
"""Questions of a kind that are asked at a time."""
WAITING_MAX: Final = 1_024
"""Questions of a kind that are asked or wait to be."""
REFRESH_SHARE: Final = 0.7
"""Past this share of its time an answer in use is asked for again."""
AUDIT_PER_S: Final = 5.0
AUDIT_BURST: Final = 50
FOR_EVER: Final = float("inf")
log = logging.getLogger(__name__)


class Reviews(Protocol):
    """Who decides; raises `Retryable` where there is no answer."""

    async def authenticate(self, token: str) -> User | None:
        """Return whom a token speaks for; None: it is not valid."""

    async def authorise(self, user: User, access: Access) -> bool:
        """Tell whether a user may."""


class _Person:
    """A user, as a key that costs nothing to compare: one object a user."""

    __slots__ = ("user",)

    def __init__(self, user: User) -> None:
        self.user = user


class Guard:
    """Judges requests."""

    def __init__(self, settings: AuthSettings, reviews: Reviews, clock: Clock) -> None:
        self._settings, self._reviews, self._clock = settings, reviews, clock
        self._people: Cache[User, _Person] = Cache(USERS_MAX)
        self._users: Cache[bytes, tuple[_Person, float]] = Cache(USERS_MAX)
        self._strangers: Cache[bytes, bool] = Cache(STRANGERS_MAX)  # by their headers' hashes
        self._allowed: Cache[tuple[_Person, Access], float] = Cache(VERDICTS_MAX)
        self._denied: Cache[tuple[_Person, Access], bool] = Cache(VERDICTS_MAX)
        timeout_s = settings.review_timeout.seconds
        # Lanes of their own: unknown tokens, however many, hold up nobody who is known.
        self._new: Lane[_Person | None] = Lane(
            REVIEWS_MAX, WAITING_MAX, timeout_s, self._unanswered
        )
        self._again: Lane[_Person | None] = Lane(
            REVIEWS_MAX, WAITING_MAX, timeout_s, self._unanswered
        )
        self._accesses: Lane[bool] = Lane(REVIEWS_MAX, WAITING_MAX, timeout_s, self._unanswered)
        self._audit = Quota(AUDIT_PER_S, AUDIT_BURST)
        self.recheck_s = settings.allow_ttl.seconds
        """How often a stream that goes on has to be judged again."""
        self.counts = {"allowed": 0, "denied": 0, "unauthenticated": 0, "unanswered": 0}
        """What the API server said, and how often it did not."""

    # ---- judging

    def quick(self, authorization: bytes | None, needs: Iterable[Access]) -> User | None:
        """Return the user if all is known to be allowed, None if it must be asked; raise a no."""
        now = self._clock.monotonic()
        if authorization is None:
            raise _unauthenticated("there is no bearer token", needs)
        if len(authorization) > HEADER_BYTES_MAX:
            raise _unauthenticated("what is sent as a bearer token is none", needs)
        known = self._users.get(authorization, now)
        if known is None:
            if self._strangers.get(_hash(authorization), now) is not None:
                raise self._stranger(needs)
            return None
        person, refresh_at = known
        if now >= refresh_at:
            self._again.begin(authorization, lambda: self._ask_token(authorization))
        is_known = True
        for access in needs:
            verdict = self._allowed.get((person, access), now)
            if verdict is None:
                if self._denied.get((person, access), now) is not None:
                    raise self._forbidden(person, access)
                is_known = False
            elif now >= verdict:
                self._refresh(person, access)
        return person.user if is_known else None

    def _refresh(self, person: _Person, access: Access) -> None:
        self._accesses.begin((person, access), lambda: self._ask_access(person, access))

    async def check(self, authorization: bytes | None, needs: tuple[Access, ...] = ()) -> User:
        """Return the user who may do all this, or raise.

        `Unauthenticated`, `Forbidden`, or `Retryable` if nobody answers.
        """
        found = self.quick(authorization, needs)
        if found is not None:
            return found
        person = await self._person(authorization, needs)
        for access in needs:
            if not await self._may(person, access):
                raise self._forbidden(person, access)
        return person.user

    async def check_any(
        self, authorization: bytes | None, either: Iterable[tuple[Access, ...]]
    ) -> User:
        """Return the user who may do at least one of several things."""
        wanted = list(either)
        person = await self._person(authorization, wanted[0])
        for needs in wanted:
            for access in needs:
                if not await self._may(person, access):
                    break
            else:
                return person.user
        raise self._forbidden(person, wanted[0][0])

    async def visible(
        self, authorization: bytes | None, namespaces: Iterable[str]
    ) -> frozenset[str]:
        """Return the namespaces all of whose topics a user may consume."""
        person = await self._person(authorization, ())
        wanted = sorted(set(namespaces))
        return frozenset(
            [name for name in wanted if await self._may(person, Access(CONSUME, TOPICS, name, ""))]
        )

    async def _person(self, authorization: bytes | None, needs: Iterable[Access]) -> _Person:
        now = self._clock.monotonic()
        if authorization is not None:
            known = self._users.get(authorization, now)
            if known is not None:
                return known[0]
            token_of(authorization)  # raises what is wrong with it
            if self._strangers.get(_hash(authorization), now) is None:
                person = await self._new.once(authorization, lambda: self._ask_token(authorization))
                if person is not None:
                    return person
            raise self._stranger(needs)
        raise _unauthenticated("there is no bearer token", needs)

    async def _may(self, person: _Person, access: Access) -> bool:
        key, now = (person, access), self._clock.monotonic()
        if self._allowed.get(key, now) is not None:
            return True
        if self._denied.get(key, now) is not None:
            return False
        return await self._accesses.once(key, lambda: self._ask_access(person, access))

    async def while_allowed(
        self,
        authorization: bytes | None,
        needs: tuple[Access, ...],
        work: Coroutine[Any, Any, None],
    ) -> None:
        """Do something that goes on for long; it ends with the permission."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self.recheck_s))[0]:
                await self.check(authorization, needs)
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    # ---- refusing

    def _stranger(self, needs: Iterable[Access]) -> Unauthenticated:
        error = _unauthenticated("this is no valid token", needs)
        self._note("unauthenticated: %s", error.message)
        return error

    def _forbidden(self, person: _Person, access: Access) -> Forbidden:
        said = f'user "{person.user.name}" may not {access} ({GROUP})'
        self._note("denied: %s", said)
        return Forbidden("Forbidden", said)

    def _unanswered(self, error: BaseException) -> None:
        self.counts["unanswered"] += 1
        self._note("nobody judges: %s", str(error))

    def _note(self, text: str, said: str) -> None:
        skipped = self._audit.take(self._clock.monotonic())
        if skipped is not None:
            more = f" (and {skipped} more that were not logged)" if skipped else ""
            log.warning(text + "%s", said, more)

    # ---- asking

    async def _ask_token(self, authorization: bytes) -> _Person | None:
        token = token_of(authorization)
        user = await self._reviews.authenticate(token)
        now = self._clock.monotonic()
        if user is None:
            self.counts["unauthenticated"] += 1
            self._users.drop(authorization)
            until = now + self._settings.deny_ttl.seconds
            self._strangers.put(_hash(authorization), True, until)
            return None
        person = self._people.get(user, now)
        if person is None:
            person = _Person(user)
            self._people.put(user, person, FOR_EVER)
        ttl = self._settings.token_ttl.seconds
        if (end := expiry_s(token)) is not None:
            ttl = min(ttl, max(end - self._clock.now_us() / 1_000_000, 0.0))
        self._strangers.drop(_hash(authorization))
        self._users.put(authorization, (person, now + ttl * REFRESH_SHARE), now + ttl)
        return person

    async def _ask_access(self, person: _Person, access: Access) -> bool:
        is_allowed = await self._reviews.authorise(person.user, access)
        key, now = (person, access), self._clock.monotonic()
        if is_allowed:
            self.counts["allowed"] += 1
            ttl = self._settings.allow_ttl.seconds
            self._denied.drop(key)
            self._allowed.put(key, now + ttl * REFRESH_SHARE, now + ttl)
        else:
            self.counts["denied"] += 1
            self._allowed.drop(key)
            self._denied.put(key, True, now + self._settings.deny_ttl.seconds)
        return is_allowed


def _hash(authorization: bytes) -> bytes:
    """Make a short key of what anybody may send."""
    return hashlib.sha256(authorization).digest()


def _unauthenticated(why: str, needs: Iterable[Access]) -> Unauthenticated:
    wanted = " and ".join(str(access) for access in needs)
    said = f"{why}: one is needed to {wanted} ({GROUP})" if wanted else why
    return Unauthenticated("Unauthenticated", said)
