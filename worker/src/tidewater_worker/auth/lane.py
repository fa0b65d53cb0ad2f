"""Questions to a slow judge: each asked once at a time, few at a time, and not for ever."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from tidewater_core.errors import Overloaded, Retryable, TidewaterError

RETRY_MS = 1_000
T = TypeVar("T")


class Lane(Generic[T]):
    """A bounded number of questions of one kind."""

    def __init__(
        self,
        at_a_time: int,
        waiting_max: int,
        timeout_s: float,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._turns = asyncio.Semaphore(at_a_time)
        self._max, self._timeout_s, self._failed = waiting_max, timeout_s, failed
        self._under_way: dict[Hashable, asyncio.Task[T]] = {}
        self._quiet_until = 0.0
        """Whoever is away or overloaded is asked only for those who wait."""

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Ask in the background, if it is not being asked, there is room, and answers come."""
        if key in self._under_way or len(self._under_way) >= self._max:
            return
        if asyncio.get_running_loop().time() >= self._quiet_until:
            self._begin(key, ask)

    async def once(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask what is not being asked already; wait for the answer."""
        task = self._under_way.get(key)
        if task is None:
            if len(self._under_way) >= self._max:
                raise Overloaded("TooManyReviews", "too many tokens wait to be judged", RETRY_MS)
            task = self._begin(key, ask)
        # Who goes away does not take the answer from the others.
        return await asyncio.shield(task)

    def _begin(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Task[T]":
        task = asyncio.create_task(self._bounded(ask))
        self._under_way[key] = task
        task.add_done_callback(lambda done: self._done(key, done))
        return task

    def _done(self, key: Hashable, task: "asyncio.Task[T]") -> None:
        del self._under_way[key]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, TidewaterError):
            self._quiet_until = asyncio.get_running_loop().time() + RETRY_MS / 1000
            self._failed(error.__cause__ or error)

    async def _bounded(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                return await ask()
        except TimeoutError:
            said = f"the API server gave no answer within {self._timeout_s:g} s"
            raise Retryable("AuthUnavailable", said, RETRY_MS) from None
        except TidewaterError as error:
            # Why is for the log: whoever waits may turn out to be nobody.
            said = "the API server cannot be asked whether this is allowed"
            raise Retryable("AuthUnavailable", said, RETRY_MS) from error
