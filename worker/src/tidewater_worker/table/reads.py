"""How many files of a topic are read at once, and what of them is decoded once for many readers."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from tidewater_worker.table.ranges import Lru

SHARED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Decoded row groups that readers share, over all topics."""
SHARED_GROUP_BYTES_MAX: Final = 4 * 1024 * 1024
"""Larger row groups are not shared: whoever reads those is on its way through old history, and
alone there. What live followers read together is as small as a commit."""


class Reads:
    """Bounds the reads of one topic that are under way (`reader.maxConcurrentReads`)."""

    def __init__(self, reads_max: Callable[[], int]) -> None:
        self._reads_max = reads_max
        """Asked each time: the topic's spec may change."""
        self._count = 0
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for a turn, and read. Whoever has one waits for no other."""
        with self._changed:
            while self._count >= max(1, self._reads_max()):
                self._changed.wait()
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify()


class Decoded:
    """Row groups decoded lately, and those that are being decoded: each once for all readers."""

    def __init__(self) -> None:
        self._kept: Lru[pa.Table] = Lru(SHARED_BYTES_MAX)
        self._making: dict[str, Future[pa.Table]] = {}
        self._lock = threading.Lock()

    def get(self, key: str, nbytes: int, make: Callable[[], pa.Table]) -> pa.Table:
        """Return a decoded row group, decoding it if nobody has or does."""
        if nbytes > SHARED_GROUP_BYTES_MAX:
            return make()
        mine = Future[pa.Table]()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                return found
            making = self._making.setdefault(key, mine)
        if making is not mine:
            return making.result()
        try:
            rows = make()
            self._kept.put(key, rows, nbytes)
            mine.set_result(rows)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._making[key]
        return rows
