"""Keeps a worker's two processes running. Standard library only: it must cost nothing and not fail.

    supervisor ─┬─ edge   (log, HTTP)
                └─ table  (Iceberg)

Either may die at any time; it is started again, after a pause that grows while it keeps dying.
On SIGTERM the edge drains first and the table process commits what it drained. If the supervisor
itself dies, the kernel ends both.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

RESTART_S: Final = 0.1
RESTART_S_MAX: Final = 5.0
HEALTHY_S: Final = 10.0
"""A process that ran this long is started again at once."""
POLL_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1
_ROLES: Final = {"table": "tidewater_worker.table.process", "edge": "tidewater_worker.edge"}


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the supervisor is gone (runs in the child)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Child:
    """One process and when to start it again."""

    def __init__(self, role: str, settings: Path, run_dir: Path) -> None:
        self.role = role
        self._command = [sys.executable, "-m", _ROLES[role], str(settings)]
        self._pid_file = run_dir / f"{role}.pid"
        self.process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._start_at = 0.0
        self._pause_s = RESTART_S

    def tend(self) -> None:
        """Start it if it is not running and its pause is over."""
        now = time.monotonic()
        if self.process is not None:
            status = self.process.poll()
            if status is None:
                return
            print(f"{self.role} ended with status {status}", file=sys.stderr, flush=True)  # noqa: T201
            self.process = None
            if now - self._started > HEALTHY_S:
                self._pause_s = RESTART_S
            self._start_at = now + self._pause_s
            self._pause_s = min(self._pause_s * 2, RESTART_S_MAX)
        if now >= self._start_at:
            self._started = now
            # The command is ours; the group is its own so that Ctrl-C reaches the supervisor alone.
            self.process = subprocess.Popen(
                self._command,
                preexec_fn=_die_with_parent,
                process_group=0,
            )
            self._pid_file.write_text(f"{self.process.pid}\n")

    def stop(self, seconds: float) -> None:
        """End it with SIGTERM, after a while with SIGKILL."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def supervise(settings: Path, run_dir: Path, shutdown_deadline_s: float) -> int:
    """Run both processes until SIGTERM or SIGINT."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "supervisor.pid").write_text(f"{os.getpid()}\n")
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    children = [_Child(role, settings, run_dir) for role in _ROLES]
    while not stopping:
        for child in children:
            child.tend()
        # SIGCHLD is not needed: a pause of this length is not noticed by anybody.
        with contextlib.suppress(InterruptedError):
            time.sleep(POLL_S)
    deadline = time.monotonic() + shutdown_deadline_s
    for child in reversed(children):  # the edge first: what it drains is committed by the other
        child.stop(deadline - time.monotonic())
    for child in children:
        (run_dir / f"{child.role}.pid").unlink(missing_ok=True)
    return 0


def replace_process(settings: Path, run_dir: Path, shutdown_deadline_s: float) -> NoReturn:
    """Become the supervisor: the caller's imports must not stay in memory for its whole life."""
    arguments = [str(settings), str(run_dir), str(shutdown_deadline_s)]
    os.execv(sys.executable, [sys.executable, "-m", "tidewater_worker.supervisor", *arguments])  # noqa: S606


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
