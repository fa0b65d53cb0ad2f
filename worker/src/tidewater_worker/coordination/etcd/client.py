"""Calls to an etcd cluster: any of its servers, each call bounded in time.

A call goes to the server that answered last; if that one does not, to the next. All that we send
may be sent twice: a read, a renewal, or a transaction whose conditions hold at most once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeAlias

import grpc
import grpc.aio

from tidewater_core.errors import Retryable
from tidewater_worker.coordination.etcd import wire

ATTEMPT_S: Final = 1.5
"""For one server to answer one call."""
CALL_S: Final = 5.0
"""For a call, over all servers."""
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
Unary: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
Streams: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
log = logging.getLogger(__name__)


def _channel(endpoint: str) -> grpc.aio.Channel:
    scheme, _, address = endpoint.rstrip("/").partition("://")
    if scheme == "https":
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options=_OPTIONS)
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


class EtcdClient:
    """The few calls that coordination is made of."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        assert endpoints
        self._endpoints = list(endpoints)
        self._channels: list[grpc.aio.Channel] = []
        self._current = 0
        self.counters = {"calls": 0, "sent_bytes": 0, "writes": 0}

    def open(self) -> None:
        """Prepare the connections; they are made when they are needed."""
        self._channels = [_channel(endpoint) for endpoint in self._endpoints]

    async def close(self) -> None:
        """Hang up."""
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
                call: Unary = self._channels[at].unary_unary(method)
                answer: bytes = await call(request, timeout=min(ATTEMPT_S, left_s))
            except grpc.aio.AioRpcError as error:
                self._next_after(at, error)
                failed += 1
                if time.monotonic() >= deadline:
                    raise _away(error) from error
                if failed % len(self._channels) == 0:
                    await asyncio.sleep(PAUSE_S)
            else:
                return answer

    def _next_after(self, at: int, error: grpc.aio.AioRpcError) -> None:
        if error.code() not in _PASSING:
            raise _away(error) from error
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
            calling: Streams = self._channels[at].stream_stream(wire.LEASE_KEEP_ALIVE)
            call = calling(timeout=min(ATTEMPT_S, left_s))
            try:
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
                call.cancel()

    async def watch(self, key: bytes, end: bytes, revision: int) -> AsyncIterator[wire.WatchAnswer]:
        """Yield the changes of a range from a revision on; raises when it cannot go on."""
        at = self._current
        calling: Streams = self._channels[at].stream_stream(wire.WATCH)
        call = calling()
        try:
            await call.write(wire.watch_request(key, end, revision))
            while isinstance(answer := await call.read(), bytes):
                told = wire.read_watch(answer)
                if told.canceled:
                    raise Retryable("WatchCanceled", f"etcd: {told.cancel_reason}", RETRY_MS)
                yield told
        except grpc.aio.AioRpcError as error:
            self._next_after(at, error)
            raise _away(error) from error
        finally:
            call.cancel()


def _away(error: grpc.aio.AioRpcError) -> Retryable:
    return Retryable("StoreAway", f"etcd: {error.code().name}: {error.details()}", RETRY_MS)
