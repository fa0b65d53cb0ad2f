"""Telling the server what became of messages: many acks in one request, again until it is stored.

An ack that could not be stored is sent again with growing waits until the server has it or says
that the delivery is over (`Stale`): then the message comes again to somebody, as promised (G4).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tidewater.errors import PASSING, Invalid, OutcomeUnknown, Retryable, TidewaterError
from tidewater.leases import Lease, by_origin, chunks
from tidewater.origin import Origin
from tidewater.retry import RetryPolicy
from tidewater_core.clock import IdSource

IDS_MAX: Final = 5_000
"""Ids of one request: a server takes 8 MiB."""
STALE: Final = "Stale"
NOT_STORED: Final = Retryable("NotStored", "some must be sent again")
log = logging.getLogger("tidewater.consumer")

Call = Callable[[Origin, str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""POST to the subscription at a worker: (worker, verb, body) -> answer."""


@dataclass(slots=True)
class Tally:
    """What became of messages so far."""

    received: int = 0
    acked: int = 0
    nacked: int = 0
    late: int = 0
    """Acks that came after the message had been given to somebody else: it was done twice."""
    lost: int = 0
    """Deliveries that ended while the program was at work or before it got them."""
    errors: int = 0
    """Calls that had to be made again."""


@dataclass(slots=True)
class _Work:
    verb: str
    body: dict[str, Any]
    leases: list[Lease] = field(default_factory=list)


class Settling:
    """Sends acks and nacks. `add` may be called from any thread, the rest in the event loop."""

    def __init__(
        self,
        call: Call,
        told: Callable[[Iterable[Lease]], None],
        consumer: str,
        wait_s: float,
        tally: Tally,
        ids: IdSource,
    ) -> None:
        """Begin with nothing to send; `run` sends, and says what the server was `told`."""
        self._call = call
        self._told = told
        self._consumer = consumer
        self._wait_s = wait_s
        self._tally = tally
        self._ids = ids
        self._retry = RetryPolicy(attempts_max=1 << 30)
        self._loop = asyncio.get_running_loop()
        self._work: dict[tuple[str, int | None], _Work] = {}
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.failed: TidewaterError | None = None
        """Why nothing can be settled any more."""

    def add(self, verb: str, leases: Sequence[Lease], delay_ms: int | None = None) -> None:
        """Tell the server of `leases`, soon."""
        if not leases:
            return
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if on_loop:
            self._add(verb, leases, delay_ms)
        else:
            self._loop.call_soon_threadsafe(self._add, verb, leases, delay_ms)

    def _add(self, verb: str, leases: Iterable[Lease], delay_ms: int | None) -> None:
        body = {} if delay_ms is None else {"delay_ms": delay_ms}
        self._work.setdefault((verb, delay_ms), _Work(verb, body)).leases += leases
        self._idle.clear()
        self._wake.set()

    async def flush(self) -> None:
        """Wait until everything added so far is stored or refused."""
        if not self._idle.is_set():
            self._hurry.set()
            await self._idle.wait()

    async def run(self) -> None:
        """Send what is added, for ever."""
        try:
            await self._send_all()
        except Exception as fault:
            # Whoever waits for acks to be stored hears that nobody knows.
            self.failed = OutcomeUnknown("Internal", f"a fault of the client: {fault!r}")
            self._idle.set()
            raise

    async def _send_all(self) -> None:
        failures = 0
        while True:
            await self._wake.wait()
            if self._wait_s:
                # Others will join; unless somebody waits for these.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_s):
                        await self._hurry.wait()
            self._wake.clear()
            work, self._work = self._work, {}
            again = False
            for one in work.values():
                again |= await self._send(one)
            if again:
                failures += 1
                jitter = self._ids.jitter()
                wait_s = self._retry.wait_s(NOT_STORED, failures, jitter, repeatable=True)
                await asyncio.sleep(wait_s or 0)
            else:
                failures = 0
            if not self._work:
                self._hurry.clear()
                self._idle.set()
            else:
                self._wake.set()

    async def _send(self, work: _Work) -> bool:
        """Send one kind of work to every worker it belongs to; tell whether some must go again."""
        again: list[Lease] = []
        for origin, leases in by_origin(work.leases).items():
            for some in chunks(leases, IDS_MAX):
                again += await self._send_to(origin, work, some)
        if again:
            self._tally.errors += 1
            self._add(work.verb, again, work.body.get("delay_ms"))
        return bool(again)

    async def _send_to(self, origin: Origin, work: _Work, leases: Sequence[Lease]) -> list[Lease]:
        # Ids may change meanwhile: a worker that has restarted delivers a message again. The new
        # one is on its way as well, and what counts.
        by_id = {lease.ack_id: lease for lease in leases}
        body = {"ack_ids": list(by_id), "consumer": self._consumer, **work.body}
        try:
            answer = await self._call(origin, work.verb, body)
        except PASSING as error:
            log.warning("%s of %d messages: %s; trying again", work.verb, len(leases), error)
            return list(leases)
        except TidewaterError as error:
            log.error("%s of %d messages: %s", work.verb, len(leases), error)
            self.failed = error
            self._told(leases)
            return []
        refused = {each["ack_id"]: each["reason"] for each in answer.get("refused", ())}
        again, known, late = [], [], 0
        for ack_id, lease in by_id.items():
            reason = refused.get(ack_id)
            if reason is not None and reason != STALE:
                again.append(lease)
            elif lease.ack_id == ack_id:
                known.append(lease)
                late += reason is not None
        self._told(known)
        self._count(work.verb, len(known) - late, late)
        return again

    def _count(self, verb: str, done: int, late: int) -> None:
        if verb != "ack":
            self._tally.nacked += done
            return
        self._tally.acked += done
        self._tally.late += late
        if late:
            log.warning("%d acks came too late: the messages are delivered again", late)


def check_delay(delay_s: float | None) -> int | None:
    """Return a delay in milliseconds."""
    if delay_s is None:
        return None
    if not 0 <= delay_s <= 7 * 86_400:
        raise Invalid("BadDelay", f"a delay is 0 to {7 * 86_400} seconds, not {delay_s}")
    return round(delay_s * 1000)
