"""What may happen to a cluster, as functions; what must be undone is a context manager.

Processes inside a pod are signalled by `kubectl exec` (same user, same process namespace). PID 1
cannot be killed from inside, so `kill_container` goes through the node, which on kind is a
container of this machine.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from e2e import kind
from e2e.kubectl import CommandError, Kubectl, run, wait_for
from e2e.tenant import RUN_DIR, WORKER_POD

NODE_S_MAX = 180.0
SIGNAL = "import os, sys; os.kill(int(open(sys.argv[1]).read()), int(sys.argv[2]))"
FILL = """
import os, sys
path, leave = sys.argv[1], int(sys.argv[2])
free = os.statvfs(os.path.dirname(path))
size = free.f_bavail * free.f_frsize - leave
with open(path, "wb") as file:
    os.posix_fallocate(file.fileno(), 0, max(size, 1))
"""
UNFILL = "import pathlib, sys; pathlib.Path(sys.argv[1]).unlink(missing_ok=True)"


def delete_pod(kubectl: Kubectl, pod: str = WORKER_POD, *, grace: bool = True) -> bool:
    """Delete a pod; without grace its processes are killed at once. Returns when it is gone.

    False: it was not there (any more), so nothing was done.
    """
    uid = _pod_uids(kubectl).get(pod)
    if uid is None:
        return False
    force = [] if grace else ["--grace-period=0", "--force"]
    said = kubectl("delete", "pod", pod, "--wait=false", "--ignore-not-found", *force)
    wait_for(lambda: uid not in _pod_uids(kubectl).values(), 120, f"pod {pod} to go")
    return "deleted" in said


def kill_pod(kubectl: Kubectl, pod: str = WORKER_POD, *, grace: bool = True) -> None:
    """Delete a pod that a controller makes again, waiting for it if that is just being done."""
    wait_for(lambda: delete_pod(kubectl, pod, grace=grace), 180, f"pod {pod} to be there")


def _pod_uids(kubectl: Kubectl) -> dict[str, str]:
    pods = kubectl.get("pods")["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def signal_process(
    kubectl: Kubectl, role: str, number: signal.Signals, pod: str = WORKER_POD
) -> None:
    """Send a signal to the `edge` or `table` process of a worker."""
    kubectl.python(pod, SIGNAL, f"{RUN_DIR}/{role}.pid", str(int(number)))


def kill_process(kubectl: Kubectl, role: str, pod: str = WORKER_POD) -> None:
    """Kill one process of a worker with SIGKILL, waiting for it if it is just being restarted."""

    def killed() -> bool:
        signal_process(kubectl, role, signal.SIGKILL, pod)
        return True

    wait_for(killed, 30, f"the {role} process to be there")


@contextmanager
def paused_process(kubectl: Kubectl, role: str, pod: str = WORKER_POD) -> Iterator[None]:
    """Stop one process of a worker in its tracks, and let it go on at the end."""

    def signalled(number: signal.Signals) -> bool:
        signal_process(kubectl, role, number, pod)
        return True

    what = f"the {role} process to be there"
    wait_for(lambda: signalled(signal.SIGSTOP), 30, what)
    try:
        yield
    finally:
        wait_for(lambda: signalled(signal.SIGCONT), 60, what)


def kill_container(kubectl: Kubectl, container: str, pod: str = WORKER_POD) -> None:
    """Kill PID 1 of a container, and so all of it, with SIGKILL from the node."""
    _signal(_first_process(kubectl, container, pod), "KILL")


@contextmanager
def paused_container(kubectl: Kubectl, container: str, pod: str) -> Iterator[None]:
    """Stop PID 1 of a container in its tracks, and let it go on at the end."""
    process = _first_process(kubectl, container, pod)
    _signal(process, "STOP")
    try:
        yield
    finally:
        with suppress(CommandError):  # its probes may have had it killed meanwhile
            _signal(process, "CONT")


def _first_process(kubectl: Kubectl, container: str, pod: str) -> tuple[str, str]:
    """Return the node and, as that one counts, PID 1 of a container."""
    node = kubectl.node_of(pod)
    found: list[str] = []

    def runs() -> bool:
        statuses = kubectl.get("pod", pod)["status"].get("containerStatuses", ())
        (one,) = [each for each in statuses if each["name"] == container] or [{}]
        if "running" not in one.get("state", {}):
            return False
        name = one["containerID"].rpartition("/")[2]
        inspect = ["crictl", "inspect", "--output=go-template", "--template={{.info.pid}}", name]
        found.append(run([kind.container_cli(), "exec", node, *inspect]).strip())
        return found[-1].isdigit() and int(found[-1]) > 0

    wait_for(runs, 60, f"the container {container} of {pod} to run")
    return node, found[-1]


def _signal(process: tuple[str, str], name: str) -> None:
    node, pid = process
    run([kind.container_cli(), "exec", node, "kill", f"-{name}", pid])


@contextmanager
def drained_node(kubectl: Kubectl, node: str) -> Iterator[None]:
    """Cordon and drain a node; its pods with local volumes wait until it is back."""
    how = ("--ignore-daemonsets", "--delete-emptydir-data", "--force")
    try:
        kubectl("drain", node, *how, f"--timeout={NODE_S_MAX:.0f}s", timeout_s=NODE_S_MAX + 10)
        yield
    finally:
        kubectl("uncordon", node)


def restart_node(kubectl: Kubectl, node: str) -> None:
    """Restart the machine (on kind: the container) and wait until its node is ready again.

    No shutdown in good order is asked for: everything on it is killed at once.
    """
    run([kind.container_cli(), "restart", "--time=0", node], timeout_s=NODE_S_MAX)
    # A node counts as ready for 40 s after it died: only a lease renewed since then proves it.
    before = _last_seen(kubectl, node)
    wait_for(
        lambda: _last_seen(kubectl, node) > before and _is_ready(kubectl, node),
        NODE_S_MAX,
        f"node {node} to be ready",
        interval_s=1.0,
    )


def _last_seen(kubectl: Kubectl, node: str) -> str:
    """Return when the kubelet of a node last said that it is there."""
    lease = kubectl.within("kube-node-lease").get("lease", node)
    return str(lease["spec"]["renewTime"])


def _is_ready(kubectl: Kubectl, node: str) -> bool:
    conditions = kubectl.get("node", node)["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@contextmanager
def stopped_part(kubectl: Kubectl, workload: str) -> Iterator[None]:
    """Stop a part (`statefulset/tidewater-etcd`) and start it again at the end.

    It is killed after a second: how long it would take in good order is not what is tested.
    """
    labels = f"app.kubernetes.io/component={workload.rpartition('-')[2]}"

    def stopped() -> bool:
        return not kubectl.get("pods", f"--selector={labels}")["items"]

    try:
        # First: the time that a pod has is not made shorter while it is ending. And not by force:
        # then it would count as gone while its processes may still answer.
        kubectl("delete", "pods", f"--selector={labels}", "--grace-period=1", "--wait=false")
        kubectl("scale", workload, "--replicas=0")
        wait_for(stopped, 120, f"{workload} to stop")
        yield
    finally:
        kubectl("scale", workload, "--replicas=1")
        kubectl.wait_ready(workload, timeout_s=180)


@contextmanager
def filled_volume(
    kubectl: Kubectl, directory: str, leave_bytes: int, pod: str = WORKER_POD
) -> Iterator[None]:
    """Fill the volume of a directory but for some bytes, and free it at the end."""
    path = f"{directory}/filler"
    kubectl.python(pod, FILL, path, str(leave_bytes))
    try:
        yield
    finally:
        wait_for(lambda: _freed(kubectl, pod, path), 60, "the volume to be freed")


def _freed(kubectl: Kubectl, pod: str, path: str) -> bool:
    kubectl.python(pod, UNFILL, path)
    return True
