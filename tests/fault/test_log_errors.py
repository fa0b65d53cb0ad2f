"""Every system call by which the log writes fails once, in turn.

A full disk (ENOSPC) must refuse the request and nothing else: sent again, it is stored. Any other
error stops the partition, since nobody knows what the disk holds; reopened, it has all that was
acknowledged. A request is never stored twice and an offset never given twice. A call that writes
less than it is given, which POSIX allows at any time, is no error: the rest is written after it.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.errors import Corrupt, OutcomeUnknown, Retryable
from tidewater_testing import logs
from tidewater_worker.log.recover import Recovered

SEGMENT_BYTES = 6_000
BATCHES = [
    [f"a:{batch * 3 + row:09d}:".encode().ljust(400, b"x") for row in range(3)]
    for batch in range(14)
]
WRITES = ("pwritev", "pwrite", "write", "open", "rename")
SYNCS = ("fsync", "fdatasync")

pytestmark = pytest.mark.timeout(240)


class Faults:
    """Counts calls below a directory and lets one of them fail."""

    def __init__(self, fail_at: int, number: int) -> None:
        self.calls = 0
        self.failed = ""
        self._fail_at = fail_at
        self._errno = number

    def hit(self, name: str) -> None:
        """Count a call; raise if it is the one."""
        self.calls += 1
        if self.calls == self._fail_at:
            self.failed = name
            raise OSError(self._errno, os.strerror(self._errno), name)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Make a call countable; opening for reading is not a write."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or (len(args) > 1 and args[1] & os.O_CREAT):
                self.hit(name)
            return real(*args, **kwargs)

        return call


class ShortWrites:
    """Counts writes and lets one of them take half of its bytes; perhaps the disk is full then."""

    def __init__(self, short_at: int, *, then_full: bool) -> None:
        self.calls = 0
        self._short_at, self._then_full = short_at, then_full

    def wrap(self, real: Callable[..., int]) -> Callable[..., int]:
        """Make a call count."""

        def call(fd: int, data: Any, *at: int) -> int:
            self.calls += 1
            if self._then_full and self.calls == self._short_at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.calls != self._short_at:
                return real(fd, data, *at)
            whole = b"".join(data) if isinstance(data, list | tuple) else bytes(data)
            half = whole[: len(whole) // 2]
            return real(fd, [half] if isinstance(data, list | tuple) else half, *at)

        return call


@contextmanager
def _faulty(names: tuple[str, ...], fail_at: int, number: int) -> Iterator[Faults]:
    faults = Faults(fail_at, number)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, faults.wrap(name, getattr(os, name)))
        if "write" in names:
            real = Path.write_bytes

            def write_bytes(path: Path, data: bytes) -> int:
                faults.hit(f"write_bytes {path.suffix}")
                return real(path, data)

            patch.setattr(Path, "write_bytes", write_bytes)
        yield faults


async def _write_all(directory: Path, names: tuple[str, ...], fail_at: int, number: int) -> str:
    """Write every batch; returns the call that failed, an empty string if none did."""
    recovered = logs.reopen(directory)
    with _faulty(names, fail_at, number) as faults:
        await _send_all(directory, recovered)
    return faults.failed


async def _send_all(directory: Path, recovered: Recovered) -> int:
    """Send every batch, again if the disk is full; returns how often it was."""
    refused = 0
    async with logs.appending(directory, recovered, SEGMENT_BYTES) as appender:
        for sequence, batch in enumerate(BATCHES):
            try:
                stored = await logs.offer(appender, logs.make_submission(sequence, batch, "p"))
            except Retryable as error:
                if error.reason != "LogDiskFull":
                    raise
                refused += 1
                stored = await logs.offer(appender, logs.make_submission(sequence, batch, "p"))
            assert stored.offset == sequence * 3, "an offset was skipped"
        await appender.close()
    return refused


def _assert_whole(directory: Path, what: str) -> None:
    wanted = [payload for batch in BATCHES for payload in batch]
    recovered = logs.reopen(directory)
    assert recovered.next_offset == len(wanted), f"G1 Durable: {what}"
    rows = logs.rows_by_reader(directory, len(wanted))
    assert logs.payloads_of(rows) == wanted, f"G1 Durable: {what}"
    assert rows == logs.rows_by_checker(directory), what


def test_a_full_disk_at_any_call_costs_one_refusal() -> None:
    """ENOSPC once, at each call that writes, until no call is left to fail."""
    with logs.memory_directory() as memory:
        failed: list[str] = []
        while True:
            directory = memory / str(len(failed))
            directory.mkdir()
            name = asyncio.run(_write_all(directory, WRITES, len(failed) + 1, errno.ENOSPC))
            _assert_whole(directory, f"call {len(failed) + 1} ({name}) found the disk full")
            if not name:
                break
            failed.append(name)
        assert {"pwritev", "open", "write_bytes .idx"} <= set(failed), failed
        assert len(failed) > 20, failed


@pytest.mark.parametrize("then_full", [False, True])
def test_a_write_that_takes_half_of_its_bytes_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, then_full: bool
) -> None:
    """At each call that writes; if the disk is full behind it, one refusal."""
    refusals = 0
    with logs.memory_directory() as memory:
        for short_at in range(1, 200):
            directory = memory / str(short_at)
            directory.mkdir()
            writes = ShortWrites(short_at, then_full=then_full)
            recovered = logs.reopen(directory)
            with monkeypatch.context() as patch:
                for name in ("write", "pwrite", "pwritev"):
                    patch.setattr(os, name, writes.wrap(getattr(os, name)))
                refused = asyncio.run(_send_all(directory, recovered))
            _assert_whole(directory, f"write {short_at} took half of its bytes")
            refusals += refused
            assert refused <= then_full
            if writes.calls < short_at:
                break
    assert short_at > 20, "headers and frames"
    assert bool(refusals) == then_full


def test_an_error_of_a_sync_stops_the_partition_and_loses_nothing() -> None:
    """EIO once, at each fsync and fdatasync: stopped; reopened, it goes on where it was."""
    with logs.memory_directory() as memory:
        stopped = 0
        for fail_at in range(1, 200):
            directory = memory / str(fail_at)
            directory.mkdir()
            acked, failed = asyncio.run(_write_until_stopped(directory, fail_at))
            if not failed:
                break
            stopped += 1
            what = f"sync {fail_at} ({failed}) failed"
            recovered = logs.reopen(directory)
            assert recovered.next_offset >= acked * 3, f"G1 Durable: {what}"
            sent = asyncio.run(_write_all(directory, (), 0, 0))
            assert not sent
            _assert_whole(directory, what)
        assert stopped > 15


async def _write_until_stopped(directory: Path, fail_at: int) -> tuple[int, str]:
    """Write until a request fails; returns how many were acknowledged, and what failed."""
    recovered = logs.reopen(directory)
    acked = 0
    with _faulty(SYNCS, fail_at, errno.EIO) as faults:
        async with logs.appending(directory, recovered, SEGMENT_BYTES) as appender:
            try:
                for sequence, batch in enumerate(BATCHES):
                    await logs.offer(appender, logs.make_submission(sequence, batch, "p"))
                    acked += 1
            except (OutcomeUnknown, Corrupt):
                assert faults.failed
                more = logs.make_submission(99, [b"x:0:"], "q")
                with pytest.raises((OutcomeUnknown, Corrupt)):
                    await logs.offer(appender, more)
            else:
                assert not faults.failed, f"{faults.failed} failed and nobody was told"
    return acked, faults.failed


def test_a_full_disk_at_the_start_keeps_no_log_closed(tmp_path: Path) -> None:
    """The index that found no room when its segment was sealed finds none at the start either."""
    directory = tmp_path / "log"
    directory.mkdir()
    assert not asyncio.run(_write_all(directory, (), 0, 0))
    indexes = sorted(directory.glob("*.idx"))
    assert len(indexes) > 1
    for index in indexes:
        index.write_bytes(b"")  # what a full disk left of it
    with _always_full():
        recovered = logs.reopen(directory)
    assert recovered.next_offset == len(BATCHES) * 3
    _assert_whole(directory, "the index had no room")
    assert all(index.stat().st_size for index in indexes), "made up for when there was room"


def test_a_torn_tail_on_a_full_disk_leaves_no_heap_of_copies(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    directory.mkdir()
    assert not asyncio.run(_write_all(directory, (), 0, 0))
    last = max(directory.glob("*.wal"))
    last.with_suffix(".durable").unlink()
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 100)
    real = os.fsync

    def fsync(fd: int) -> None:
        if ".broken" in os.readlink(f"/proc/self/fd/{fd}"):
            _full()
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                logs.reopen(directory)
    assert not list(directory.glob("*.broken*"))
    logs.reopen(directory)
    assert len(list(directory.glob("*.broken*"))) == 1, "the evidence"


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _always_full() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", _full)
        patch.setattr(Path, "write_text", _full)
        yield
