"""The note beside a segment of how far it was durable: below that nothing is a torn write.

A write that was cut short leaves zeros, but a whole frame has sectors of zeros, too. Of the last
frame, behind which nothing stands, no look at its bytes can tell damage from a torn write for
certain. So what was fsynced is noted beside the segment: when it is closed, and about once a
second while it is written. Nobody waits for the note and it is not fsynced itself, so it may be
missing, or old: then it says less. It never says more, since it is written after the fsync; it
goes with its segment, and a new one of the same name begins without.
"""

import os
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from isal.isal_zlib import crc32

from tidewater_worker.log.syncpool import SyncPool

SUFFIX: Final = ".durable"
MAGIC: Final = b"TWDUR001"
NOTE_BYTES: Final = 20
NOTE_S: Final = 1.0
"""How long after a sync it is noted; all syncs meanwhile share the note."""


def note_durable(segment: Path, end: int) -> None:
    """Note that all messages below `end` were fsynced; without a note recovery knows less."""
    data = MAGIC + end.to_bytes(8, "little")
    with suppress(OSError):
        # Over the last one: a sector is written whole or not at all, and nothing is allocated.
        fd = os.open(segment.with_suffix(SUFFIX), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            os.pwrite(fd, crc32(data).to_bytes(4, "little") + data, 0)
        finally:
            os.close(fd)


def durable_end(segment: Path) -> int:
    """Return the offset below which a segment was fsynced for certain; 0 if nothing tells."""
    try:
        data = segment.with_suffix(SUFFIX).read_bytes()
    except OSError:
        return 0
    whole = len(data) == NOTE_BYTES and data[4:12] == MAGIC
    if not whole or crc32(data[4:]).to_bytes(4, "little") != data[:4]:
        return 0
    return int.from_bytes(data[12:], "little")


def forget_durable(segment: Path) -> None:
    """Remove the note, with its segment or before another one of that name is made."""
    segment.with_suffix(SUFFIX).unlink(missing_ok=True)


def why_lost(noted: int, end: int) -> str | None:
    """Say why a segment whose messages end at `end` has lost some; None if nothing tells."""
    return f"but messages below offset {noted} were fsynced" if end < noted else None


class Noting:
    """Has the end of a log that is written noted, now and then and by the way."""

    def __init__(
        self, loop: AbstractEventLoop, pool: SyncPool, note: Callable[[int], None]
    ) -> None:
        self._loop, self._pool, self._note = loop, pool, note
        self._end = 0
        self._timer: TimerHandle | None = None
        """Set from a sync until it is noted."""
        self._is_over = False

    def later(self, end: int) -> None:
        """Have it noted that all below `end` is durable; on the way of every group."""
        self._end = end
        if self._timer is None:
            self._timer = self._loop.call_later(NOTE_S, self._begin)

    def _begin(self) -> None:
        if not self._is_over:
            self._pool.aside(self._write)

    def _write(self) -> None:
        end = self._end
        self._note(end)
        with suppress(RuntimeError):  # the loop is over, and the log was not closed
            self._loop.call_soon_threadsafe(self._finish, end)

    def _finish(self, noted: int) -> None:
        self._timer = None
        if self._end > noted and not self._is_over:
            self.later(self._end)

    def stop(self) -> None:
        """Note nothing more: the log is closed."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
