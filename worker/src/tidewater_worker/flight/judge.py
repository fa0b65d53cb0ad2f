"""Who a Flight call comes from, and whether it may: by the `authorization` header, as over HTTP."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, Final

from pyarrow import flight

from tidewater_worker.auth.access import Access
from tidewater_worker.auth.caller import CALLER
from tidewater_worker.auth.guard import Guard

MIDDLEWARE: Final = "tidewater-caller"
REVIEW_S: Final = 30.0


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, authorization: bytes | None) -> None:
        self.authorization = authorization


class Callers(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Notes the token of each call."""

    def start_call(self, info: Any, headers: Any) -> _Caller:
        """Take the header; gRPC has its name in lower case."""
        found = [
            value for name, values in headers.items() if name == "authorization" for value in values
        ]
        if not found:
            return _Caller(None)
        value = found[0] if len(found) == 1 else b""
        return _Caller(value.encode("latin-1") if isinstance(value, str) else bytes(value))


class Judge:
    """Judges calls from Flight's threads."""

    def __init__(self, guard: Guard | None, loop: asyncio.AbstractEventLoop) -> None:
        self._guard, self._loop = guard, loop

    def check(self, context: Any, needs: tuple[Access, ...]) -> "Permission":
        """Raise if the caller may not; this step of the call works for the caller from here on."""
        if self._guard is None:
            return Permission(self, None, needs, None)
        authorization = context.get_middleware(MIDDLEWARE).authorization
        permission = Permission(self, authorization, needs, self._guard)
        permission.check()
        return permission

    def ask(self, work: Any) -> Any:
        """Have the event loop answer."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(REVIEW_S)

    def visible(self, context: Any, namespaces: Iterable[str]) -> frozenset[str] | None:
        """Return the namespaces that a list may show; None: all."""
        if self._guard is None:
            return None
        authorization = context.get_middleware(MIDDLEWARE).authorization
        found: frozenset[str] = self.ask(self._guard.visible(authorization, namespaces))
        return found

    @property
    def now(self) -> float:
        """Return the event loop's time."""
        return self._loop.time()


class Permission:
    """What a call was allowed; asked for again while it goes on."""

    def __init__(
        self,
        judge: Judge,
        authorization: bytes | None,
        needs: tuple[Access, ...],
        guard: Guard | None,
    ) -> None:
        self._judge, self._authorization, self._needs = judge, authorization, needs
        self._guard = guard
        self._again_at = 0.0

    def check(self) -> None:
        """Raise if it is withdrawn; looks every some seconds only."""
        if self._guard is None:
            return
        # Each time: the library's threads come into Python anew, and remember nothing.
        CALLER.set(self._authorization)
        if self._judge.now < self._again_at:
            return
        self._judge.ask(self._guard.check(self._authorization, self._needs))
        self._again_at = self._judge.now + self._guard.recheck_s

    def guarded(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield as long as it is allowed."""
        left = iter(batches)
        while True:
            self.check()
            try:
                batch = next(left)
            except StopIteration:
                return
            yield batch
