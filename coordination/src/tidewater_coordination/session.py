"""A worker's session, store by store alike: open it, renew it, open another when it was lost."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from tidewater_core.errors import TidewaterError

RENEWALS_PER_TTL: Final = 3
DRIFT_SHARE: Final = 0.9
"""Of the time to live that counts here: clocks of two machines do not run at one speed."""
RETRY_S_MAX: Final = 1.0
log = logging.getLogger(__name__)


class SessionKeeper:
    """Keeps one session alive by the store's two calls.

    `open_` returns the name of a new session; `renew` tells whether that session is still there,
    and raises if the store does not answer.
    """

    def __init__(
        self,
        ttl_s: float,
        open_: Callable[[], Awaitable[str]],
        renew: Callable[[str], Awaitable[bool]],
    ) -> None:
        self.session = ""
        self.deadline = 0.0
        self.counters = {"sessions_opened": 0, "session_renewals_failed": 0}
        self._ttl_s = ttl_s
        self._open, self._renew = open_, renew
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the first session, or raise why not, and begin to keep it."""
        await self._open_one()
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Stop renewing; nothing may be appended from now on."""
        self.deadline = 0.0
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def lose(self) -> None:
        """Take the session for lost: the store said so by another way."""
        self.session, self.deadline = "", 0.0

    async def _open_one(self) -> None:
        asked_at = time.monotonic()
        session = await self._open()
        self.session, self.deadline = session, asked_at + self._ttl_s * DRIFT_SHARE
        self.counters["sessions_opened"] += 1

    async def _keep(self) -> None:
        pause_s = self._ttl_s / RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._once()
            except Exception as error:
                # Whatever it is: without a renewal in time nothing may be appended.
                self.counters["session_renewals_failed"] += 1
                left_s = self.deadline - time.monotonic()
                expected = isinstance(error, TidewaterError | TimeoutError)
                log.warning(
                    "the session was not renewed (%.1f s are left): %s", left_s, error,
                    exc_info=None if expected else error,
                )  # fmt: skip
                pause_s = min(self._ttl_s / RENEWALS_PER_TTL / 2, RETRY_S_MAX)
            else:
                pause_s = self._ttl_s / RENEWALS_PER_TTL

    async def _once(self) -> None:
        """Renew, or open another session after a loss.

        A session that the store still has is renewed even past our own deadline: nobody else was
        given anything meanwhile.
        """
        session = self.session
        if session:
            asked_at = time.monotonic()
            if await self._renew(session):
                if self.session == session:
                    self.deadline = asked_at + self._ttl_s * DRIFT_SHARE
                return
            log.warning("session %s was lost", session)
            self.lose()
        await self._open_one()
        log.warning("session %s was opened", self.session)
