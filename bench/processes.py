"""Processes that the benchmark starts, watches and ends: each by its own pid, never by name."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

END_WAIT_S: Final = 40.0
"""How long a process may take to end after SIGTERM before it is killed."""


def free_port() -> int:
    """Return a port on loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server in its own session, with its output in a file."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server that `start` started, and what it left behind."""
    if process.poll() is not None:
        # Its pid may be somebody else's by now; its children end with it.
        return
    family = _family(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_WAIT_S)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.is_running():
                member.kill()
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, user and system."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class CpuMeter:
    """Adds up the CPU time that a process spends while it is looked at."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._began = cpu_seconds(self._pid)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += cpu_seconds(self._pid) - self._began


def rss_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes; pages that they share count once for each."""
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)


class RssWatch:
    """Samples the resident memory of processes while something goes on."""

    def __init__(self, pids: list[int], period_s: float = 0.1) -> None:
        self._pids = pids
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.series: list[tuple[float, int]] = []
        """(seconds since the start, bytes)."""

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    @property
    def before(self) -> int:
        """Bytes at the start."""
        return self.series[0][1]

    @property
    def most(self) -> int:
        """The most bytes seen."""
        return max(size for _, size in self.series)

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.series.append((time.monotonic() - self._began, rss_bytes(self._pids)))
