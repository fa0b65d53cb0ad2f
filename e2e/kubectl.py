"""The cluster as the tests see it: `kubectl` for everything, in one namespace at a time.

No client library stands between the tests and the cluster: what a test does, a person can repeat
by hand from the command that a failure quotes.
"""

import json
import os
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

from tidewater_testing.process import die_with_parent, free_ports

COMMAND_S_MAX = 180.0
OUTPUT_SHOWN_MAX = 4_000
FORWARD_PAUSE_S = 0.2
FORWARD_CHECK_S = 3.0

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
        """Run kubectl and return its output."""
        return run(self.command(*args), text=text, timeout_s=timeout_s)

    def get(self, *args: str) -> Object:
        """Return an object, or a list of them, as JSON gives it."""
        found: Object = json.loads(self("get", *args, "--output=json"))
        return found

    def apply(self, objects: Sequence[Object]) -> None:
        """Create or change objects by server-side apply."""
        text = yaml.safe_dump_all(objects, sort_keys=False)
        self("apply", "--server-side", "--force-conflicts", "--filename=-", text=text)

    def wait_ready(self, workload: str, timeout_s: float = 120.0) -> None:
        """Wait until a workload (`statefulset/worker`) has all its pods ready."""
        self(
            "rollout",
            "status",
            workload,
            f"--timeout={timeout_s:.0f}s",
            timeout_s=timeout_s + 10,
        )

    def python(self, pod: str, code: str, *args: str) -> str:
        """Run Python inside a pod: our images hold no other tool that could be relied upon."""
        return self("exec", pod, "--", "python", "-c", code, *args)

    def node_of(self, pod: str) -> str:
        """Return the name of the node that a pod runs on."""
        return str(self.get("pod", pod)["spec"]["nodeName"])

    def incarnation(self, pod: str) -> str:
        """Return what differs after a restart of the pod's container: proof that it happened."""
        status = self.get("pod", pod)["status"]["containerStatuses"][0]
        return str(status.get("containerID", ""))


class PortForward:
    """A local port that leads to one ready pod of a selector, or to the next when that one is gone.

    kubectl mostly ends when its pod is gone, but after a deletion by force it can stay and swallow
    connections, so the pod's identity is looked at, too. A client behind this port sees what any
    client sees when a worker is away: refused or broken connections.
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
            if ready:
                self._follow(min(ready, key=lambda pod: str(pod["metadata"]["name"])))
            self._stopping.wait(FORWARD_PAUSE_S)

    def _follow(self, pod: Object) -> None:
        """Forward to one pod until it is gone."""
        uid = pod["metadata"]["uid"]
        process = self._process = self._start(pod["metadata"]["name"])
        while not self._ended(process):
            pods = self._pods()
            if pods is not None and uid not in {each["metadata"]["uid"] for each in pods}:
                process.terminate()

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
        query = ("get", "pods", f"--selector={self._selector}", "--output=json")
        try:
            found: list[Object] = json.loads(self._kubectl(*query, timeout_s=20))["items"]
        except (CommandError, subprocess.TimeoutExpired):
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


def is_pod_ready(pod: Object) -> bool:
    """Tell whether a pod takes requests and is not on its way out."""
    ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in pod["status"].get("conditions", ())
    )
    return ready and "deletionTimestamp" not in pod["metadata"]


def wait_for(
    condition: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.2
) -> None:
    """Poll until `condition()` holds, taking failed commands for "not yet"."""
    deadline = time.monotonic() + timeout_s
    last = ""
    while True:
        try:
            if condition():
                return
        except (CommandError, OSError) as error:
            last = str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}. {last}".rstrip())
        time.sleep(interval_s)
