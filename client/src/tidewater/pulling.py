"""The engine of a consumer: pulls ahead, extends what is held, tells what is done, comes back.

One socket (or long poll) per owner of the topic's partitions, so that a message is heard of where
it is stored; one for all where owners cannot be reached. It asks for no more than the buffer has
room for, so a slow program holds back the server and nobody else. Runs in one event loop; the
blocking consumer has a thread for it.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tidewater import wire
from tidewater.background import cancelled
from tidewater.deliveries import Delivered, Pulled, Settles, of_arrow, of_messages
from tidewater.errors import (
    PASSING,
    Conflict,
    Invalid,
    NotFound,
    OutcomeUnknown,
    Retryable,
    TidewaterError,
    Unauthenticated,
)
from tidewater.http1 import Response
from tidewater.leases import Held, Lease, Stage, by_origin, chunks, room
from tidewater.origin import Origin
from tidewater.retry import RetryPolicy
from tidewater.routing import CONNECT_S, Routes
from tidewater.settling import IDS_MAX, STALE, Settling, Tally, check_delay
from tidewater.sockets import NoSocketError
from tidewater.sources import COMMANDS, Polling, Source, Streaming
from tidewater.transport import TIMEOUT_S
from tidewater.transport_async import AsyncTransport
from tidewater_core.clock import Clock, IdSource, SystemClock, SystemIds
from tidewater_core.names import TopicName, is_dns_label

PULL_MAX: Final = 10_000
"""Messages of one pull."""
FIRST_PULL: Final = 100
"""Messages of the first one: how large they are is not known yet."""
DEADLINE_S: Final = 10.0
"""What is taken for the ackDeadline of a server that does not tell it."""
EXTEND_SHARE: Final = 0.5
"""A message is extended when this share of the deadline is left: one lost request is no harm."""
NOT_FOUND_S: Final = 10.0
"""A worker that has just started may not know a subscription yet."""
CLOSE_S: Final = 5.0
"""How long the last words to the server may take."""
log = logging.getLogger("tidewater.consumer")


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How a consumer behaves."""

    name: str | None = None
    """Names it among the subscription's consumers; None: a name of its own. A consumer that comes
    back under its name keeps its partitions and keys."""
    prefetch: int = 1_000
    """Messages that wait in memory for the program; 0: none are fetched before they are wanted."""
    prefetch_bytes: int = 16 * 1024 * 1024
    """About how much memory they may take."""
    auto_ack: bool = False
    """A message is acknowledged when the loop comes for the next one."""
    ack_wait_s: float = 0.005
    """How long an ack waits for others to share its request."""
    extend_s_max: float = 3_600.0
    """How long a message may be worked on; it is extended until then, and comes again after."""
    socket: bool = True
    """Get messages over a WebSocket where there is one; False: by one long poll after another."""
    wait_s: float = 20.0
    """How long a long poll waits for messages before it asks again."""
    standby: bool = False
    """Wait for an Exclusive subscription that another consumer has, instead of an error."""
    direct: bool = True
    """Ask the owners of partitions where they can be reached."""
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.prefetch < 0 or self.prefetch_bytes < 1:
            raise Invalid("BadOptions", "prefetch is 0 or more, prefetch_bytes 1 or more")
        if min(self.ack_wait_s, self.extend_s_max, self.wait_s) < 0 or self.timeout_s <= 0:
            raise Invalid("BadOptions", "times are not negative")


class Pulling:
    """Keeps a buffer of messages filled, and the server informed."""

    def __init__(
        self,
        origin: Origin,
        topic: TopicName,
        subscription: str,
        options: ConsumerOptions,
        consumer: Settles,
        on_change: Callable[[], None],
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Prepare; `start` begins. `on_change` is called when there is something to take."""
        if not is_dns_label(subscription):
            raise Invalid("BadSubscription", f"{subscription!r} is not a subscription's name")
        self.options = options
        self.held: Held[Delivered] = Held(options.extend_s_max)
        self.tally = Tally()
        self.failed: TidewaterError | None = None
        """Why nothing comes any more."""
        self.trouble: TidewaterError | None = None
        """Why nothing comes at the moment."""
        self._wants_arrow = False
        self.waiting = 0
        """Receivers that wait."""
        self._consumer, self._on_change = consumer, on_change
        self._clock, self._ids = clock or SystemClock(), ids or SystemIds()
        self._loop = asyncio.get_running_loop()
        self._topic = topic
        self._subscription = subscription
        self._has_sockets = options.socket
        self._path = f"/v1/{topic}/subscriptions/{subscription}"
        self.name = options.name or f"py-{self._ids.uuid().hex[:12]}"
        self._retry = RetryPolicy(attempts_max=1 << 30)
        self._routes = Routes(origin, direct=options.direct, clock=self._clock)
        self._transports: dict[Origin, AsyncTransport] = {}
        self._streams: dict[Origin, Streaming] = {}
        self._deadline_s = DEADLINE_S
        self._mean_bytes = 0.0
        self._room = asyncio.Event()
        self._is_full = False
        self._is_closing = False
        self._rearrange = asyncio.Event()
        self._drained = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.settling = Settling(
            self.call, self.held.told, self.name, options.ack_wait_s, self.tally, self._ids
        )

    # ---- life

    async def start(self) -> None:
        """See that the subscription is there."""
        try:
            status = wire.decode_object(await self._patiently())
        except TidewaterError:
            await self._hang_up()
            raise
        self._deadline_s = status.get("ack_deadline_ms", DEADLINE_S * 1000) / 1000

    async def _patiently(self) -> Response:
        """Ask for the subscription, again while the server is busy or on its way."""
        policy = RetryPolicy()
        for attempt in itertools.count(1):
            try:
                response = await self._request(self._routes.base, "GET", "")
                wire.check(response)
            except TidewaterError as error:
                wait_s = policy.wait_s(error, attempt, self._ids.jitter(), repeatable=True)
                if wait_s is None:
                    raise
            else:
                return response
            await asyncio.sleep(wait_s)
        raise AssertionError

    def is_running(self, *, arrow: bool) -> bool:
        """Tell whether it pulls already; whoever receives must want the same format."""
        if self._tasks and arrow != self._wants_arrow:
            raise Invalid("MixedFormats", "a consumer hands out messages or Arrow, not both")
        return bool(self._tasks)

    def begin(self, *, arrow: bool) -> None:
        """Begin to pull, at the first call."""
        if self.is_running(arrow=arrow):
            return
        self._wants_arrow = arrow
        self._tasks = [
            asyncio.ensure_future(self._guarded(work))
            for work in (self._pull_all(), self.settling.run(), self._extend_all())
        ]

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop pulling, wait for what is worked on, tell what is done, give back the rest."""
        self._is_closing = True
        tasks, self._tasks = self._tasks, []
        if not tasks:
            await self._hang_up()
            return
        pulling, *others = tasks
        await cancelled(pulling)
        self.held.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.held.out:
                    self._drained.clear()
                    await self._drained.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.settling.flush()
        await cancelled(*others)
        await self._leave()
        await self._hang_up()

    async def _leave(self) -> None:
        """Say goodbye: what was not settled goes to others at once, and is not counted."""
        try:
            async with asyncio.timeout(CLOSE_S):
                for attempt in range(1, 5):
                    try:
                        await self.call(self._routes.base, "leave", {"consumer": self.name})
                        return
                    except PASSING as error:
                        wait_s = self._retry.wait_s(error, attempt, 0.0, repeatable=True)
                        await asyncio.sleep(wait_s or 0)
        except (TimeoutError, TidewaterError) as error:
            log.warning("%s could not leave: %s; its messages come again later", self.name, error)

    async def _hang_up(self) -> None:
        for transport in self._transports.values():
            await transport.close()
        self._transports.clear()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TidewaterError as error:
            self.failed = error
        except Exception as fault:  # whoever waits would never hear of a task that is gone
            log.exception("%s ends", self.name)
            self.failed = OutcomeUnknown("Internal", f"a fault of the client: {fault!r}")
        self._on_change()

    # ---- pulling

    async def _pull_all(self) -> None:
        """Pull from every owner; arrange anew when owners change."""
        while True:
            await self._ask_owners()
            origins = self._routes.origins()
            share = -(-max(self.options.prefetch, 1) // len(origins))
            self._rearrange.clear()
            loops = [asyncio.ensure_future(self._pull_from(o, share)) for o in origins]
            changed = asyncio.ensure_future(self._owners_change(origins))
            try:
                done, _ = await asyncio.wait([*loops, changed], return_when="FIRST_COMPLETED")
                for task in done:
                    task.result()
            finally:
                await cancelled(*loops, changed)

    async def _owners_change(self, origins: list[Origin]) -> None:
        """Return when others own the partitions, or some of them cannot be reached."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._rearrange.wait()
            self._rearrange.clear()
            await self._ask_owners()
            if set(self._routes.origins()) != set(origins):
                return

    async def _ask_owners(self) -> None:
        if not self._routes.should_ask:
            return
        transport = self._transport(self._routes.base)
        try:
            answer = await transport.request("GET", f"/v1/{self._topic}")
            self._routes.asked(wire.decode_object(answer))
        except TidewaterError as error:
            log.info("the owners of %s are not known: %s", self._topic, error)
            self._routes.asked(None, error)

    async def _pull_from(self, origin: Origin, share: int) -> None:
        """Take what one worker delivers, whatever happens to it."""
        failures = 0
        missing_since: float | None = None
        is_known = False
        source = self._source(origin, share)
        try:
            while True:
                try:
                    await source.take()
                except NoSocketError as error:
                    log.info("%s: %s; polling instead", self.name, error)
                    self._has_sockets = False
                    await source.close()
                    source = self._source(origin, share)
                except NotFound as error:
                    missing_since = missing_since or self._clock.monotonic()
                    if self._clock.monotonic() - missing_since > NOT_FOUND_S:
                        raise
                    failures = await self._back_off(origin, error, failures)
                except Conflict as error:
                    if error.reason != "ExclusiveTaken" or not self.options.standby:
                        raise
                    failures = await self._back_off(origin, error, 0)
                except Unauthenticated as error:
                    if not is_known:
                        raise
                    # The token that a socket was opened with has ended; there may be a new one.
                    is_known = False
                    failures = await self._back_off(origin, error, failures)
                except PASSING as error:
                    failures = await self._back_off(origin, error, failures)
                else:
                    failures, missing_since, self.trouble, is_known = 0, None, None, True
        finally:
            await source.close()

    def _source(self, origin: Origin, share: int) -> Source:
        options = self.options
        connect_s = options.timeout_s if origin == self._routes.base else CONNECT_S
        if self._has_sockets:
            stream = self._streams[origin] = Streaming(
                self, origin, f"/v1/{self._topic}/socket", self._subscription, share,
                arrow=self._wants_arrow, connect_s=connect_s, ids=self._ids,
            )  # fmt: skip
            return stream
        return Polling(
            self, origin, self._path, share, arrow=self._wants_arrow,
            wait_s=options.wait_s, timeout_s=options.timeout_s, connect_s=connect_s,
        )  # fmt: skip

    async def _back_off(self, origin: Origin, error: TidewaterError, failures: int) -> int:
        failures += 1
        self.tally.errors += 1
        self.trouble = error
        if failures & (failures - 1) == 0:
            log.warning("%s: pull from %s: %s (%d)", self.name, origin, error, failures)
        if self._routes.failed(origin, error):
            self._rearrange.set()
        known = error if isinstance(error, PASSING) else Retryable(error.reason, error.message, 500)
        wait_s = self._retry.wait_s(known, min(failures, 20), self._ids.jitter(), repeatable=True)
        await asyncio.sleep(wait_s or 0)
        return failures

    async def room_for(self, share: int, owed: Callable[[], int]) -> int:
        """Wait until the buffer has room for more than a few; return for how many."""
        while True:
            # Before the look: a thread that takes meanwhile must wake this up again.
            self._room.clear()
            self._is_full = True
            free = room(
                self.options.prefetch, self.waiting, self.held,
                self.options.prefetch_bytes, self._mean_bytes,
            )  # fmt: skip
            asked = owed()
            more = min(free, share, PULL_MAX if self._mean_bytes else FIRST_PULL) - asked
            if more > 0 and (more >= share // 4 or not (self.held.buffered or asked)):
                return more
            await self._room.wait()

    def take_in(self, origin: Origin, found: list[Pulled] | bytes) -> None:
        """Put what was delivered into the buffer."""
        now = self._clock.monotonic()
        due = now + self._deadline_s

        def lease(ack_id: str, partition: int, offset: int) -> Lease:
            return Lease(ack_id, (partition, offset), origin, now, due)

        items: list[Any] = list(
            of_arrow(found, lease, self._consumer)
            if isinstance(found, bytes)
            else of_messages(found, lease, self._consumer)
        )
        if not items:
            return
        count = sum(len(item.leases) for item in items)
        mean = sum(item.nbytes for item in items) / count
        # The largest of late counts most: memory is what is to be bounded.
        self._mean_bytes = max(mean, self._mean_bytes * 0.9)
        self.tally.received += count
        self.settling.add("ack", self.held.add(items, now))
        self._taken()
        self._on_change()

    def take(self, count: int) -> list[Delivered]:
        """Hand out up to `count` items, to any thread."""
        found = self.held.take(count, self._clock.monotonic())
        self._taken()
        return found

    def _taken(self) -> None:
        if self._is_full:
            self._is_full = False
            self._loop.call_soon_threadsafe(self._room.set)

    # ---- extending

    async def _extend_all(self) -> None:
        """Extend what is held, before others get it."""
        while True:
            await asyncio.sleep(max(self._deadline_s / 8, 0.02))
            due = self.held.due(self._clock.monotonic(), self._deadline_s * EXTEND_SHARE)
            for origin, leases in by_origin(due).items():
                for some in chunks(leases, IDS_MAX):
                    await self._extend(origin, some, None)

    async def _extend(self, origin: Origin, leases: Any, deadline_s: float | None) -> None:
        body: dict[str, Any] = {
            "ack_ids": [lease.ack_id for lease in leases], "consumer": self.name,
        }  # fmt: skip
        if deadline_s is not None:
            body["deadline_ms"] = max(1, round(deadline_s * 1000))
        now = self._clock.monotonic()
        try:
            answer = await self.call(origin, "extend", body)
        except PASSING as error:
            log.warning("%s: extending %d messages: %s", self.name, len(leases), error)
            self.tally.errors += 1
            return
        refused = {each["ack_id"]: each["reason"] for each in answer.get("refused", ())}
        self.held.extended(
            (lease for lease in leases if lease.ack_id not in refused),
            now + (self._deadline_s if deadline_s is None else deadline_s),
        )
        over = [
            lease
            for lease in leases
            if refused.get(lease.ack_id) == STALE and lease.stage is not Stage.SETTLED
        ]
        if over:
            out = self.held.lost(over)
            self.tally.lost += len(over)
            log.warning("%s: %d deliveries are over, %d of them at work", self.name, len(over), out)
            self._taken()

    async def extend(self, leases: tuple[Lease, ...], deadline_s: float | None) -> None:
        """Hold messages for `deadline_s` from now."""
        for origin, some in by_origin(leases).items():
            await self._extend(origin, some, deadline_s)

    # ---- calls

    def settle(self, verb: str, leases: tuple[Lease, ...], delay_s: float | None) -> None:
        """Tell the server, soon and from any thread, what became of messages."""
        delay_ms = check_delay(delay_s)
        if self.settling.failed is not None:
            raise self.settling.failed
        self.settling.add(verb, self.held.settle(leases, ack=verb == "ack"), delay_ms)
        if self._is_closing and not self.held.out:
            self._loop.call_soon_threadsafe(self._drained.set)

    async def call(self, origin: Origin, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask something of the subscription, at the worker or through the one that was given."""
        stream = self._streams.get(origin)
        if stream is not None and stream.can_settle and verb in COMMANDS:
            return await stream.settle(verb, body, self.options.timeout_s)
        data = msgspec.json.encode(body)
        if origin != self._routes.base and origin in self._routes.origins():
            try:
                return wire.decode_object(await self._request(origin, "POST", f"/{verb}", data))
            except Retryable as error:
                # Certainly not done: the other way is as good.
                if self._routes.failed(origin, error):
                    self._rearrange.set()
        return wire.decode_object(await self._request(self._routes.base, "POST", f"/{verb}", data))

    async def _request(self, origin: Origin, method: str, path: str, body: bytes = b"") -> Response:
        kind = wire.JSON if body else None
        return await self._transport(origin).request(
            method, self._path + path, body, Content_Type=kind
        )

    def _transport(self, origin: Origin) -> AsyncTransport:
        if origin not in self._transports:
            is_base = origin == self._routes.base
            self._transports[origin] = AsyncTransport(
                origin,
                timeout_s=self.options.timeout_s,
                connect_s=self.options.timeout_s if is_base else CONNECT_S,
                connections_max=2,
                pipeline_max=4,
            )
        return self._transports[origin]
