"""One server process under a test's control: started, waited for, killed, never left behind.

Every process is told by the kernel to die with the test run (`PR_SET_PDEATHSIG`), so that even
a pytest that was killed with -9 leaves nothing running.
"""

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LOG_TAIL_BYTES = 4_000
PORTS = range(10_000, 32_000)
"""Below those that the kernel hands out."""


class PartFailedError(RuntimeError):
    """A real part did not start, or died when it should not; the message carries its log's end."""


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Return what a child runs before exec so that the kernel kills it when `parent_pid` dies."""

    def arm() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died between fork and prctl
            os._exit(1)

    return arm


def _ports_of_this_process() -> Iterator[int]:
    """Give ports one after the other: those that are chosen for a part come back last.

    Who asks the kernel for any free port (`bind` to 0, or a client that connects) gets others, and
    so does the other process of a test run: nobody takes a port before its part has it.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = PORTS[process % 2 :: 2]
    begin = os.getpid() * 37 % len(mine)
    return itertools.cycle((*mine[begin:], *mine[:begin]))


_PORTS = _ports_of_this_process()


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports of the loopback that were free a moment ago."""
    found: list[int] = []
    while len(found) < count:
        port = next(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.05
) -> None:
    """Poll until `condition` holds; past `timeout_s` raise `TimeoutError` that names `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            msg = f"waited {timeout_s:g} s for {what}"
            raise TimeoutError(msg)
        time.sleep(interval_s)


def alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie that waits for its parent does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class ManagedProcess:
    """A child process with its own log file; as a context manager it is gone at the end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        stop_timeout_s: float = 15.0,
    ) -> None:
        self.command = [str(word) for word in command]
        self.log_file = log_file
        self._environment = {**os.environ, **(environment or {})}
        self._directory = directory
        self._stop_timeout_s = stop_timeout_s
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the process; the log file is appended to, so a restart keeps the story."""
        assert self._child is None or self._child.poll() is not None, "already running"
        with self.log_file.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._directory,
                preexec_fn=die_with_parent(os.getpid()),
            )
        return self

    @property
    def pid(self) -> int:
        """The process id of the running (or last) child."""
        assert self._child is not None, "not started"
        return self._child.pid

    def running(self) -> bool:
        """Tell whether the child is there."""
        return self._child is not None and self._child.poll() is None

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for `ready`; a child that dies meanwhile is reported at once with its log."""

        def ready_or_dead() -> bool:
            if not self.running():
                raise PartFailedError(f"{what}: the process ended\n{self.log_tail()}")
            return ready()

        try:
            wait_until(ready_or_dead, timeout_s, what)
        except TimeoutError as error:
            raise PartFailedError(f"{error}\n{self.log_tail()}") from error
        finally:
            if sys.exc_info()[0] is not None:
                self.kill()  # nobody will: the context was never entered

    def kill(self) -> None:
        """End the child with SIGKILL and reap it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def stop(self) -> int:
        """Ask with SIGTERM, insist with SIGKILL past the time limit; returns the exit code."""
        assert self._child is not None, "not started"
        if self._child.poll() is None:
            self._child.terminate()
        try:
            return self._child.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def wait(self, timeout_s: float) -> int:
        """Wait for the child to end by itself."""
        assert self._child is not None, "not started"
        return self._child.wait(timeout_s)

    def log_tail(self) -> str:
        """Return the end of the log file, for failure messages."""
        if not self.log_file.exists():
            return "(no log)"
        return self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
