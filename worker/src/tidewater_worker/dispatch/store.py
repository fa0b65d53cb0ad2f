"""Progress into the coordination store, by group commit: one write at a time carries all (G4).

While a write is under way the next one gathers: many acks share one transaction, and a lone ack
waits for nobody. What is only worth keeping (messages that a filter skipped) goes along with the
next write, or on its own after a while.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from tidewater_coordination.port import CursorKey
from tidewater_core.errors import Fenced, Retryable, TidewaterError
from tidewater_worker.dispatch.ports import ProgressPort

GROUP_MAX: Final = 100
"""Cursors in one transaction: etcd takes no more than 128 operations."""
GROUP_BYTES_MAX: Final = 1_000_000
"""About what one transaction carries: etcd takes 1.5 MiB. A larger cursor goes alone."""
LAZY_S: Final = 2.0
SOON_S: Final = 0.05
log = logging.getLogger(__name__)

Encode = Callable[[], tuple[bytes, int] | None]
"""The progress as it is now and its partition's epoch; None: it is no longer ours to store."""


class ProgressStore:
    """Writes cursors. Runs in the event loop."""

    def __init__(self, port: ProgressPort) -> None:
        self._port = port
        self._dirty: dict[CursorKey, Encode] = {}
        self._waiting: dict[CursorKey, list[tuple[Encode, asyncio.Future[None]]]] = {}
        """Who waits, and for which progress: a partition that came back here has another."""
        self._task: asyncio.Task[None] | None = None
        self._lazy: asyncio.TimerHandle | None = None
        self.writes = 0
        """Transactions made, for those who count them."""

    async def save(self, items: dict[CursorKey, Encode]) -> None:
        """Store these; returns when the store has them, raises if that is not known."""
        loop = asyncio.get_running_loop()
        futures = []
        for key, encode in items.items():
            self._dirty[key] = encode
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(key, []).append((encode, future))
            futures.append(future)
        self._start()
        done = await asyncio.gather(*futures, return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result

    def note(self, key: CursorKey, encode: Encode, within_s: float | None = None) -> None:
        """Store this some time soon; nobody waits for it."""
        self._dirty[key] = encode
        if self._task is not None:
            return  # it goes along with the next write
        loop = asyncio.get_running_loop()
        at = loop.time() + (LAZY_S if within_s is None else within_s)
        if self._lazy is not None and self._lazy.when() > at:
            self._lazy.cancel()
            self._lazy = None
        if self._lazy is None:
            self._lazy = loop.call_at(at, self._start)

    async def close(self) -> None:
        """Write what is left."""
        if self._dirty:
            self._start()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._lazy is not None:
            self._lazy.cancel()

    def _start(self) -> None:
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._dirty:
                # Those that somebody waits for first.
                keys = sorted(self._dirty, key=lambda key: key not in self._waiting)[:GROUP_MAX]
                group = {key: self._dirty.pop(key) for key in keys}
                waiting = {key: self._waiting.pop(key, []) for key in keys}
                try:
                    errors = await self._write(group)
                except Exception as fault:
                    # A fault of ours: whoever waits must hear of it, and others go on.
                    log.exception("progress of %s subscriptions is not stored", len(group))
                    failed = Retryable("ProgressNotStored", f"{type(fault).__name__}: {fault}")
                    errors = dict.fromkeys(keys, failed)
                for key, waiters in waiting.items():
                    for encode, future in waiters:
                        if future.done():
                            continue
                        # What another owner's turn has stored says nothing of this one's acks.
                        error = errors.get(key) if encode == group[key] else _moved(key)
                        if error is None:
                            future.set_result(None)
                        else:
                            future.set_exception(error)
        finally:
            self._task = None

    async def _write(self, group: dict[CursorKey, Encode]) -> dict[CursorKey, TidewaterError]:
        """Store a group; return what went wrong, by cursor."""
        items: dict[CursorKey, bytes] = {}
        epochs: dict[tuple[str, int], int] = {}
        for key, encode in group.items():
            encoded = encode()
            if encoded is not None:
                items[key], epochs[key.topic, key.partition] = encoded
        errors: dict[CursorKey, TidewaterError] = {}
        for piece in _pieces(items):
            found = await self._attempt(piece, epochs)
            if len(piece) > 1 and any(map(_is_of_one, found.values())):
                # All or nothing: one partition that has another owner by now, or one cursor that
                # is too large, must not stop the rest.
                found = {}
                for key, value in piece.items():
                    found.update(await self._attempt({key: value}, epochs))
            errors.update(found)
        errors.update({key: _moved(key) for key in group.keys() - items.keys()})
        return errors

    async def _attempt(
        self, items: dict[CursorKey, bytes], epochs: dict[tuple[str, int], int]
    ) -> dict[CursorKey, TidewaterError]:
        if not items:
            return {}
        self.writes += 1
        places = {key[1:] for key in items}
        try:
            await self._port.store_cursors(items, {place: epochs[place] for place in places})
        except Fenced as error:
            return dict.fromkeys(items, error)
        except TidewaterError as error:
            log.warning("progress of %s subscriptions is not stored: %s", len(items), error)
            return dict.fromkeys(items, error)
        return {}


def _moved(key: CursorKey) -> Fenced:
    return Fenced("PartitionMoved", f"partition {key.partition} has another owner now")


def _is_of_one(error: TidewaterError) -> bool:
    """Tell whether a write may have failed because of one of its cursors."""
    return isinstance(error, Fenced) or error.reason == "StoreRefused"


def _pieces(items: dict[CursorKey, bytes]) -> Iterator[dict[CursorKey, bytes]]:
    """Divide cursors into writes that the store takes."""
    piece: dict[CursorKey, bytes] = {}
    size = 0
    for key, value in items.items():
        if piece and size + len(value) > GROUP_BYTES_MAX:
            yield piece
            piece, size = {}, 0
        piece[key] = value
        size += len(value)
    if piece:
        yield piece
