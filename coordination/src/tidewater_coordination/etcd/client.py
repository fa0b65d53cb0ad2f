"""Calls to an etcd cluster: any of its servers, each call bounded in time.

A call goes to the server that answered last; if that one does not, to the next. All that we send
may be sent twice: a read, a renewal, or a transaction whose conditions hold at most once.

Servers with authentication want a token with each call. It is asked for when it is needed, and
again when a server no longer knows it (it was idle, the server was started anew, rights changed).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

import grpc
import grpc.aio

from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.login import Login
from tidewater_core.errors import Invalid, Retryable

ATTEMPT_S: Final = 1.5
"""For one server to answer one call."""
CALL_S: Final = 5.0
"""For a call, over all servers."""
HANG_UP_S: Final = 2.0
"""Before a connection that was replaced is closed: the calls on it have had their time by then."""
PAUSE_S: Final = 0.1
RETRY_MS: Final = 1_000
PAGE_KEYS: Final = 1_000
_OPTIONS: Final = [
    # A server that hangs or is cut off is noticed by pings; etcd refuses more than one in 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A server that comes back may have another address. By default a name is asked for again only
    # after 30 s, three times as long as a session lasts.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
_PASSING: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
    }
)
_WITH_LEADER: Final = (("hasleader", "true"),)
"""Asks a server to end a watch while it knows no leader; cut off from the others it would else be
silent for ever, and what is silent looks like what has not changed."""
_NOTHING: Final = grpc.aio.Metadata()
_RIGHTS_CHANGED: Final = "revision of auth store is old"
"""etcd's words for a token from before a change of rights."""
Unary: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
Streams: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
Stream: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
log = logging.getLogger(__name__)


@contextmanager
def _cut_off_is_an_error() -> Iterator[None]:
    """Tell a call that ended with its connection from our own wish to end.

    grpc.aio says both with a CancelledError, which ends a task without a word.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.CANCELLED, _NOTHING, _NOTHING, "the connection was closed"
        ) from None


def _channel(endpoint: str, login: Login) -> grpc.aio.Channel:
    scheme, _, address = endpoint.rstrip("/").partition("://")
    if scheme != "https":
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(*login.certificates())
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


class EtcdClient:
    """The few calls that coordination is made of."""

    def __init__(self, endpoints: Sequence[str], login: Login | None = None) -> None:
        assert endpoints
        self._endpoints = list(endpoints)
        self._login = login or Login()
        self._stamp: tuple[int, ...] = ()
        self._token = ""
        self._channels: list[grpc.aio.Channel] = []
        self._hanging_up: set[asyncio.Task[None]] = set()
        self._current = 0
        self.counters = {"calls": 0, "sent_bytes": 0, "writes": 0}

    def open(self) -> None:
        """Prepare the connections; they are made when they are needed."""
        self._stamp = self._login.stamp()
        try:
            self._channels = [_channel(endpoint, self._login) for endpoint in self._endpoints]
        except OSError as error:
            raise Invalid("InvalidSettings", f"etcd's certificates: {error}") from error

    def _renew_certificates(self) -> None:
        """Connect anew if the files were replaced: a connection keeps those that it began with."""
        if self._login.stamp() == self._stamp:
            return
        old = self._channels
        try:
            self.open()
        except Invalid as error:
            log.warning("%s", error)
            return
        log.warning("etcd's certificates were renewed")
        for channel in old:
            task = asyncio.create_task(_hang_up(channel))
            self._hanging_up.add(task)
            task.add_done_callback(self._hanging_up.discard)

    async def close(self) -> None:
        """Hang up."""
        for task in self._hanging_up:
            task.cancel()
        await asyncio.gather(*self._hanging_up, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _call(self, method: str, request: bytes, timeout_s: float = CALL_S) -> bytes:
        deadline = time.monotonic() + timeout_s
        self.counters["calls"] += 1
        self.counters["sent_bytes"] += len(request)
        failed = 0
        while True:
            at = self._current
            left_s = max(deadline - time.monotonic(), 0.05)
            try:
                with _cut_off_is_an_error():
                    metadata = await self._metadata(at)
                    call: Unary = self._channels[at].unary_unary(method)
                    answer: bytes = await call(
                        request, timeout=min(ATTEMPT_S, left_s), metadata=metadata
                    )
            except grpc.aio.AioRpcError as error:
                self._next_after(at, error)
                failed += 1
                if time.monotonic() >= deadline:
                    raise _away(error) from error
                if failed % len(self._channels) == 0:
                    await asyncio.sleep(PAUSE_S)
            else:
                return answer

    async def _metadata(self, at: int) -> tuple[tuple[str, str], ...]:
        """Return what goes with every call: the token, if there is a user."""
        if not self._login.user:
            return ()
        if not self._token:
            call: Unary = self._channels[at].unary_unary(wire.AUTHENTICATE)
            request = wire.authenticate_request(self._login.user, self._login.password)
            self._token = wire.read_token(await call(request, timeout=ATTEMPT_S))
        return (("token", self._token),)

    def _next_after(self, at: int, error: grpc.aio.AioRpcError) -> None:
        """Get ready for another attempt, or raise that none would help."""
        if self._login.user and _is_about_token(error):
            self._token = ""
            return
        if error.code() not in _PASSING:
            raise _away(error) from error
        self._renew_certificates()
        if self._current == at:
            self._current = (at + 1) % len(self._channels)

    async def range(
        self, key: bytes, end: bytes = b"", *, keys_only: bool = False
    ) -> wire.RangeAnswer:
        """Read a key, or all keys of a range at one revision, page by page."""
        revision, found = 0, list[wire.KeyValue]()
        while True:
            request = wire.range_request(
                key, end, limit=PAGE_KEYS if end else 0, revision=revision, keys_only=keys_only
            )
            page = wire.read_range(await self._call(wire.RANGE, request))
            revision = revision or page.revision
            found += page.kvs
            if not page.more:
                return wire.RangeAnswer(revision, tuple(found), more=False)
            key = page.kvs[-1].key + b"\0"

    async def txn(
        self, conditions: Sequence[bytes], success: Sequence[bytes], failure: Sequence[bytes] = ()
    ) -> wire.TxnAnswer:
        """Do the operations of `success` if all conditions hold, else those of `failure`."""
        self.counters["writes"] += 1
        request = wire.txn_request(conditions, success, failure)
        return wire.read_txn(await self._call(wire.TXN, request))

    async def get_all(self, *reads: bytes) -> tuple[tuple[wire.KeyValue, ...], ...]:
        """Do several reads (`wire.get`) at one revision."""
        request = wire.txn_request([], reads)
        return wire.read_txn(await self._call(wire.TXN, request)).ranges

    async def grant_lease(self, ttl_s: int) -> int:
        """Make a lease."""
        self.counters["writes"] += 1
        request = wire.lease_grant_request(ttl_s)
        return wire.read_lease(await self._call(wire.LEASE_GRANT, request))[0]

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys."""
        self.counters["writes"] += 1
        await self._call(wire.LEASE_REVOKE, wire.lease_request(lease), ATTEMPT_S)

    async def keep_alive(self, lease: int, timeout_s: float) -> bool:
        """Renew a lease; False if it is gone."""
        deadline = time.monotonic() + timeout_s
        request = wire.lease_request(lease)
        self.counters["calls"] += 1
        self.counters["sent_bytes"] += len(request)
        while True:
            at = self._current
            left_s = max(deadline - time.monotonic(), 0.05)
            call: Stream | None = None
            try:
                with _cut_off_is_an_error():
                    metadata = await self._metadata(at)
                    calling: Streams = self._channels[at].stream_stream(wire.LEASE_KEEP_ALIVE)
                    call = calling(timeout=min(ATTEMPT_S, left_s), metadata=metadata)
                    await call.write(request)
                    answer = await call.read()
                if not isinstance(answer, bytes):
                    raise Retryable("StoreAway", "etcd ended a renewal", RETRY_MS)
                return wire.read_lease(answer)[1] > 0
            except grpc.aio.AioRpcError as error:
                self._next_after(at, error)
                if time.monotonic() >= deadline:
                    raise _away(error) from error
                await asyncio.sleep(PAUSE_S)
            finally:
                if call is not None:
                    call.cancel()

    async def watch(
        self, key: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[wire.WatchAnswer, None]:
        """Yield the changes of a range from a revision on; raises when it cannot go on."""
        at = self._current
        call: Stream | None = None
        try:
            with _cut_off_is_an_error():
                metadata = await self._metadata(at)
                calling: Streams = self._channels[at].stream_stream(wire.WATCH)
                call = calling(metadata=metadata + _WITH_LEADER)
                await call.write(wire.watch_request(key, end, revision))
            while isinstance(answer := await _next(call), bytes):
                told = wire.read_watch(answer)
                if told.canceled:
                    raise Retryable("WatchCanceled", f"etcd: {told.cancel_reason}", RETRY_MS)
                yield told
        except grpc.aio.AioRpcError as error:
            self._next_after(at, error)
            raise _away(error) from error
        finally:
            if call is not None:
                call.cancel()


async def _next(call: Stream) -> object:
    with _cut_off_is_an_error():
        return await call.read()


async def _hang_up(channel: grpc.aio.Channel) -> None:
    """Close a connection when its calls are done; a watch is cut off, and begins on another."""
    try:
        await asyncio.sleep(HANG_UP_S)
    finally:
        await channel.close()


def _is_about_token(error: grpc.aio.AioRpcError) -> bool:
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return True
    return _RIGHTS_CHANGED in (error.details() or "")


def _away(error: grpc.aio.AioRpcError) -> Retryable:
    reason = "StoreAway" if error.code() in _PASSING else "StoreRefused"
    return Retryable(reason, f"etcd: {error.code().name}: {error.details()}", RETRY_MS)
