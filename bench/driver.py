"""Orders to a client process and its answers: one JSON object a line, over stdin and stdout.

A client is a process of its own, so that its CPU time is its own and not the servers'. It stays
alive between orders, so that rounds of different systems can alternate without paying for starts.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Op = Callable[..., dict[str, Any]]


class Driver:
    """A client process, seen from the benchmark."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.name = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.drivers.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, op: str, **arguments: Any) -> None:
        """Send an order without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest order."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client {self.name} ended (code {self._process.poll()})")
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise RuntimeError(f"the client {self.name} failed:\n{found['failed']}")
        return found

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send an order and return the answer."""
        self.tell(op, **arguments)
        return self.answer()

    def close(self) -> None:
        """Let the client end; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


def serve(ops: dict[str, Op]) -> None:
    """Take orders until stdin ends. `cpu_s` of the process is added to every answer."""
    # Whatever a library prints must not get between the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            began = time.process_time()
            answer = ops[order.pop("op")](**order)
            answer["cpu_s"] = time.process_time() - began
        except Exception:  # noqa: BLE001  (whatever it is, the benchmark must be told)
            answer = {"failed": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
        out.flush()
