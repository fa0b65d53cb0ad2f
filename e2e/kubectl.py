"""The cluster as the tests see it: `kubectl` for everything, in one namespace at a time.

No client library stands between the tests and the cluster: what a test does, a person can repeat
by hand from the command that a failure quotes. `get`, the look that is taken thousands of times, is
the one command that mostly needs no process (`looking.py`); it says what kubectl would say.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from e2e import looking
from tidewater_testing.process import die_with_parent, free_ports

COMMAND_S_MAX = 180.0
OUTPUT_SHOWN_MAX = 4_000
FORWARD_PAUSE_S = 0.2
FORWARD_CHECK_S = 0.5
FORWARD_ASK_S = 4.0
"""How long a forwarded port may say nothing, and how often it is asked."""
ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""Whoever listens answers this or hangs up, whatever it speaks."""
REPEATABLE = (
    {"get"}, {"apply"}, {"scale"}, {"rollout"}, {"wait"}, {"logs"},
    {"create", "token"}, {"patch", "--type=merge"}, {"annotate", "--overwrite"},
    {"delete", "--ignore-not-found"}, {"drain"}, {"uncordon"},
)  # fmt: skip
"""Words of commands that do no more the second time; the first is the verb."""
UNREACHED = re.compile(
    r"connection refused|connection reset|TLS handshake timeout|i/o timeout|unexpected EOF|: EOF"
    r"|http2: |etcdserver: |client rate limiter|server is currently unable|ServiceUnavailable"
)
"""Nobody answered on the way to the API server, or from there on: a busy machine's, for a while."""
ATTEMPTS = 4
ATTEMPT_PAUSE_S = 2.0

Object = dict[str, Any]
"""A Kubernetes object."""


class CommandError(AssertionError):
    """A command failed; the message quotes it and what it said."""


def run(command: Sequence[str], *, text: str | None = None, timeout_s: float = 60.0) -> str:
    """Run a program and return its output; raise `CommandError` when it fails."""
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-OUTPUT_SHOWN_MAX:]
        raise CommandError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


@dataclass(frozen=True)
class Kubectl:
    """`kubectl` bound to a kubeconfig and a namespace."""

    kubeconfig: Path
    namespace: str = "default"

    def within(self, namespace: str) -> "Kubectl":
        """Return the same cluster in another namespace."""
        return replace(self, namespace=namespace)

    def command(self, *args: str) -> list[str]:
        """Return the whole command line."""
        return [
            "kubectl",
            f"--kubeconfig={self.kubeconfig}",
            f"--namespace={self.namespace}",
            *args,
        ]

    def __call__(
        self, *args: str, text: str | None = None, timeout_s: float = COMMAND_S_MAX
    ) -> str:
        """Run kubectl and return its output; what can be asked again is, if nobody answered."""
        is_repeatable = any(args[0] in words and words <= set(args) for words in REPEATABLE)
        for _ in range(ATTEMPTS - 1 if is_repeatable else 0):
            try:
                return run(self.command(*args), text=text, timeout_s=timeout_s)
            except CommandError as error:
                if not UNREACHED.search(str(error)):
                    raise
            time.sleep(ATTEMPT_PAUSE_S)
        return run(self.command(*args), text=text, timeout_s=timeout_s)

    def once(self, *args: str, timeout_s: float = COMMAND_S_MAX) -> str:
        """Run kubectl, without a second attempt: that nobody answers is an answer, too."""
        return run(self.command(*args), timeout_s=timeout_s)

    def get(self, *args: str, timeout_s: float = COMMAND_S_MAX) -> Object:
        """Return an object, or a list of them, as JSON gives it."""
        try:
            found: Object | None = looking.look(self.kubeconfig, self.namespace, args)
        except looking.RefusedError as error:
            command = " ".join(self.command("get", *args))
            raise CommandError(f"{command} ended with 1:\n{error}") from error
        if found is None:
            found = json.loads(self("get", *args, "--output=json", timeout_s=timeout_s))
            assert found is not None
        return found

    def apply(self, objects: Sequence[Object]) -> None:
        """Create or change objects by server-side apply."""
        text = yaml.safe_dump_all(objects, sort_keys=False)
        self("apply", "--server-side", "--force-conflicts", "--filename=-", text=text)

    def wait_ready(self, workload: str, timeout_s: float = 120.0) -> None:
        """Wait until a workload (`statefulset/worker`) has all its pods ready.

        Its status may be older than the end of a pod: the pods themselves are looked at, too.
        """
        deadline = time.monotonic() + timeout_s
        self(
            "rollout",
            "status",
            workload,
            f"--timeout={timeout_s:.0f}s",
            timeout_s=timeout_s + 10,
        )

        def all_there() -> bool:
            spec = self.get(workload)["spec"]
            labels = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
            pods = self.get("pods", f"--selector={labels}")["items"]
            return sum(map(is_pod_ready, pods)) >= int(spec["replicas"])

        left_s = max(deadline - time.monotonic(), 30.0)
        wait_for(all_there, left_s, f"all pods of {workload} to be ready")

    def python(self, pod: str, code: str, *args: str) -> str:
        """Run Python inside a pod: our images hold no other tool that could be relied upon."""
        return self("exec", pod, "--", "python", "-c", code, *args)

    def node_of(self, pod: str) -> str:
        """Return the name of the node that a pod runs on."""
        return str(self.get("pod", pod)["spec"]["nodeName"])

    def incarnation(self, pod: str) -> str:
        """Return what differs once another container of the pod runs: proof that it was restarted.

        A pod that was made a moment ago has none yet, and is waited for.
        """
        found: list[str] = []

        def runs() -> bool:
            statuses = self.get("pod", pod).get("status", {}).get("containerStatuses", [])
            found[:] = [one["containerID"] for one in statuses if "containerID" in one]
            return bool(found)

        wait_for(runs, 60, f"a container of {pod}")
        return found[0]


class PortForward:
    """A local port that leads to one ready pod of a selector, or to the next when that one is gone.

    kubectl mostly ends when its pod is gone, but after a deletion by force, or when the pod was
    given another sandbox (its node was restarted), it can stay and swallow connections: so the
    pod's identity and address are looked at, too. So it can when a process in the pod dies amid its
    answers: a port behind which nobody says anything, though the pod is ready, is opened anew. A
    client behind this port sees what any client sees when a worker is away: refused or broken
    connections.
    """

    def __init__(self, kubectl: Kubectl, selector: str, port: int) -> None:
        self._kubectl = kubectl
        self._selector = selector
        self._remote_port = port
        self.port = free_ports(1)[0]
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"forward-{selector}")

    @property
    def address(self) -> str:
        """`host:port` of this end."""
        return f"127.0.0.1:{self.port}"

    def _keep(self) -> None:
        while not self._stopping.is_set():
            ready = [pod for pod in self._pods() or () if is_pod_ready(pod)]
            try:
                if ready:
                    self._follow(min(ready, key=lambda pod: str(pod["metadata"]["name"])))
            except OSError:
                pass  # no process could be started just now
            self._stopping.wait(FORWARD_PAUSE_S)

    def _follow(self, pod: Object) -> None:
        """Forward to one pod until it is gone, or has another address."""
        mine = _whereabouts(pod)
        process = self._process = self._start(pod["metadata"]["name"])
        silences, ask_at = 0, time.monotonic() + FORWARD_ASK_S
        while not self._ended(process):
            pods = self._pods()
            if pods is None:
                continue
            found = [each for each in pods if _whereabouts(each) == mine]
            if found and time.monotonic() >= ask_at:
                # One that is paused is not ready for long, and is waited for.
                is_stuck = self._says_nothing() and is_pod_ready(found[0])
                silences = silences + 1 if is_stuck else 0
                ask_at = time.monotonic() + FORWARD_ASK_S
            if not found or silences >= 2:
                process.terminate()

    def _says_nothing(self) -> bool:
        """Tell whether a connection is taken, and then neither answered nor closed."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), FORWARD_ASK_S) as asking:
                asking.sendall(ASK)
                asking.recv(1)
        except TimeoutError:
            return True
        except OSError:
            return False
        return False

    def _ended(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of a process, but only so long; tell whether it came."""
        if self._stopping.is_set():
            process.terminate()
        try:
            process.wait(FORWARD_CHECK_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _start(self, pod: str) -> subprocess.Popen[bytes]:
        ports = f"{self.port}:{self._remote_port}"
        return subprocess.Popen(
            self._kubectl.command("port-forward", f"pod/{pod}", ports, "--address=127.0.0.1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Dies with this thread, which lives as long as the test run needs the port.
            preexec_fn=die_with_parent(os.getpid()) if sys.platform == "linux" else None,
        )

    def _pods(self) -> list[Object] | None:
        """Return the pods of the selector; None if nobody can tell."""
        try:
            found: list[Object] = self._kubectl.get(
                "pods", f"--selector={self._selector}", timeout_s=20
            )["items"]
        except (CommandError, subprocess.TimeoutExpired, OSError, ValueError):
            return None
        return found

    def __enter__(self) -> Self:
        """Start forwarding; the port may take a moment to answer."""
        self._keeper.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop forwarding and leave no process behind."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        self._keeper.join()


def _whereabouts(pod: Object) -> tuple[str, str]:
    return str(pod["metadata"]["uid"]), str(pod.get("status", {}).get("podIP"))


def is_pod_ready(pod: Object) -> bool:
    """Tell whether a pod takes requests and is not on its way out."""
    ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in pod["status"].get("conditions", ())
    )
    return ready and "deletionTimestamp" not in pod["metadata"]


def wait_for(
    condition: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.25
) -> None:
    """Poll until `condition()` holds, taking failed commands for "not yet".

    A look may be a process, or more: the interval leaves the cores to those waited for.
    """
    deadline = time.monotonic() + timeout_s
    last = ""
    while True:
        try:
            if condition():
                return
        except (CommandError, OSError, subprocess.TimeoutExpired) as error:
            last = str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}. {last}".rstrip())
        time.sleep(interval_s)
